"""Nodes that load what another keeps in host memory, by name: tokens are those of one that computes all."""

from __future__ import annotations

import pytest

from tests.node.node_harness import make_client, make_prompt
from tests.offload.node_kit import patient, wipe
from tests.offload.test_node_pair import MODELS, node, until

SHAPES = {
    "16 to 64": ({"block_size": 16}, {"block_size": 64}),
    "64 to 16": ({"block_size": 64}, {"block_size": 16}),
    "kernel blocks": ({"block_size": 64, "kernel_block_sizes": (16,)}, {"block_size": 32}),
}


def pulled(model, ours, theirs):
    """A second turn on a node that never saw the first; tokens that it did not compute."""
    plain = make_client(model=model, enable_prefix_caching=False)
    keeps = patient(node("P", "kv_both", model=model, **ours))
    loads = patient(node("D", "kv_both", reserved_blocks=61, model=model, **theirs))
    try:
        first = make_prompt(300, seed=1)
        prompt = [*first, *keeps.ask(first, 30)[:30], *make_prompt(40, seed=2)]
        # Of host memory alone.
        wipe(keeps)
        address = keeps.engine.worker.address()
        loads.submit("pulled", prompt, 8, {"kv_sources": [f"{address.host}:{address.port}"]})
        until(lambda: loads.last("pulled"), keeps, loads)
        assert loads.last("pulled").failure is None
        assert loads.tokens("pulled") + loads.drafts("pulled") == plain.complete(prompt)
        until(lambda: not any([*keeps.busy().values(), *loads.busy().values()]), keeps, loads)
        for one in (keeps, loads):
            assert not any(one.engine.worker.state()[key] for key in ("leases", "sendings", "loads"))
        return loads.last("pulled").cached_tokens
    finally:
        keeps.close()
        loads.close()


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_that_another_node_keeps_is_loaded_from_there(model):
    assert pulled(model, {}, {}) >= 256


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_blocks_of_the_nodes_may_differ(shape):
    assert pulled("gqa", *SHAPES[shape]) >= 256


def test_nodes_with_other_salts_have_nothing_for_each_other():
    assert pulled("gqa", {"offload": {"salt": "a"}}, {"offload": {"salt": "b"}}) == 0
    assert pulled("gqa", {"offload": {"salt": "a"}}, {"offload": {"salt": "a"}}) >= 256

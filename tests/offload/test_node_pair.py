"""Nodes that keep blocks and give them to others: a prefill and a decode node, and pulls by name."""

from __future__ import annotations

import pytest

from tests.node.node_harness import make_prompt, until
from tests.offload.node_kit import (
    ORACLES,
    Keeper,
    disk_settings,
    expected,
    make_keeper,
    offload_config,
    patient,
    wipe,
)

TRANSFER = {"slot_bytes": 64 << 10, "stream_min_tokens": 100}
ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}


def node(name: str, role: str, offload: dict | None = None, **options) -> Keeper:
    config = offload_config(role, "memory", TRANSFER, **(offload or {}))
    return make_keeper(config, **options)


def pair(offload: dict | None = None, **options) -> tuple[Keeper, Keeper]:
    prefill = node("P", "kv_producer", offload, **options)
    return prefill, node("D", "kv_consumer", reserved_blocks=61, **options)


def both(prefill: Keeper, decode: Keeper, prompt: list[int], name: str, max_tokens: int = 8) -> list[int]:
    """One request by both legs, one after the other, until nothing is left. D's tokens and drafts."""
    prefill.submit(name, prompt, 1, ASK_FOR_KV)
    until(lambda: prefill.last(name), prefill, decode)
    params = prefill.last(name).kv_transfer_params
    assert params is not None
    decode.submit(name, prompt, max_tokens, dict(params))
    until(lambda: decode.last(name), prefill, decode)
    assert decode.last(name).failure is None, decode.last(name).failure
    until(lambda: not (prefill.held or decode.held), prefill, decode)
    until(lambda: not any([*prefill.busy().values(), *decode.busy().values()]), prefill, decode)
    for client in (prefill, decode):
        assert not any(client.engine.worker.state()[key] for key in ("leases", "sendings", "loads"))
    return decode.tokens(name) + decode.drafts(name)


@pytest.mark.parametrize("model", ["gqa", "mixed", "sliding", "hybrid"])
def test_p_restores_what_it_hands_over_and_d_keeps_what_it_was_given(model):
    oracle = ORACLES[model]()
    prefill, decode = pair(model=model)
    first = make_prompt(300, seed=1)
    answer = both(prefill, decode, first, "first", 30)
    assert answer == expected(first, 30, model=model)
    oracle.add(first, [0])
    wipe(prefill)
    wipe(decode)
    longer = [*first, *make_prompt(90, seed=2)]
    assert both(prefill, decode, longer, "longer") == expected(longer, model=model)
    assert prefill.last("longer").cached_tokens == oracle.hit(longer) > 0
    # D was given or has computed all of this, and needs no P for it.
    wipe(decode)
    turn = [*first, *answer[:30], *make_prompt(20, seed=3)]
    assert decode.ask(turn) == expected(turn, model=model)
    assert decode.cached >= 256


def test_both_at_once_while_prompts_are_sent_as_they_are_computed(tmp_path):
    prefill, decode = pair(model="gqa", max_num_batched_tokens=64, offload=disk_settings(tmp_path))
    base = make_prompt(160, seed=7)
    both(prefill, decode, base, "base")
    wipe(prefill)
    address = prefill.engine.worker.address()
    prompts = {}
    for number in range(4):
        name, prompt = f"r{number}", [*base, *make_prompt(100 + 40 * number, seed=number)]
        prompts[name] = prompt
        told = {"transfer_id": name}
        prefill.submit(name, prompt, 1, {**ASK_FOR_KV, **told})
        told |= {"remote_host": address.host, "remote_port": address.port}
        decode.submit(name, prompt, 8, {"do_remote_prefill": True, "do_remote_decode": False, **told})
    until(lambda: all(decode.last(name) and prefill.last(name) for name in prompts), prefill, decode)
    until(lambda: not (prefill.held or decode.held), prefill, decode)
    for name, prompt in prompts.items():
        assert decode.last(name).failure is None
        assert decode.tokens(name) == expected(prompt)
        assert prefill.last(name).cached_tokens == 160
    until(lambda: not any([*prefill.busy().values(), *decode.busy().values()]), prefill, decode)


def test_a_request_that_d_cannot_fetch_is_restored_or_computed():
    """What P does not have any more D may have kept itself."""
    config = offload_config("kv_consumer", "memory", TRANSFER).replace(
        '"kv_connector_extra_config"', '"kv_load_failure_policy": "recompute", "kv_connector_extra_config"'
    )
    prefill = node("P", "kv_producer")
    decode = make_keeper(config, reserved_blocks=61)
    prompt = make_prompt(200, seed=1)
    tokens = both(prefill, decode, prompt, "first")
    prefill.submit("again", prompt, 1, ASK_FOR_KV)
    until(lambda: prefill.last("again"), prefill)
    params = dict(prefill.last("again").kv_transfer_params)
    prefill.close()
    wipe(decode)
    decode.submit("again", prompt, 8, params)
    until(lambda: decode.last("again"), decode)
    assert decode.tokens("again") == tokens
    until(lambda: not decode.held, decode)


def test_d_reuses_no_block_of_a_window_that_p_may_have_filled_in_part():
    """D's blocks are twice as long: where a window begins P has half of one, and others see more."""
    prefill = node("P", "kv_producer", model="sliding", block_size=16)
    more = {"enable_prefix_caching": True, "reserved_blocks": 61}
    decode = node("D", "kv_consumer", model="sliding", block_size=32, **more)
    prompt = make_prompt(251, seed=1)
    answer = both(prefill, decode, prompt, "first", 30)
    assert answer == expected(prompt, 30, model="sliding")
    # It sees 15 tokens before those that P had left.
    turn = [*prompt[:226], 7]
    assert decode.ask(turn, 30) == expected(turn, 30, model="sliding")
    assert decode.cached == 0
    turn = [*prompt[:226], 8]
    assert decode.ask(turn, 30) == expected(turn, 30, model="sliding")
    assert decode.cached == 224


def pulled(ours, theirs):
    """A second turn on a node that never saw the first; tokens that it did not compute."""
    keeps = patient(node("P", "kv_both", **ours))
    loads = patient(node("D", "kv_both", reserved_blocks=61, **theirs))
    first = make_prompt(300, seed=1)
    prompt = [*first, *keeps.ask(first, 30)[:30], *make_prompt(40, seed=2)]
    # Of host memory alone.
    wipe(keeps)
    address = keeps.engine.worker.address()
    loads.submit("pulled", prompt, 8, {"kv_sources": [f"{address.host}:{address.port}"]})
    until(lambda: loads.last("pulled"), keeps, loads)
    assert loads.last("pulled").failure is None
    assert loads.tokens("pulled") + loads.drafts("pulled") == expected(prompt)
    until(lambda: not any([*keeps.busy().values(), *loads.busy().values()]), keeps, loads)
    for one in (keeps, loads):
        assert not any(one.engine.worker.state()[key] for key in ("leases", "sendings", "loads"))
    return loads.last("pulled").cached_tokens


def test_kernel_blocks_of_the_nodes_may_differ():
    assert pulled({"block_size": 64, "kernel_block_sizes": (16,)}, {"block_size": 32}) >= 256


def test_nodes_with_other_salts_have_nothing_for_each_other():
    assert pulled({"offload": {"salt": "a"}}, {"offload": {"salt": "b"}}) == 0
    assert pulled({"offload": {"salt": "a"}}, {"offload": {"salt": "a"}}) >= 256

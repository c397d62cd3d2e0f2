"""Whole nodes over one store: a prompt that one of them has computed is not computed by the other."""

from __future__ import annotations

import pytest

from tests.node.node_harness import make_prompt
from tests.offload.node_kit import make_keeper
from tests.offload.store_master import StoreMaster, master_binary

pytestmark = pytest.mark.skipif(master_binary() is None, reason="no mooncake_master here")
PROMPT = make_prompt(200, seed=1)


@pytest.mark.parametrize("model", ["gqa", "hybrid"])
def test_a_prompt_that_another_node_computed_is_found(model):
    with StoreMaster() as master:
        store = {"store": master.address}
        first = make_keeper(model=model, offload={**store, "store_bytes": 64 << 20})
        try:
            tokens = first.ask(PROMPT)
            again = first.ask(PROMPT)
            cached = first.cached
            assert again == tokens
            assert cached > 100
            second = make_keeper(model=model, offload=store)
            try:
                assert second.ask(PROMPT) == tokens
                assert second.cached == cached
                # Another one knows nothing of it.
                other = make_keeper(model=model, offload={**store, "salt": "another"})
                try:
                    assert other.ask(PROMPT) == tokens
                    assert other.cached == 0
                finally:
                    other.close()
            finally:
                second.close()
        finally:
            first.close()


def test_a_node_whose_store_is_gone_computes():
    with StoreMaster() as master:
        keeper = make_keeper(offload={"store": master.address, "store_bytes": 64 << 20, "wait_s": 1.0})
        try:
            tokens = keeper.ask(PROMPT)
            master.kill()
            assert keeper.ask(PROMPT) == tokens
            # Host memory has it all the same.
            assert keeper.cached > 100
            assert len(keeper.ask(make_prompt(200, seed=2))) == len(tokens)
            assert keeper.cached == 0
        finally:
            keeper.close()

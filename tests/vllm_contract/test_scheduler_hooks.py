"""The scheduler half under the vLLM that is installed: its hooks in the order in which vLLM calls them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.v1.outputs import KVConnectorOutput

from kvconnect.offload.halves import SchedulerHalf
from kvconnect.vllm.connector import KVConnect
from kvconnect.vllm.filled import FilledBlocks
from kvconnect.vllm.recovery import Recovery
from kvconnect.vllm.steps import Steps
from tests.offload.half_kit import Kind, Stack

KEPT, MOVED = (0,), (0, 1)
"""A cache of which one group is replayed after a hit, unless a peer sends it."""


def connector(half: SchedulerHalf) -> KVConnect:
    made = object.__new__(KVConnect)
    made._scheduler, made._kept, made._moved = half, KEPT, MOVED
    made._cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace())])
    made._recovery = Recovery(expects=False, clock=lambda: 0.0)
    made._filled = FilledBlocks([True], is_zeroed_first=False)
    made._steps, made._takes_all_but_one = Steps(), False
    return made


def test_vllm_is_told_until_a_request_ends_that_its_restore_brought_no_replayed_group():
    """It asks before the blocks are given, and again once the load was reported, to replay the rest."""
    stack = Stack((Kind(4),), 8, num_blocks=400, local=False, lag=0.0, cancels=0.0)
    stack.add("first", range(64))
    stack.run(everything=True)
    hooks = connector(SchedulerHalf(None, stack.half))
    request = stack.add("again", range(64))
    assert hooks.get_num_new_matched_tokens(request, 0) == (56, True)
    assert hooks.get_loaded_kv_cache_group_ids(request) == KEPT
    hooks.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([*range(1, 17)],)), 56)
    assert hooks.get_loaded_kv_cache_group_ids(request) == KEPT
    hooks.update_connector_output(KVConnectorOutput(finished_recving={"again"}))
    assert hooks.get_loaded_kv_cache_group_ids(request) == KEPT

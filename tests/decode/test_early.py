"""Loads that begin before P holds what they fetch: how many there may be, and what the others wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvconnect.cache.retention import Window
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.decode.decode_requests import EarlyLoads
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.transfer.orders import Await, LetGo, Results
from kvconnect.transfer.stack import LongestRequest
from tests.halves.test_scheduler_half import Request, connector

FULL = KVCacheGroup(("f",), AttentionSpec(4, 1, 4, torch.float16))
WINDOW = KVCacheGroup(("w",), AttentionSpec(4, 1, 4, torch.float16, retention=Window(8)))
STATE = KVCacheGroup(("s",), StateSpec(4, ((4,),), (torch.float16,)))

LONGEST = LongestRequest(24, 24)


def half(num_blocks: int = 13, longest: LongestRequest | None = LONGEST, **extra: Any):
    """D's scheduler half. A request of 24 tokens needs 6 of the 12 blocks."""
    return connector("kv_consumer", (FULL,), num_blocks=num_blocks, longest=longest, **extra)


def announced(name: str, num_tokens: int = 12) -> Request:
    params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "transfer_id": name}
    return Request(name, num_tokens, params)


def begin(made: SchedulerHalf, request: Request) -> bool:
    """Whether a request gets blocks for its load."""
    count, _ = made.matched_tokens(request, 0)
    if count is None:
        return False
    blocks = list(range(1, 1 + -(-request.num_tokens // 4)))
    made.update_after_alloc(request, (blocks,), count)
    return True


def idle(made: SchedulerHalf) -> bool:
    return not any(made.state().values())


@pytest.mark.parametrize(
    ("given", "begun"),
    [
        ({}, [True, True, False]),
        ({"num_blocks": 1000, "max_loads": 3}, [True, True, False, False]),
        ({"longest": None}, [True, True, True, True, False]),
    ],
    ids=["room for the longest request", "a place among those that are fetched", "nothing is reserved"],
)
def test_early_loads_leave_room(given, begun):
    made = half(**given)
    assert [begin(made, announced(f"t{number}")) for number in range(len(begun))] == begun
    assert len(made.build_orders().loads) == sum(begun)


def test_what_has_to_wait_is_asked_for_once_and_begins_when_p_holds_it_or_never_will():
    made = half(num_blocks=7)
    request = announced("t")
    made.new_request(request)
    for _ in range(3):
        assert not begin(made, request)
    assert made.build_orders().awaited == (Await("transfer:t", ("", "127.0.0.1", 9), reports=True),)
    assert not begin(made, request)
    assert not made.build_orders()
    made.update_results(Results(settled=("transfer:of another", "transfer:t")))
    assert begin(made, request)
    assert len(made.build_orders().loads) == 1
    made.update_results(Results(received=("t",)))
    made.request_finished(request, ([],), delivered=True)
    assert idle(made)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_request_that_ends_while_it_waits_lets_go(is_asked):
    made = half(num_blocks=7)
    request = announced("t")
    assert not begin(made, request)
    if is_asked:
        made.build_orders()
        made.update_results(Results(settled=("transfer:t",)))
    made.request_finished(request, ([],), delivered=False)
    orders = made.build_orders()
    assert orders.let_go == (LetGo("transfer:t", ("", "127.0.0.1", 9)),)
    assert not orders.awaited
    assert idle(made)


def test_a_window_keeps_its_tokens_and_those_of_a_step():
    # 250 blocks of full attention, (8 + 20 + 4) / 4 of the window, one state.
    cache = KVCacheConfig(1 + 250 + 8 + 1 + 50, (FULL, WINDOW, STATE))
    early = EarlyLoads(cache, LongestRequest(1000, 20), max_loads=10)
    # 44 + 3 + 1 blocks are early enough, 47 + 3 + 1 are not.
    assert early.may_begin(176)
    assert not early.may_begin(188)

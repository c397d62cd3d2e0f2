"""Long prefills that a router announced: what the workers are told of them while they run."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.specs import AttentionSpec, KVCacheGroup
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Progress
from kvconnect.transfer.params import TRANSFER_KEY
from kvconnect.transfer.stack import Computed, Step
from tests.halves.test_scheduler_half import ATTENTION, STATE, Request, connector
from tests.halves.test_transfer_ids import ON_P, finish, idle

SMALL = KVCacheGroup(("b",), AttentionSpec(8, 2, 8, torch.float16))
HANDLE = "transfer:t-1"


def prefill_of(groups=(ATTENTION,), **extra):
    made = connector("kv_producer", groups, **{"stream_min_tokens": 32, **extra})
    made.build_orders()
    return made


def arrived(prefill, name="p", num_tokens=40, params=ON_P):
    request = Request(name, num_tokens, params)
    prefill.new_request(request)
    request.num_tokens = prefill.prefill_tokens(request)
    return request


def go_on(prefill, request_id, num_tokens, new_block_ids):
    prefill.launched(Step([Computed(request_id, num_tokens, new_block_ids)]))


def progress(*blocks, tokens=40, computed):
    return Progress(HANDLE, tokens, computed, tuple(GroupBlocks(g, first, ids) for g, first, ids in blocks))


def test_states_and_what_is_beyond_the_prompt_are_not_told():
    prefill = prefill_of((STATE, ATTENTION, SMALL))
    arrived(prefill)
    prefill.build_orders()
    go_on(prefill, "p", 100, ([5], [7, 8, 9, 10], [1, 2, 3]))
    go_on(prefill, "p", 101, ([6], [11], [4, 0, 6]))
    assert prefill.build_orders().progress == (
        progress((1, 0, (7, 8, 9)), (2, 0, (1, 2, 3)), tokens=39, computed=39),
        progress((2, 3, (4, 0)), tokens=39, computed=39),
    )
    go_on(prefill, "p", 102, ([6], [12], [13]))
    assert not prefill.build_orders()


@pytest.mark.parametrize(
    ("extra", "tokens", "params"),
    [
        ({}, 31, ON_P),
        ({}, 40, {"do_remote_decode": True}),
        ({}, 40, {**ON_P, TRANSFER_KEY: ""}),
        ({}, 40, {}),
        ({"stream_min_tokens": 0}, 40, ON_P),
    ],
    ids=["short", "not announced", "refused", "local", "off"],
)
def test_of_other_requests_nothing_is_told(extra, tokens, params):
    prefill = prefill_of(**extra)
    arrived(prefill, num_tokens=tokens, params=params)
    prefill.build_orders()
    assert "p" not in prefill.due
    assert not prefill.due
    go_on(prefill, "p", 40, ([7, 8, 9],))
    prefill.preempted("p")
    assert not prefill.build_orders()


@pytest.mark.parametrize("delivered", [True, False])
def test_what_was_not_told_before_the_end_is_not_told_after_it(delivered):
    prefill = prefill_of()
    request = arrived(prefill)
    go_on(prefill, "p", 20, ([7, 8],))
    prefill.preempted("p")
    go_on(prefill, "p", 40, ([7, 8, 9],))
    request.num_tokens += 1
    finish(prefill, request, ([7, 8, 9],), delivered=delivered)
    go_on(prefill, "p", 41, ([1],))
    prefill.preempted("p")
    orders = prefill.build_orders()
    assert (orders.progress, orders.preempted) == ((), ())
    assert (len(orders.holds), len(orders.withdrawn)) == ((1, 0) if delivered else (0, 1))
    assert "streaming" in prefill.state()
    assert not prefill.state()["streaming"]


def test_who_gets_no_lease_is_not_followed():
    prefill = prefill_of(max_leases=1)
    for number in range(2):
        arrived(prefill, f"p{number}", params={**ON_P, TRANSFER_KEY: f"t{number}"})
    assert list(prefill.due) == ["p0"]


@given(st.integers(0, 2**32 - 1))
def test_what_was_told_adds_up_to_what_a_request_has(seed):
    """Against a plain account of each request's blocks, and of what a worker makes of its orders."""
    rng = random.Random(seed)
    sizes = (16, 8)
    prefill = prefill_of((ATTENTION, SMALL))
    running, known, tokens = {}, {}, {}
    ids = iter(range(1, 10**6))

    def read():
        orders = prefill.build_orders()
        for handle in orders.preempted:
            known.pop(handle, None)
        for order in orders.progress:
            record = known.setdefault(order.handle, ([], []))
            tokens[order.handle] = (order.num_tokens, order.computed_tokens)
            for blocks in order.groups:
                assert blocks.first_block == len(record[blocks.group])
                record[blocks.group].extend(blocks.block_ids)

    for number in range(40):
        name = rng.choice(list(running)) if running else ""
        match rng.choice(["new", "on", "on", "on", "lose", "step"]):
            case "new" if len(running) < 4:
                made = arrived(
                    prefill, f"p{number}", rng.randint(32, 90), params={**ON_P, TRANSFER_KEY: str(number)}
                )
                running[made.request_id] = (made, [0, ([], [])], f"transfer:{number}")
            case "on" if running:
                request, state, _ = running[name]
                state[0] = min(state[0] + rng.randint(1, 40), request.num_tokens)
                new = []
                for group, size in enumerate(sizes):
                    wanted = -(-state[0] // size) - len(state[1][group])
                    new.append([next(ids) for _ in range(wanted)])
                    state[1][group].extend(new[-1])
                go_on(prefill, name, state[0], new if any(new) else None)
            case "lose" if running:
                if rng.random() < 0.5:
                    prefill.preempted(name)
                else:
                    # It is admitted anew: nobody says that it was preempted.
                    prefill.update_after_alloc(running[name][0], ([1], [1]), 0)
                running[name][1][:] = [0, ([], [])]
            case _:
                read()
    read()
    for request, (computed, blocks), handle in running.values():
        assert known.get(handle, ([], [])) == blocks
        if computed:
            assert tokens[handle] == (request.num_tokens, computed)
        finish(prefill, request, delivered=False)
    prefill.build_orders()
    assert idle(prefill)

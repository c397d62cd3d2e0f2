"""Several requests of one on P: one answer goes to the router, and one lease must do for all of them."""

from __future__ import annotations

import random

import pytest

from kvconnect.transfer.orders import Results
from kvconnect.transfer.params import HANDLE_KEY, TRANSFER_KEY
from tests.halves.test_scheduler_half import Request, connector

BLOCKS = ([1, 2, 3],)
ASK = {"do_remote_decode": True}


def prefill():
    return connector("kv_producer", parent_of=lambda request_id: request_id.partition("_")[2] or request_id)


def children(half, count=4, parent="p", params=ASK):
    made = [Request(f"{n}_{parent}", 41, dict(params)) for n in range(count)]
    for child in made:
        half.new_request(child)
    return made


def finish(half, child, *, delivered=True):
    return half.request_finished(child, BLOCKS, delivered=delivered)


def test_children_of_one_request_share_the_lease_of_the_first_that_ends():
    half = prefill()
    made = children(half)
    answers = [finish(half, child) for child in (made[2], made[0], made[3], made[1])]
    assert [kept for kept, _ in answers] == [True, False, False, False], "the others' blocks are free at once"
    assert all(params == answers[0][1] for _, params in answers), "whichever of them reaches the router"
    (hold,) = half.build_orders().holds
    assert (hold.request_id, hold.handle) == ("2_p", answers[0][1][HANDLE_KEY])
    assert half.state()["held"] == 1
    half.update_results(Results(sent=("2_p",)))
    assert not any(half.state().values())


def test_a_child_that_ends_after_the_lease_is_held_itself():
    half = prefill()
    first, late = children(half, 2)
    _, before = finish(half, first)
    half.update_results(Results(sent=("0_p",)))
    kept, after = finish(half, late)
    assert kept
    assert after[HANDLE_KEY] != before[HANDLE_KEY]
    half.update_results(Results(sent=("1_p",)))
    assert not any(half.state().values())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_children_of_a_request_with_a_transfer_id_share_what_the_first_promised(order, caplog):
    half = prefill()
    made = children(half, 3, params={**ASK, TRANSFER_KEY: "t"})
    answers = [finish(half, made[index]) for index in order]
    orders = half.build_orders()
    assert [hold.request_id for hold in orders.holds] == ["0_p"]
    assert len(orders.expected) == 1
    assert not orders.withdrawn
    assert not orders.failures, "they share the id rightly"
    assert not caplog.records
    assert answers[-1][1][TRANSFER_KEY] == "t", "vLLM answers with what its last child was given"
    half.update_results(Results(sent=("0_p",)))
    assert not any(half.state().values())


def test_whatever_the_order_one_lease_at_a_time_is_held_for_a_parent():
    rng = random.Random(3)
    for _ in range(200):
        half, held = prefill(), set()
        waiting = [child for parent in "pqr" for child in children(half, rng.randint(1, 4), parent)]
        rng.shuffle(waiting)
        while waiting or held:
            if held and rng.random() < 0.3:
                gone = rng.choice(sorted(held))
                held.discard(gone)
                half.update_results(Results(sent=(gone,)))
            elif waiting:
                child = waiting.pop()
                kept, params = finish(half, child, delivered=rng.random() < 0.9)
                if kept:
                    held.add(child.request_id)
                parents = [name.partition("_")[2] for name in held]
                assert len(set(parents)) == len(parents) == half.state()["held"]
                assert params is None or child.request_id.partition("_")[2] in parents
        assert not any(half.state().values())

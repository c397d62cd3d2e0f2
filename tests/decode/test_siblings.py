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
    """That of the first that ends; whichever of them reaches the router, it names that lease."""
    rng = random.Random(3)
    for _ in range(200):
        half, told, seen = prefill(), {}, set()
        waiting = [child for parent in "pqr" for child in children(half, rng.randint(1, 4), parent)]
        rng.shuffle(waiting)
        while waiting or told:
            if told and rng.random() < 0.3:
                gone, _ = told.pop(rng.choice(sorted(told)))
                half.update_results(Results(sent=(gone,)))
            elif waiting:
                child, is_delivered = waiting.pop(), rng.random() < 0.9
                parent = child.request_id.partition("_")[2]
                kept, params = finish(half, child, delivered=is_delivered)
                assert kept == (is_delivered and parent not in told), "the others' blocks are free at once"
                holds = [(hold.request_id, hold.handle) for hold in half.build_orders().holds]
                if kept:
                    told[parent] = child.request_id, params
                    assert params[HANDLE_KEY] not in seen
                    seen.add(params[HANDLE_KEY])
                assert holds == ([(child.request_id, params[HANDLE_KEY])] if kept else [])
                assert params == (told[parent][1] if is_delivered else None)
            assert half.state()["held"] == len(told)
        assert not any(half.state().values())

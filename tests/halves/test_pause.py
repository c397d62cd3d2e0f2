"""A stack that waits until no request holds blocks: what P holds is given up, and nothing more is held."""

from __future__ import annotations

import pytest

from kvconnect.transfer.orders import Results
from tests.halves.test_releasing import computed, withdrawn
from tests.halves.test_scheduler_half import connector


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "t"}])
def test_what_is_held_is_given_up(role, transfer):
    half = connector(role)
    request = computed(half, **transfer)
    assert half.request_finished(request, ([1, 2, 3],), delivered=True)[0]
    (hold,) = half.build_orders().holds
    half.pause(is_paused=True)
    assert withdrawn(half.build_orders()) == [(hold.handle, "peer_stopping")]
    assert not half.build_orders().withdrawn, "once"
    half.update_results(Results(sent=("p",)))
    assert set(half.state().values()) == {0}


def test_a_hold_that_workers_have_not_got_is_given_up_after_it():
    half = connector("kv_producer")
    half.request_finished(computed(half), ([1, 2, 3],), delivered=True)
    half.pause(is_paused=True)
    first, second = half.build_orders(), half.build_orders()
    assert (len(first.holds), withdrawn(first)) == (1, [])
    assert withdrawn(second) == [(first.holds[0].handle, "peer_stopping")]


@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "t"}])
def test_what_ends_meanwhile_is_not_held_and_what_ends_later_is(transfer):
    half = connector("kv_producer")
    meanwhile = computed(half, "a", **transfer)
    half.pause(is_paused=True)
    assert half.request_finished(meanwhile, ([1, 2, 3],), delivered=True) == (False, None)
    orders = half.build_orders()
    assert not orders.holds
    assert [cause for _, cause in withdrawn(orders)] == ["peer_stopping"] * len(transfer)
    half.pause(is_paused=False)
    assert half.request_finished(computed(half, "b", **transfer), ([4, 5, 6],), delivered=True)[0]
    assert len(half.build_orders().holds) == 1


def test_a_node_that_stops_holds_nothing_after_a_pause():
    half = connector("kv_producer")
    half.drain()
    half.pause(is_paused=True)
    half.pause(is_paused=False)
    assert half.request_finished(computed(half), ([1, 2, 3],), delivered=True) == (False, None)


def test_a_place_is_free_again_once_what_was_given_up_has_ended():
    half = connector("kv_producer", max_leases=2)
    for number in range(3):
        requests = [
            computed(half, f"{number}-{name}", **more)
            for name, more in (("a", {}), ("b", {"transfer_id": "t"}))
        ]
        assert all(half.request_finished(one, ([1, 2, 3],), delivered=True)[0] for one in requests)
        half.build_orders()
        half.pause(is_paused=True)
        assert len(half.build_orders().withdrawn) == 2
        half.update_results(Results(sent=tuple(one.request_id for one in requests)))
        half.pause(is_paused=False)


def test_a_decode_node_has_nothing_to_give_up():
    half = connector("kv_consumer")
    half.pause(is_paused=True)
    half.pause(is_paused=False)
    assert not half.build_orders().withdrawn

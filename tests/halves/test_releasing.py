"""What P holds, or would hold, is given up: by a router for a client that left, or as the stack pauses."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.transfer.orders import Results
from tests.halves.test_scheduler_half import Request, connector

NAME = "0123456789abcdef"


def asked(name=NAME, **more):
    return {"do_remote_decode": True, "do_remote_prefill": False, "kvconnect_release": name, **more}


def released(half, name=NAME, request_id="r"):
    """What vLLM makes of a request that it refuses: it comes, and ends, without being admitted."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "kvconnect_release": name}
    request = Request(request_id, 1, params)
    half.new_request(request)
    assert half.request_finished(request, ([],), delivered=False) == (False, None)


def computed(half, request_id="p", **more):
    request = Request(request_id, 41, asked(**more))
    half.new_request(request)
    half.update_after_alloc(request, ([1, 2, 3],), 0)
    return request


def withdrawn(orders):
    return [(one.handle, one.reason.cause.value) for one in orders.withdrawn]


def paused(half):
    """The stack waits until no request holds blocks."""
    half.pause(is_paused=True)


WAYS = pytest.mark.parametrize(("give_up", "cause"), [(released, "aborted"), (paused, "peer_stopping")])


@WAYS
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "t"}])
def test_what_is_held_is_withdrawn(role, transfer, give_up, cause, caplog):
    half = connector(role)
    request = computed(half, **transfer)
    assert half.request_finished(request, ([1, 2, 3],), delivered=True)[0]
    (hold,) = half.build_orders().holds
    with caplog.at_level(logging.WARNING):
        give_up(half)
    assert withdrawn(half.build_orders()) == [(hold.handle, cause)]
    assert not caplog.records, "it is no error"
    if give_up is released:
        released(half)
    assert not half.build_orders().withdrawn, "once"
    half.update_results(Results(sent=("p",)))
    assert set(half.state().values()) == {0}


@WAYS
def test_a_hold_that_workers_have_not_got_is_withdrawn_after_it(give_up, cause):
    half = connector("kv_producer")
    request = computed(half)
    half.request_finished(request, ([1, 2, 3],), delivered=True)
    give_up(half)
    first, second = half.build_orders(), half.build_orders()
    assert (len(first.holds), withdrawn(first)) == (1, [])
    assert withdrawn(second) == [(first.holds[0].handle, cause)]


@WAYS
@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "t"}])
def test_what_is_still_computed_is_not_held_later(transfer, give_up, cause):
    half = connector("kv_producer")
    request = computed(half, **transfer)
    give_up(half)
    assert half.request_finished(request, ([1, 2, 3],), delivered=True) == (False, None)
    orders = half.build_orders()
    assert not orders.holds
    told = [cause for _, cause in withdrawn(orders)]
    assert told == [cause] * len(transfer), "a decode node that waits for it is told"
    assert set(half.state().values()) == {0}


def test_all_prompts_of_a_name_are_released_and_no_others():
    half = connector("kv_producer")
    mine = [computed(half, f"cmpl-{number}") for number in range(3)]
    other = computed(half, "other", name="another name")
    for request in (*mine[1:], other):
        assert half.request_finished(request, ([1, 2, 3],), delivered=True)[0]
    handles = [hold.handle for hold in half.build_orders().holds]
    released(half)
    assert not half.request_finished(mine[0], ([1, 2, 3],), delivered=True)[0]
    assert [handle for handle, _ in withdrawn(half.build_orders())] == handles[:2]


@pytest.mark.parametrize("name", ["unknown", 7, "", ["x"], "ü", "x" * 5000, {"a": 1}])
def test_a_name_that_is_not_known_or_none_releases_nothing(name):
    half = connector("kv_producer")
    computed(half)
    released(half, name)
    orders = half.build_orders()
    assert not orders.withdrawn
    assert orders.failures == (() if name == "unknown" else ("release",))


@pytest.mark.parametrize("name", [["x"], "ü", "", "x" * 5000])
def test_a_request_with_a_name_that_cannot_be_used_is_held_all_the_same(name):
    half = connector("kv_producer")
    request = computed(half, name=name)
    assert half.request_finished(request, ([1, 2, 3],), delivered=True)[0]
    assert half.build_orders().failures == ("release",)


def test_a_decode_node_takes_a_release_for_nothing(caplog):
    half = connector("kv_consumer")
    request = Request("r", 1, {"do_remote_prefill": True, "kvconnect_release": NAME})
    with caplog.at_level(logging.WARNING):
        half.new_request(request)
        assert half.matched_tokens(request, 0) == (0, False)
        half.update_after_alloc(request, ([1],), 0)
        half.request_finished(request, ([1],), delivered=True)
    orders = half.build_orders()
    assert (orders.loads, orders.let_go, orders.failures) == ((), (), ())
    assert not caplog.records


@given(st.data())
def test_whatever_the_order_nothing_stays_held_that_was_released(data):
    half, running, held, names, lost = connector("kv_producer"), {}, {}, {}, set()
    for number in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["ask", "end", "release", "orders", "sent"]))
        if what == "ask":
            names[f"p{number}"] = name = data.draw(st.sampled_from(["n1", "n2"]))
            running[f"p{number}"] = computed(half, f"p{number}", name=name)
        elif what == "end" and running:
            request_id = data.draw(st.sampled_from(sorted(running)))
            kept, _ = half.request_finished(running.pop(request_id), ([1],), delivered=True)
            assert kept is (request_id not in lost)
            if kept:
                held[request_id] = None
        elif what == "release":
            name = data.draw(st.sampled_from(["n1", "n2"]))
            lost |= {one for one in (*running, *held) if names[one] == name}
            released(half, name, f"r{number}")
        elif what == "sent" and held:
            request_id = data.draw(st.sampled_from(sorted(held)))
            half.update_results(Results(sent=(request_id,)))
            del held[request_id]
        else:
            half.build_orders()
    for request_id, request in running.items():
        held |= {request_id: None} if half.request_finished(request, ([1],), delivered=True)[0] else {}
    half.update_results(Results(sent=tuple(held)))
    assert set(half.state().values()) == {0}


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

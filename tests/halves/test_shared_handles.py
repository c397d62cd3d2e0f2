"""Several requests of one node that name the same handle: n answers of one prompt, or a router's retry."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.outcome import Cause
from kvconnect.transfer.orders import Results
from kvconnect.transfer.params import HANDLE_KEY
from tests.halves.test_scheduler_half import Request, connector, prefilled

BLOCKS = ([7, 8, 9],)


def children(count=3, *, told=True):
    _, _, params = prefilled()
    decode = connector("kv_consumer")
    decode.build_orders()
    made = [Request(f"{n}_d", 40, dict(params)) for n in range(count)]
    if told:
        for child in made:
            decode.new_request(child)
    return decode, made


def load(decode, child):
    count, in_background = decode.matched_tokens(child, 0)
    assert (count, in_background) == (40, True)
    decode.update_after_alloc(child, BLOCKS, count)
    (order,) = decode.build_orders().loads
    return order


def end(decode, *requests, delivered=True):
    for request in requests:
        decode.request_finished(request, BLOCKS, delivered=delivered)


@pytest.mark.parametrize("told", [True, False])
def test_one_child_loads_and_the_others_wait_and_then_compute(told):
    decode, (first, second, third) = children(told=told)
    assert not load(decode, first).refusal
    for child in (second, third):
        assert decode.matched_tokens(child, 0) == (None, False)
        assert decode.matched_tokens(child, 0) == (None, False), "asked again next step"
    decode.update_results(Results(received=("0_d",)))
    for child in (second, third):
        assert decode.matched_tokens(child, 32) == (0, False), "the local prefix cache has it"
        decode.update_after_alloc(child, BLOCKS, 0)
    decode.update_after_alloc(first, BLOCKS, 0)
    assert not decode.build_orders(), "nothing is let go of that was fetched"
    end(decode, first, second, third)
    assert not decode.build_orders()
    assert set(decode.state().values()) == {0}


def test_a_first_child_that_is_aborted_leaves_the_others_to_compute():
    decode, (first, second, third) = children()
    load(decode, first)
    end(decode, first, delivered=False)
    assert decode.build_orders().aborted == ("0_d",)
    assert decode.matched_tokens(second, 0) == (None, False), "its blocks are not quiescent yet"
    decode.update_results(Results(received=("0_d",), failed={"0_d": Cause.LOST("the request was aborted")}))
    assert decode.matched_tokens(second, 0) == (0, False)
    decode.update_after_alloc(second, BLOCKS, 0)
    assert decode.matched_tokens(third, 0) == (0, False)
    end(decode, second, third)
    orders = decode.build_orders()
    assert (orders.let_go, orders.failures) == ((), ("fetched_before",)), "it asked for KV, and is computed"
    assert set(decode.state().values()) == {0}


@pytest.mark.parametrize("ended", ["before", "after"])
def test_a_first_child_that_fails_fails_the_others_for_the_same_reason(ended):
    """Whether they are computed then is the stack's policy. vLLM ends the request before it reports."""
    decode, (first, second, third) = children()
    load(decode, first)
    if ended == "before":
        end(decode, first, delivered=False)
    decode.update_results(Results(received=("0_d",), failed={"0_d": Cause.LOST("the link is down")}))
    if ended == "after":
        assert decode.matched_tokens(first, 0) == (0, False), "recomputed here"
    decode.build_orders()
    for child in (second, third):
        refused = load(decode, child)
        assert (refused.handle, refused.refusal.text) == (
            "",
            "the request that fetched for this one failed: the link is down",
        )
    for child in (second, third):
        decode.update_results(
            Results(received=(child.request_id,), failed={child.request_id: Cause.LOST("refused")})
        )
        assert decode.matched_tokens(child, 0) == (0, False), "recomputed here"
    end(decode, *([first] if ended == "after" else []), second, third)
    assert not decode.build_orders().let_go
    assert set(decode.state().values()) == {0}


def test_a_child_that_has_all_of_it_does_not_fail_with_the_first():
    decode, (first, second, _) = children()
    load(decode, first)
    decode.update_results(Results(received=("0_d",), failed={"0_d": Cause.LOST("the link is down")}))
    assert decode.matched_tokens(second, 40) == (0, False)


def test_p_is_let_go_once_and_only_when_nobody_can_want_it():
    decode, (first, second, third) = children()
    end(decode, first, delivered=False)
    decode.update_after_alloc(second, BLOCKS, 0)
    assert not decode.build_orders().let_go, "the third may still fetch it"
    assert decode.matched_tokens(third, 0) == (40, True)
    decode.update_after_alloc(third, BLOCKS, 0)
    assert len(decode.build_orders().let_go) == 1
    end(decode, second, third)
    assert not decode.build_orders()
    assert set(decode.state().values()) == {0}


def test_two_that_were_promised_the_load_before_either_got_blocks_are_told_apart():
    """Some serving stacks give blocks later than they ask: both expect an answer, one gets KV."""
    decode, (first, second, third) = children()
    for child in (first, second):
        assert decode.matched_tokens(child, 0) == (40, True)
    for child in (first, second):
        decode.update_after_alloc(child, BLOCKS, 40)
    one, two = decode.build_orders().loads
    assert not one.refusal
    assert "another request of this node" in two.refusal.text
    assert (bool(one.handle), two.handle) == (True, ""), "the worker lets go of what a load fails for"
    decode.update_results(Results(received=("1_d",), failed={"1_d": two.refusal}))
    assert decode.matched_tokens(third, 0) == (None, False), "the first still loads"
    decode.update_results(Results(received=("0_d",)))
    assert decode.matched_tokens(third, 0) == (0, False)
    end(decode, first, second, third)
    assert set(decode.state().values()) == {0}


def test_unusable_parameters_are_everybodys_own():
    decode = connector("kv_consumer")
    decode.build_orders()
    requests = [Request(f"d{n}", 40, {"do_remote_prefill": True}) for n in range(3)]
    for request in requests:
        decode.new_request(request)
        assert decode.matched_tokens(request, 0) == (40, True)
        decode.update_after_alloc(request, BLOCKS, 40)
    assert all(order.refusal for order in decode.build_orders().loads)
    decode.update_results(Results(received=tuple(request.request_id for request in requests)))
    end(decode, *requests)
    assert not decode.build_orders()
    assert set(decode.state().values()) == {0}


@given(st.integers(0, 2**32 - 1))
def test_whatever_happens_a_handle_is_fetched_or_let_go_of_once_and_nothing_is_left(seed):
    rng = random.Random(seed)
    _, _, params = prefilled()
    decode = connector("kv_consumer")
    handles = [params[HANDLE_KEY], prefilled(lease_s=20)[2][HANDLE_KEY]]
    assert handles[0] != handles[1]
    waiting = {f"d{n}": Request(f"d{n}", 40, {**params, HANDLE_KEY: rng.choice(handles)}) for n in range(6)}
    for request in waiting.values():
        decode.new_request(request)
    loading, running, said = {}, {}, []
    named = {request.kv_transfer_params[HANDLE_KEY] for request in waiting.values()}

    def read():
        orders = decode.build_orders()
        said.extend(order.handle for order in (*orders.loads, *orders.let_go))
        assert not any(order.refusal for order in orders.loads)

    for _ in range(200):
        name = rng.choice([*waiting, *loading, *running, "none"])
        if name in waiting:
            request = waiting[name]
            if rng.random() < 0.2:
                end(decode, waiting.pop(name), delivered=False)
                continue
            hit = rng.choice([0, 0, 0, 40])
            count, _ = decode.matched_tokens(request, hit)
            if count is None:
                assert any(r.kv_transfer_params == request.kv_transfer_params for r in loading.values())
            else:
                decode.update_after_alloc(request, BLOCKS, count)
                (loading if count else running)[name] = waiting.pop(name)
        elif name in loading and rng.random() < 0.3:
            request = loading.pop(name)
            if aborted := rng.random() < 0.3:
                end(decode, request, delivered=False)
            decode.update_results(Results(received=(name,)))
            if not aborted:
                running[name] = request
        elif name in running and rng.random() < 0.3:
            end(decode, running.pop(name))
        read()
    end(decode, *waiting.values(), delivered=False)
    decode.update_results(Results(received=tuple(loading)))
    end(decode, *loading.values(), *running.values())
    read()
    assert sorted(said) == sorted(named)
    assert set(decode.state().values()) == {0}

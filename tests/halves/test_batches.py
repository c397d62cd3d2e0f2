"""Several prompts in one request of a client: its one answer tells a router of the first of them alone."""

from __future__ import annotations

import re

import pytest

from kvconnect.transfer.orders import Results
from kvconnect.transfer.params import BATCH_KEY, HANDLE_KEY, TRANSFER_KEY
from tests.halves.test_scheduler_half import Request, connector

ASK = {"do_remote_decode": True}


def batch_of(request_id):
    found = re.fullmatch(r"(?:\d+_)?(\w+)-(\d+)-\w+", request_id)
    return (found[1], int(found[2])) if found else ("", 0)


def half(role, **extra):
    """A half that tells prompts by their length."""
    made = connector(
        role,
        **extra,
        batch_of=batch_of,
        parent_of=lambda request_id: re.sub(r"^\d+_", "", request_id),
        prompt_digest=lambda request, num_tokens: b"%016d" % num_tokens,
    )
    made.build_orders()
    return made


def prefilled(prefill, name, lengths, *, failing=(), suffix="p"):
    """The parameters of the first prompt, and the requests that are held."""
    requests = [Request(f"{name}-{at}-{suffix}", length, ASK) for at, length in enumerate(lengths)]
    for request in requests:
        prefill.new_request(request)
    answers, held = [], []
    for at, request in enumerate(requests):
        request.num_tokens += 1
        kept, params = prefill.request_finished(request, ([4, 5, 6],), delivered=at not in failing)
        answers.append(params)
        held += [request.request_id] * kept
    return answers[0], held


def loads(decode, params, name, lengths):
    """The loads that a decode node orders for a batch with these parameters."""
    requests = [Request(f"{name}-{at}-d", length, dict(params)) for at, length in enumerate(lengths)]
    for request in requests:
        decode.new_request(request)
    for request in requests:
        if decode.matched_tokens(request, 0)[0]:
            decode.update_after_alloc(request, ([7, 8, 9],), request.num_tokens)
    return requests, decode.build_orders().loads


def end(prefill, held, decode, requests, ordered):
    prefill.update_results(Results(sent=tuple(held)))
    decode.update_results(Results(received=tuple(load.request_id for load in ordered)))
    for request in requests:
        decode.request_finished(request, ([7, 8, 9],), delivered=True)
    assert set((prefill.state() | decode.state()).values()) == {0}


def test_every_prompt_of_a_batch_is_held_and_loaded():
    prefill, decode, lengths = half("kv_producer"), half("kv_consumer"), (40, 30, 20)
    params, held = prefilled(prefill, "a", lengths)
    assert len(held) == 3
    holds = prefill.build_orders().holds
    # The router may give both nodes one id, or each its own.
    requests, ordered = loads(decode, params, "other", lengths)
    assert [load.handle for load in ordered] == [hold.handle for hold in holds]
    assert not any(load.refusal for load in ordered)
    assert {load.peer for load in ordered} == {("P", "10.0.0.1", 5600)}
    end(prefill, held, decode, requests, ordered)


def test_a_prompt_that_is_in_a_batch_twice_is_held_and_loaded_once(caplog):
    prefill, decode, lengths = half("kv_producer"), half("kv_consumer"), (40, 30, 30)
    params, held = prefilled(prefill, "a", lengths)
    assert held == ["a-0-p", "a-1-p"]
    orders = prefill.build_orders()
    assert not orders.failures
    assert not caplog.records
    requests, ordered = loads(decode, params, "a", lengths)
    assert [load.handle for load in ordered] == [hold.handle for hold in orders.holds]
    end(prefill, held, decode, requests, ordered)


@pytest.mark.parametrize("asked", [(40,), (40, 40)])
def test_the_first_prompt_comes_under_its_handle_where_it_is_a_later_one_too(asked):
    """P was asked for it alone, or in a batch that has it twice: of a second hold it is let go."""
    prefill, decode = half("kv_producer"), half("kv_consumer")
    params, held = prefilled(prefill, "a", asked)
    holds = prefill.build_orders().holds
    requests = [Request(f"b-{at}-d", length, dict(params)) for at, length in enumerate((30, 40))]
    for request in requests:
        decode.new_request(request)
        if decode.matched_tokens(request, 0)[0]:
            decode.update_after_alloc(request, ([7, 8, 9],), request.num_tokens)
    orders = decode.build_orders()
    assert [load.handle for load in orders.loads] == [params[HANDLE_KEY]]
    assert not orders.loads[0].refusal
    (let_go,) = orders.let_go
    assert let_go.handle in [holds[-1].handle] if len(asked) > 1 else let_go.handle.startswith("transfer:")
    end(prefill, held, decode, requests, orders.loads)


def test_two_batches_under_one_name_of_a_client_are_not_mixed_up():
    """vLLM's names of requests are the client's where it gives one."""
    prefill, decode = half("kv_producer"), half("kv_consumer")
    params, first = prefilled(prefill, "a", (40, 30))
    assert params[BATCH_KEY] != "a", "what a client knows"
    _, second = prefilled(prefill, "a", (41, 31), suffix="q")
    assert len(first + second) == 4
    handles = [hold.handle for hold in prefill.build_orders().holds]
    assert len(set(handles)) == 4
    _, ordered = loads(decode, params, "a", (40, 30))
    assert [load.handle for load in ordered] == handles[:2]


def test_a_later_prompt_that_failed_is_withdrawn_at_once():
    prefill = half("kv_producer")
    _, held = prefilled(prefill, "a", (40, 30), failing=(1,))
    assert held == ["a-0-p"]
    (withdrawn,) = prefill.build_orders().withdrawn
    assert withdrawn.handle.startswith("transfer:")


def test_where_a_later_prompt_has_no_room_the_first_is_fetched_alone():
    prefill, decode, lengths = half("kv_producer", max_leases=2), half("kv_consumer"), (40, 30, 20, 10)
    requests = [Request(f"a-{at}-p", length, ASK) for at, length in enumerate(lengths)]
    for request in requests[1:]:
        prefill.new_request(request)
    other = Request("other", 50, ASK)
    prefill.new_request(other)
    other.num_tokens += 1
    assert prefill.request_finished(other, ([4],), delivered=True) == (False, None), "the places are promised"
    requests[1].num_tokens += 1
    prefill.request_finished(requests[1], ([4, 5, 6],), delivered=False)
    requests[0].num_tokens += 1
    prefill.new_request(requests[0])
    held, params = prefill.request_finished(requests[0], ([4, 5, 6],), delivered=True)
    assert held
    assert BATCH_KEY not in params, "the fourth prompt is not held"
    ours, ordered = loads(decode, params, "a", lengths)
    assert [load.request_id for load in ordered] == ["a-0-d"]
    for request in requests[2:]:
        request.num_tokens += 1
        prefill.request_finished(request, ([4, 5, 6],), delivered=False)
    end(prefill, ["a-0-p"], decode, ours, ordered)


def test_prompts_that_come_when_the_first_has_ended_are_held_and_loaded():
    prefill, decode = half("kv_producer"), half("kv_consumer")
    params, held = prefilled(prefill, "a", (40,))
    late = Request("a-1-p", 30, ASK)
    prefill.new_request(late)
    late.num_tokens += 1
    kept, _ = prefill.request_finished(late, ([4, 5, 6],), delivered=True)
    assert kept
    requests, ordered = loads(decode, params, "a", (40, 30))
    assert [load.request_id for load in ordered] == ["a-0-d", "a-1-d"]
    end(prefill, [*held, "a-1-p"], decode, requests, ordered)


def test_a_routers_own_transfer_id_names_the_batch():
    prefill = half("kv_producer")
    request = Request("a-1-p", 40, {**ASK, TRANSFER_KEY: "t"})
    prefill.new_request(request)
    request.num_tokens += 1
    _, params = prefill.request_finished(request, ([4, 5, 6],), delivered=True)
    assert params[TRANSFER_KEY] == "t"
    assert BATCH_KEY not in params


@pytest.mark.parametrize(
    "change", [{BATCH_KEY: 5}, {BATCH_KEY: ""}, {HANDLE_KEY: "s2.x"}, {HANDLE_KEY: None}]
)
def test_a_batch_that_a_client_made_up_is_refused(change):
    prefill, decode = half("kv_producer"), half("kv_consumer")
    params, _ = prefilled(prefill, "a", (40, 30))
    _, ordered = loads(decode, {**params, **change}, "a", (40, 30))
    assert ordered[-1].refusal

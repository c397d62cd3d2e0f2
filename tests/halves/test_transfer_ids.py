"""Requests that a router announced to both sides under one transfer id."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.halves.building import build_scheduler_half
from kvconnect.transfer.orders import Orders, Results
from kvconnect.transfer.params import HANDLE_KEY, TRANSFER_KEY, read_remote_prefill, read_transfer_id
from tests.halves.test_scheduler_half import ATTENTION, HANDLES, STATE, Request, connector, load_of

ON_P = {"do_remote_decode": True, "do_remote_prefill": False, TRANSFER_KEY: "t-1"}
ON_D = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    TRANSFER_KEY: "t-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}
HANDLE = "transfer:t-1"


def prefill_of(**extra):
    made = connector("kv_producer", **extra)
    made.build_orders()
    return made


def arrived(prefill, name="p", num_tokens=41, params=ON_P):
    request = Request(name, num_tokens, params)
    prefill.new_request(request)
    return request


def finish(prefill, request, blocks=([1, 2, 3],), *, delivered=True):
    return prefill.request_finished(request, blocks, delivered=delivered)


def idle(half):
    return set(half.state().values()) == {0}


def test_p_says_when_a_transfer_begins_and_holds_it_under_its_id():
    prefill = prefill_of()
    request = arrived(prefill)
    assert prefill.build_orders() == Orders(step=2, expected=(HANDLE,))
    assert not prefill.build_orders()
    assert {name: count for name, count in prefill.state().items() if count} == {"promised": 1}
    kept, params = finish(prefill, request)
    assert kept
    assert params[TRANSFER_KEY] == "t-1"
    assert read_remote_prefill(params, HANDLES).handle == HANDLE, "the answer can be passed on as well"
    (hold,) = prefill.build_orders().holds
    assert (hold.handle, hold.num_tokens) == (HANDLE, 40)
    assert {name: count for name, count in prefill.state().items() if count} == {"held": 1}
    prefill.update_results(Results(sent=("p",)))
    assert idle(prefill)


@pytest.mark.parametrize("remote_engine_id", [None, "P", "absent"])
def test_d_needs_neither_a_handle_nor_a_count_nor_an_engine(remote_engine_id):
    params = dict(ON_D) if remote_engine_id == "absent" else {**ON_D, "remote_engine_id": remote_engine_id}
    load = load_of(params, 40, 24, computed=16)
    engine_id = "P" if remote_engine_id == "P" else ""
    assert (load.handle, load.peer[0], load.num_tokens, load.refusal) == (HANDLE, engine_id, 40, None)


@pytest.mark.parametrize(("groups", "held_back"), [((ATTENTION,), 0), ((STATE, ATTENTION), 1)])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_both_sides_name_the_same_handle_and_the_same_count(groups, held_back, length):
    prefill, decode = connector("kv_producer", groups), connector("kv_consumer", groups)
    asked, told = Request("p", length, ON_P), Request("d", length, ON_D)
    prefill.new_request(asked)
    asked.num_tokens = prefill.prefill_tokens(asked) + 1
    blocks = ([5], [1, 2, 3])[-len(groups) :]
    assert finish(prefill, asked, blocks)[0]
    (hold,) = prefill.build_orders().holds
    count, _ = decode.matched_tokens(told, 0)
    if count == 0:
        assert length <= held_back
        decode.update_after_alloc(told, blocks, 0)
        (let_go,) = decode.build_orders().let_go
        assert (let_go.handle, let_go.peer[0]) == (hold.handle, "")
        return
    decode.update_after_alloc(told, blocks, count)
    (load,) = decode.build_orders().loads
    assert (load.handle, load.num_tokens, load.refusal) == (hold.handle, hold.num_tokens, None)


@pytest.mark.parametrize(
    ("blocks", "num_tokens", "delivered", "why"),
    [
        (([1, 2],), 30, False, "was aborted, or failed"),
        (([],), 30, True, "leaves no KV"),
        (([1],), 1, True, "leaves no KV"),
    ],
)
def test_p_says_when_a_transfer_will_never_come(blocks, num_tokens, delivered, why):
    prefill = prefill_of()
    request = arrived(prefill, num_tokens=num_tokens)
    prefill.build_orders()
    assert finish(prefill, request, blocks, delivered=delivered) == (False, None)
    (withdrawn,) = prefill.build_orders().withdrawn
    assert withdrawn.handle == HANDLE
    assert why in withdrawn.reason.text
    assert idle(prefill)


BAD = ["", "x" * 513, "naïve", "tab\t", "\ud800", 7, True, ["t"], {"a": 1}, 0]


@pytest.mark.parametrize("transfer_id", BAD, ids=repr)
def test_a_transfer_id_of_no_use_is_refused_on_both_sides(transfer_id, caplog):
    prefill = prefill_of()
    with caplog.at_level(logging.WARNING):
        requests = [arrived(prefill, f"p{n}", params={**ON_P, TRANSFER_KEY: transfer_id}) for n in range(2)]
        assert [finish(prefill, request) for request in requests] == [(False, None)] * 2
    orders = prefill.build_orders()
    assert orders == Orders(step=orders.step, failures=("transfer_id", "transfer_id"))
    assert sum("kv_transfer_params.transfer_id" in record.message for record in caplog.records) == 1
    assert idle(prefill)
    load = load_of({**ON_D, TRANSFER_KEY: transfer_id})
    assert "kv_transfer_params.transfer_id" in load.refusal.text
    assert len(load.refusal.text) < 300


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=512))
def test_every_printable_ascii_text_is_a_transfer_id_that_names_no_random_handle(text):
    handle = read_transfer_id({TRANSFER_KEY: text})
    remote = read_remote_prefill({**ON_D, TRANSFER_KEY: text}, HANDLES)
    assert (remote.handle, remote.refusal) == (handle, None)
    assert ":" in handle
    prefill = connector("kv_producer")
    request = arrived(prefill, params={**ON_P, TRANSFER_KEY: text})
    _, answer = finish(prefill, request)
    assert read_remote_prefill(answer, HANDLES).handle == handle, "P's own answer is read as well"


def test_random_handles_are_none_of_transfer_ids():
    made = build_scheduler_half(
        TransferConfig(kv_role="kv_producer", engine_id="P"),
        KVCacheConfig(9, (ATTENTION,)),
        directory=(RankAddress(0, "10.0.0.1", 5600),),
    )
    for _ in range(50):
        request = Request("p", 20, {"do_remote_decode": True})
        assert ":" not in made.request_finished(request, ([1],), delivered=True)[1][HANDLE_KEY]


def test_a_transfer_id_in_use_belongs_to_the_first_request(caplog):
    prefill = prefill_of()
    with caplog.at_level(logging.WARNING):
        first, second = arrived(prefill, "p1"), arrived(prefill, "p2", 99)
    assert "p2 has a transfer_id that another request is using" in caplog.text
    assert finish(prefill, second, ([9],)) == (False, None)
    orders = prefill.build_orders()
    assert orders == Orders(step=orders.step, expected=(HANDLE,), failures=("transfer_id_in_use",))
    assert finish(prefill, first)[0]
    third = arrived(prefill, "p3")
    assert finish(prefill, third) == (False, None), "in use until it was sent"
    (hold,) = prefill.build_orders().holds
    assert hold.request_id == "p1"
    prefill.update_results(Results(sent=("p1",)))
    assert idle(prefill)
    assert finish(prefill, arrived(prefill, "p4"))[0], "free again"


def test_transfers_under_way_are_bounded():
    prefill = prefill_of(max_leases=2)
    requests = [arrived(prefill, f"p{n}", params={**ON_P, TRANSFER_KEY: f"t{n}"}) for n in range(4)]
    orders = prefill.build_orders()
    assert len(orders.expected) == 2
    assert [withdrawn.handle for withdrawn in orders.withdrawn] == ["transfer:t2", "transfer:t3"]
    assert "2 requests wait to be fetched" in orders.withdrawn[0].reason.text
    assert orders.failures == ("max_leases", "max_leases")
    assert [finish(prefill, request)[0] for request in requests] == [True, True, False, False]
    prefill.update_results(Results(sent=("p0", "p1")))
    assert idle(prefill)


@given(st.integers(0, 2**32 - 1))
def test_whatever_arrives_and_ends_every_id_has_one_end_and_nothing_is_left(seed):
    """Against a plain account: who owns an id, and what its worker has been told of it."""
    rng = random.Random(seed)
    prefill = prefill_of(max_leases=rng.choice([3, 100]))
    alive, held, told = {}, {}, {}

    def read(orders):
        for withdrawn in orders.withdrawn:
            told.pop(withdrawn.handle, None)
        for handle in orders.expected:
            assert handle not in told
            told[handle] = "expected"
        for hold in orders.holds:
            assert told.get(hold.handle) == "expected"
            told[hold.handle] = "held"

    for number in range(30):
        match rng.choice(["new", "new", "end", "end", "sent", "step"]):
            case "new":
                name = f"p{number}"
                alive[name] = arrived(prefill, name, params={**ON_P, TRANSFER_KEY: rng.choice("abcd")})
            case "end" if alive:
                request = alive.pop(rng.choice(list(alive)))
                kept, params = finish(prefill, request, delivered=rng.random() < 0.6)
                if kept:
                    handle = read_remote_prefill(params, HANDLES).handle
                    assert handle not in held.values(), "one request per id"
                    held[request.request_id] = handle
            case "sent" if held:
                read(prefill.build_orders())
                name = rng.choice(list(held))
                del told[held.pop(name)]
                prefill.update_results(Results(sent=(name,)))
            case _:
                read(prefill.build_orders())
    for request in alive.values():
        finish(prefill, request, delivered=False)
    read(prefill.build_orders())
    assert sorted(told) == sorted(held.values())
    prefill.update_results(Results(sent=tuple(held)))
    assert idle(prefill)

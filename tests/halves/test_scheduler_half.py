"""The scheduler half's answers to a scheduler, hook by hook."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.addresses import RankAddress
from kvconnect.cache.retention import Window
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.config import Limits, parse_kv_transfer_config
from kvconnect.errors import LocalError, PeerError
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.peer.handles import Handles
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Orders, Results
from kvconnect.transfer.params import HANDLE_KEY, TRANSFER_KEY, read_remote_prefill, read_transfer_id
from kvconnect.transfer.stack import Computed, StackTraits, Step

ATTENTION = KVCacheGroup(("a",), AttentionSpec(16, 2, 8, torch.float16))
STATE = KVCacheGroup(("s",), StateSpec(4096, ((4,),), (torch.float32,)))
WINDOW = KVCacheGroup(("w",), AttentionSpec(16, 2, 8, torch.float16, retention=Window(20)))
HANDLES = Handles(b"what this cluster signs with")
HELD = {"do_remote_decode": True}


@dataclass
class Request:
    request_id: str
    num_tokens: int
    kv_transfer_params: dict[str, Any] | None = field(default=None)


def connector(role="kv_both", groups=(ATTENTION,), *, num_blocks=100, trust=None, **extra):
    """A half with these settings, and traits of a stack among them."""
    traits = {name: extra.pop(name) for name in StackTraits.__dataclass_fields__ if name in extra}
    limits = {name: extra.pop(name) for name in Limits.__struct_fields__ if name in extra}
    config = parse_kv_transfer_config({"kv_role": role, "engine_id": "P", "kv_connector_extra_config": extra})
    extra_config = msgspec.structs.replace(config.extra, **limits)
    config = msgspec.structs.replace(config, kv_connector_extra_config=extra_config)
    handles = iter(f"handle{n}" for n in range(1000))
    return build_scheduler_half(
        config,
        KVCacheConfig(num_blocks, tuple(groups)),
        StackTraits(**traits),
        directory=(RankAddress(0, "10.0.0.1", 5600),),
        trust=Trust(HANDLES, trust, new_handle=lambda: next(handles)),
    )


def prefilled(groups=(ATTENTION,), num_tokens=40, blocks=([1, 2, 3],), **extra):
    """A request that P finished, and the parameters that D gets."""
    prefill = connector("kv_producer", groups, **extra)
    request = Request("p", num_tokens + 1, HELD)
    kept, params = prefill.request_finished(request, blocks, delivered=True)
    return prefill, kept, params


def load_of(params, num_tokens=40, taken=None, *, computed=0, blocks=([7, 8, 9, 10],), decode=None):
    """What D orders for a request with these parameters: of all tokens that it is offered, or of so many."""
    decode, request = decode or connector("kv_consumer"), Request("d", num_tokens, params)
    decode.new_request(request)
    offered, _ = decode.matched_tokens(request, computed)
    decode.update_after_alloc(request, blocks, offered if taken is None else taken)
    (load,) = decode.build_orders().loads
    return load


def test_a_node_that_is_drained_holds_nothing_and_withdraws_what_it_promised():
    prefill = connector("kv_producer")
    prefill.drain()
    promised = Request("t", 41, {**HELD, TRANSFER_KEY: "x"})
    prefill.new_request(promised)
    for request in (Request("p", 41, HELD), promised):
        assert prefill.request_finished(request, ([1, 2, 3],), delivered=True) == (False, None)
    orders = prefill.build_orders()
    assert not orders.holds
    (withdrawn,) = orders.withdrawn
    assert "the prefill node is stopping" in withdrawn.reason.text
    assert not any(prefill.state().values())


def test_a_finished_prefill_is_held_and_described_in_the_shape_that_routers_know():
    prefill, kept, params = prefilled()
    assert kept
    handle = params.pop(HANDLE_KEY)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "remote_request_id": "p",
        "remote_block_ids": [[1, 2, 3]],
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": 40,
        "tp_size": 1,
    }
    orders = prefill.build_orders()
    (hold,) = orders.holds
    assert hold.groups == (GroupBlocks(0, 0, (1, 2, 3)),)
    assert (hold.num_tokens, hold.handle) == (40, handle)
    claims = HANDLES.read(handle)
    assert (claims.engine_id, claims.host, claims.port, claims.num_tokens) == ("P", "10.0.0.1", 5600, 40)
    assert prefill.state()["held"] == 1
    prefill.update_results(Results(sent=("p",)))
    assert set(prefill.state().values()) == {0}


def test_what_happens_to_a_request_is_noted_with_the_orders_and_is_no_order():
    ticks = iter(range(100))
    prefill = connector("kv_producer", clock=lambda: float(next(ticks)))
    assert prefill.build_orders(), "the directory, once"
    request = Request("p", 40, HELD)
    prefill.new_request(request)
    prefill.update_after_alloc(request, ([1, 2, 3],), 0)
    orders = prefill.build_orders()
    assert not orders
    assert [note[:4] for note in orders.notes] == [(0.0, "queued", "", "p"), (1.0, "admitted", "", "p")]
    prefill.launched(Step([Computed("p", 40, None)]))
    request.num_tokens += 1
    _, params = prefill.request_finished(request, ([1, 2, 3],), delivered=True)
    notes = prefill.build_orders().notes
    assert [note[1] for note in notes] == ["prefill launched", "prefill done"]
    assert notes[1][2:4] == (params[HANDLE_KEY], "p"), "the two names of it, once"

    decode = connector("kv_consumer", clock=lambda: float(next(ticks)))
    request = Request("d", 40, params)
    decode.new_request(request)
    assert decode.matched_tokens(request, 0) == (40, True)
    decode.update_after_alloc(request, ([7, 8, 9],), 40)
    orders = decode.build_orders()
    decode.update_results(Results(received=("d",)))
    notes = orders.notes + decode.build_orders().notes
    assert [note[1] for note in notes] == ["queued", "load ordered", "loaded"]
    assert all(note[2] == params[HANDLE_KEY] for note in notes)


@pytest.mark.parametrize(
    ("params", "delivered", "blocks"),
    [
        (HELD, False, [1, 2]),
        ({"do_remote_decode": False}, True, [1, 2]),
        (None, True, [1, 2]),
        (HELD, True, []),
    ],
)
def test_nothing_is_held_that_nobody_will_fetch(params, delivered, blocks):
    prefill = connector("kv_producer")
    answer = prefill.request_finished(Request("p", 30, params), (blocks,), delivered=delivered)
    assert answer == (False, None)
    assert not prefill.build_orders().holds


def test_a_load_asks_for_what_is_not_there_yet():
    _, _, params = prefilled()
    decode = connector("kv_consumer")
    request = Request("d", 40, params)
    assert decode.matched_tokens(request, 16) == (24, True)
    assert decode.matched_tokens(request, 16) == (24, True), "asked again until admitted"
    decode.update_after_alloc(request, ([7, 8, 9, 10],), 24)
    assert decode.matched_tokens(request, 0) == (0, False), "never twice, also after a preemption"
    (load,) = decode.build_orders().loads
    assert load.groups == (GroupBlocks(0, 1, (8, 9)),)
    assert (load.num_tokens, load.peer, load.refusal) == (40, ("P", "10.0.0.1", 5600), None)
    decode.update_after_alloc(request, ([7, 8, 9, 10],), 0)
    assert not decode.build_orders()
    decode.update_results(Results(received=("d",)))
    assert decode.request_finished(request, ([7],), delivered=True) == (False, None)
    assert set(decode.state().values()) == {0}


@pytest.mark.parametrize(
    ("computed", "taken", "loaded"),
    [
        (0, 32, GroupBlocks(0, 0, (7, 8))),
        (0, 20, GroupBlocks(0, 0, (7, 8))),
        (16, 16, GroupBlocks(0, 1, (8,))),
    ],
)
def test_a_stack_that_takes_fewer_tokens_than_offered_gets_the_first_of_them(computed, taken, loaded):
    """What it did not take it computes itself, in the blocks that follow."""
    load = load_of(prefilled()[2], 40, taken, computed=computed)
    assert load.groups == (loaded,)
    assert (load.num_tokens, load.refusal) == (40, None), "of all that the peer holds"


@pytest.mark.parametrize("group", [STATE, WINDOW])
def test_fewer_tokens_than_offered_of_windows_and_states_are_refused(group):
    """The peer has them as they are after all of the prompt."""
    blocks, count = ([1, 2, 3], [5]), 39 if group is STATE else 40
    _, _, params = prefilled((ATTENTION, group), count, blocks)
    load = load_of(params, 40, 16, blocks=blocks, decode=connector("kv_consumer", (ATTENTION, group)))
    assert f"16 of the {count} tokens that were offered" in load.refusal.text


def test_more_tokens_than_offered_are_refused():
    load = load_of(prefilled()[2], 40, 40, computed=16)
    assert "40 of the 24 tokens that were offered" in load.refusal.text


def test_what_this_node_prefilled_for_itself_is_let_go_and_not_fetched():
    """A router that has it in both roles may choose it twice."""
    both = connector("kv_both")
    _, params = both.request_finished(Request("p", 41, HELD), ([1, 2, 3],), delivered=True)
    request = Request("d", 40, params)
    both.new_request(request)
    assert both.matched_tokens(request, 16) == (0, False)
    both.update_after_alloc(request, ([7, 8, 9],), 0)
    orders = both.build_orders()
    assert not orders.loads
    assert [let_go.handle for let_go in orders.let_go] == [params[HANDLE_KEY]]
    elsewhere = Request("e", 40, prefilled()[2])
    assert connector("kv_consumer").matched_tokens(elsewhere, 16) == (24, True)


def test_models_with_state_stop_one_token_earlier():
    groups = (STATE, ATTENTION)
    prefill = connector("kv_producer", groups)
    for num_tokens, params, computed in ((40, HELD, 39), (1, HELD, 1), (40, None, 40)):
        asked = Request(f"{num_tokens} {params}", num_tokens, params)
        prefill.new_request(asked)
        assert prefill.prefill_tokens(asked) == computed
    _, _, params = prefilled(groups, num_tokens=39, blocks=([5], [1, 2, 3]))
    load = load_of(params, 40, 39, blocks=([9], [7, 8, 6]), decode=connector("kv_consumer", groups))
    assert load.groups == (GroupBlocks(0, 0, (9,)), GroupBlocks(1, 0, (7, 8, 6)))
    assert load.refusal is None


def test_the_kv_of_another_prompt_is_refused():
    _, _, params = prefilled(num_tokens=40)
    load = load_of(params, 55)
    assert "remote_num_tokens is 40, this prompt needs 55" in load.refusal.text


def test_the_directory_is_sent_once():
    prefill = connector()
    assert prefill.build_orders() == Orders(step=1, directory=(RankAddress(0, "10.0.0.1", 5600),))
    assert not prefill.build_orders()
    with pytest.raises(LocalError):
        build_scheduler_half(
            parse_kv_transfer_config({"kv_role": "kv_both"}), KVCacheConfig(1, ()), directory=()
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({HANDLE_KEY: None}, "Does the prefill node, engine 'P', run NixlConnector?"),
        ({HANDLE_KEY: 7}, "kvconnect_handle is 7, accepted: printable ASCII"),
        ({HANDLE_KEY: "x" * 600}, "accepted: printable ASCII, at most 512 characters"),
        ({"remote_host": ""}, "remote_host is ''"),
        ({"remote_host": "a b"}, "remote_host is 'a b', accepted: a host name or address"),
        ({"remote_host": "x;y"}, "remote_host is 'x;y', accepted: a host name or address"),
        ({HANDLE_KEY: chr(0xD800)}, "accepted: printable ASCII"),
        ({"remote_port": "56x0"}, "remote_port is '56x0', accepted: 1 to 65535"),
        ({"remote_port": ""}, "remote_port is ''"),
        ({"remote_port": chr(0xD800)}, "accepted: 1 to 65535"),
        ({"remote_port": "0"}, "remote_port is '0', accepted: 1 to 65535"),
        ({"remote_port": 5600.5}, "remote_port is 5600.5, accepted: 1 to 65535"),
        ({"remote_num_tokens": 0}, "remote_num_tokens is 0, accepted: a number of tokens, at least 1"),
        ({HANDLE_KEY: "made-up"}, "kvconnect_handle is of no use: it is no handle of kvconnect"),
        ({"remote_num_tokens": 41}, "remote_num_tokens is 41, its handle says 40"),
        ({"remote_engine_id": "Q"}, "remote_engine_id is 'Q', its handle says 'P'"),
        ({"remote_port": True}, "remote_port is True"),
        ({"remote_port": 70000}, "remote_port is 70000, accepted: 1 to 65535"),
        ({"remote_engine_id": ["x"] * 500}, "remote_engine_id is"),
    ],
)
def test_parameters_of_no_use_are_refused_with_the_field_and_the_value(change, match):
    _, _, params = prefilled()
    load = load_of({**params, **change})
    assert match in load.refusal.text
    assert len(load.refusal.text) < 300


BESIDE = ("remote_engine_id", "remote_host", "remote_port", "remote_num_tokens")


@pytest.mark.parametrize(
    "said", [{"remote_host": "prefill-0.prefill"}, {"remote_port": 5601}, *({key: None} for key in BESIDE)]
)
def test_what_stands_in_the_handle_need_not_stand_beside_it_and_another_address_is_not_connected_to(said):
    _, _, params = prefilled()
    load = load_of({**params, **said})
    assert (load.peer, load.refusal) == (("P", "10.0.0.1", 5600), None)


KEYS = st.sampled_from(["do_remote_prefill", HANDLE_KEY, *BESIDE, TRANSFER_KEY])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)


@given(st.dictionaries(KEYS, VALUES | st.lists(st.integers(), max_size=2)))
def test_no_dictionary_of_a_client_raises(params):
    remote = read_remote_prefill(params, HANDLES)
    assert remote is None or remote.refusal or (0 < remote.peer[2] <= 65535 and remote.handle)
    try:
        assert read_transfer_id(params)
    except PeerError as error:
        assert "transfer_id is" in str(error)


@pytest.mark.parametrize("params", ["", "x", [], ["do_remote_decode"], 0, 0.0, 7, True])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_parameters_that_are_no_dictionary_are_none(role, params):
    half = connector(role)
    request = Request("r", 40, params)
    half.new_request(request)
    assert half.prefill_tokens(request) == 40
    assert half.matched_tokens(request, 0) == (0, False)
    half.update_after_alloc(request, ([1, 2, 3],), 0)
    assert half.request_finished(request, ([1, 2, 3],), delivered=True) == (False, None)
    orders = half.build_orders()
    asked = (*orders.holds, *orders.loads, *orders.let_go, *orders.expected, *orders.withdrawn)
    assert asked == ()
    assert set(half.state().values()) == {0}


@pytest.mark.parametrize("begins", ["before", "after", "anew"])
def test_a_prefill_that_has_blocks_when_caches_are_reset_is_not_held(begins):
    """What its blocks hold may be of weights that were replaced since."""
    prefill = connector("kv_producer")
    request = Request("p", 40, {**HELD, TRANSFER_KEY: "t"})
    prefill.new_request(request)
    if begins != "after":
        prefill.update_after_alloc(request, ([1, 2, 3],), 0)
    prefill.reset()
    if begins != "before":
        prefill.update_after_alloc(request, ([1, 2, 3],), 0)
    request.num_tokens += 1
    kept, params = prefill.request_finished(request, ([1, 2, 3],), delivered=True)
    assert kept == (params is not None) == (begins != "before")
    withdrawn = prefill.build_orders().withdrawn
    assert [order.reason.text for order in withdrawn] == (
        [] if kept else ["no KV comes under this handle: the prefill began before the caches were reset"]
    )
    prefill.update_results(Results(sent=("p",)))
    assert set(prefill.state().values()) == {0}


def ahead(num_tokens=40, **params):
    """P, and a prompt that it computed in its first step; its second was launched before the results came."""
    prefill = connector("kv_producer", stream_min_tokens=1000)
    request = Request("p", num_tokens, {"do_remote_decode": True, **params})
    prefill.new_request(request)
    prefill.update_after_alloc(request, ([1, 2, 3],), 0)
    assert prefill.build_orders().step == 1
    assert prefill.due["p"] == (0 if params else num_tokens)
    prefill.launched(Step([Computed("p", num_tokens, ([1, 2, 3],))]))
    assert prefill.build_orders().step == 2
    return prefill, request


def held(prefill, request):
    """Its answer has one token."""
    request.num_tokens += 1
    assert prefill.request_finished(request, ([1, 2, 3],), delivered=True)[0]
    orders = prefill.build_orders()
    assert not prefill.due
    return orders.step, orders.holds[0].step


@pytest.mark.parametrize(("num_tokens", "params"), [(40, {}), (4000, {TRANSFER_KEY: "t"})])
def test_a_hold_names_the_step_that_computed_its_last_token(num_tokens, params):
    assert held(*ahead(num_tokens, **params)) == (3, 1)


def test_a_prompt_that_was_computed_anew_or_went_on_names_its_last_step():
    prefill, request = ahead()
    prefill.preempted("p")
    assert held(prefill, request) == (3, 2)
    prefill, request = ahead()
    request.num_tokens += 1
    assert held(prefill, request) == (3, 2)


@pytest.mark.parametrize(
    ("role", "other", "params"),
    [("kv_producer", "kv_consumer", None), ("kv_consumer", "kv_producer", {**HELD, TRANSFER_KEY: "t"})],
)
def test_a_node_that_is_asked_for_what_its_role_does_not_do_says_so_once_and_counts(
    caplog, role, other, params
):
    node, params = connector(role), params or prefilled()[2]
    nothing = node.build_orders()
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            node.new_request(Request(name, 41, params))
            assert node.matched_tokens(Request(name, 41, params), 0) == (0, False)
    orders = node.build_orders()
    assert orders == Orders(step=nothing.step + 1, failures=("wrong_role", "wrong_role"))
    (said,) = caplog.messages
    assert f"kv_role is {role}" in said
    assert f"has to be {other} or kv_both" in said
    assert not any(node.state().values())

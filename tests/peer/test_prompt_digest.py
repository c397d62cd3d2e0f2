"""A handle opens one load of one prompt: the name of a prompt, and what another one's handle is good for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.outcome import Cause
from kvconnect.peer.handles import PROMPT_BYTES, digest_prompt
from kvconnect.transfer.orders import Results
from kvconnect.transfer.params import TRANSFER_KEY
from tests.halves.test_scheduler_half import ATTENTION, STATE
from tests.halves.test_scheduler_half import connector as scheduler_half
from tests.identities import named

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
PARTS = st.text(max_size=5) | st.integers() | st.binary(max_size=5)
KEYS = st.lists(st.lists(PARTS, max_size=3).map(tuple), max_size=3).map(tuple)
ON_P = {"do_remote_decode": True}
NAMES = (
    "c804ce198ec337e3dc762bdd1a09aece",
    "96f7500b1c87c69c95abe3211c6149a4",
    "0fc9ffdef1ec7b4bed0d0ba670960d5c",
)
A, B = list(range(100, 140)), list(range(200, 240))
ANNOUNCED = {"do_remote_prefill": True, TRANSFER_KEY: "t", "remote_host": "10.0.0.1", "remote_port": 5600}


@dataclass
class Request:
    request_id: str
    token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = field(default=None)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def connector(role, groups=(ATTENTION,), **traits):
    """A half that names prompts."""
    return scheduler_half(
        role, groups, prompt_digest=lambda request, count: digest_prompt(request.token_ids[:count]), **traits
    )


def prefilled(prompt, groups=(ATTENTION,), traits=None, **more):
    """What P answers to a prompt, and its order to hold."""
    prefill = connector("kv_producer", groups, **(traits or {}))
    request = Request("p", list(prompt), {**ON_P, **more})
    prefill.new_request(request)
    del request.token_ids[prefill.prefill_tokens(request) :]
    request.token_ids.append(7)
    _, params = prefill.request_finished(request, ([1, 2, 3],) * len(groups), delivered=True)
    (hold,) = prefill.build_orders().holds
    return params, hold


def loads(decode, *requests):
    """The loads that are ordered of requests which arrive together, and are admitted in turn."""
    decode.build_orders()
    for request in requests:
        decode.new_request(request)
    ordered = []
    for request in requests:
        count, _ = decode.matched_tokens(request, 0)
        decode.update_after_alloc(request, ([4, 5, 6],), count or 0)
        ordered += decode.build_orders().loads
    return ordered


# The name of a prompt


@given(TOKENS, KEYS, TOKENS, KEYS)
def test_prompts_have_one_name_only_if_all_of_them_is_the_same(tokens, keys, others, other_keys):
    name = digest_prompt(tokens, keys)
    assert len(name) == PROMPT_BYTES
    assert name == digest_prompt(list(tokens), tuple(keys))
    same = tokens == others and repr(keys) == repr(other_keys)
    assert (name == digest_prompt(others, other_keys)) == same


def test_the_name_does_not_change_with_versions_of_ours():
    assert digest_prompt([]).hex() == NAMES[0]
    assert digest_prompt(range(5000)).hex() == NAMES[1]
    assert digest_prompt([1, 2], [("salt", "x"), ("mm", b"y", 3)]).hex() == NAMES[2]


@pytest.mark.parametrize("odd", [-1, 1 << 32, 1 << 80])
def test_a_token_of_no_vocabulary_raises_nothing_and_is_no_other_one(odd):
    assert digest_prompt([1, odd]) not in (digest_prompt([1, odd & 0xFFFFFFFF]), digest_prompt([1, odd + 1]))


def test_a_long_prompt_is_named_in_a_moment():
    prompt = [token * 31 % 128_000 for token in range(131_072)]
    took_s = []
    for _ in range(20):
        started = time.perf_counter()
        digest_prompt(prompt)
        took_s.append(time.perf_counter() - started)
    assert min(took_s) < 20e-3


# Handles


@pytest.mark.parametrize("first", ["right", "wrong"])
@pytest.mark.parametrize("other", [B, B[:30]], ids=["as long", "shorter"])
def test_two_prompts_with_the_handle_of_one(first, other):
    """As of a router that sends `prompt: [a, b]` on: b is computed, and a pays nothing for that."""
    params, hold = prefilled(A)
    decode = connector("kv_consumer")
    a, b = Request("a", A, params), Request("b", other, dict(params))
    ordered = loads(decode, *((a, b) if first == "right" else (b, a)))
    assert [(load.request_id, load.handle, load.refusal) for load in ordered] == [("a", hold.handle, None)]
    decode.update_results(Results(received=("a",)))
    for request in (a, b):
        assert decode.matched_tokens(request, 0) == (0, False)
        assert decode.request_finished(request, ([4, 5, 6],), delivered=True) == (False, None)
    assert not decode.build_orders().let_go
    assert set(decode.state().values()) == {0}


@pytest.mark.parametrize(("model", "cause"), [("p", Cause.OTHER_PROMPT), ("d", Cause.OTHER_IDENTITY)])
def test_a_handle_of_another_prompt_is_not_let_go_and_counter_outcome_and_receipt_name_one_cause(
    model, cause
):
    """Servers whose KV differs may count a prompt's tokens differently: then that is the cause."""
    params, _ = prefilled(A, traits={"identity": lambda: named("p")})
    decode, b = connector("kv_consumer", identity=lambda: named(model)), Request("b", B, params)
    decode.new_request(b)
    assert decode.matched_tokens(b, 0) == (0, False)
    decode.update_after_alloc(b, ([4, 5, 6],), 0)
    orders = decode.build_orders()
    assert (orders.failures, orders.let_go, orders.loads) == ((cause.value,), (), ())
    (refused,) = orders.refused
    assert (refused.request_id, refused.reason.cause, refused.seconds) == ("b", cause, 0)
    assert refused.reason == decode.decode.refusal_of("b")
    if cause is Cause.OTHER_PROMPT:
        assert str(refused) == (
            "request b was not loaded from prefill node by lease: the handle is of another prompt "
            "[prompt_differs; the client, or the router that named the transfer must act: send both nodes "
            "the prompt unchanged]"
        )


def test_with_states_the_last_token_is_not_part_of_what_is_handed_over():
    params, _ = prefilled(A, (ATTENTION, STATE))
    decode = connector("kv_consumer", (ATTENTION, STATE))
    for request_id, prompt, wanted in (("other", [*A[:-2], 1, 2], 0), ("last", [*A[:-1], 1], 39)):
        request = Request(request_id, prompt, dict(params))
        decode.new_request(request)
        assert decode.matched_tokens(request, 0) == (wanted, bool(wanted))


# Transfer ids


def test_a_transfer_id_names_one_prompt():
    answer, hold = prefilled(A, **{TRANSFER_KEY: "t"})
    for params in (ANNOUNCED, answer):
        (load,) = loads(connector("kv_consumer"), Request("a", A, dict(params)))
        assert (load.handle, load.refusal) == (hold.handle, None)
    (load,) = loads(connector("kv_consumer"), Request("b", B, dict(ANNOUNCED)))
    assert load.handle != hold.handle, "P holds nothing under what D calls it"
    assert not loads(connector("kv_consumer"), Request("b", B, answer))


def test_two_prompts_with_one_transfer_id_are_each_held_and_fetched():
    prefill, decode = connector("kv_producer"), connector("kv_consumer")
    for request_id, prompt in (("a", A), ("b", B)):
        request = Request(request_id, [*prompt], {**ON_P, TRANSFER_KEY: "t"})
        prefill.new_request(request)
        request.token_ids.append(7)
        assert prefill.request_finished(request, ([1, 2, 3],), delivered=True)[0]
    orders = prefill.build_orders()
    assert set(orders.expected) == {hold.handle for hold in orders.holds}
    ordered = loads(decode, Request("a", A, dict(ANNOUNCED)), Request("b", B, dict(ANNOUNCED)))
    assert [load.handle for load in ordered] == [hold.handle for hold in orders.holds]
    assert len({load.handle for load in ordered}) == 2


def test_an_id_cannot_be_chosen_to_name_another_prompt():
    name = digest_prompt(A).hex()
    _, hold = prefilled(A, **{TRANSFER_KEY: "t"})
    for text in ("t", f"{name}:t", hold.handle):
        (load,) = loads(connector("kv_consumer"), Request("b", B, {**ANNOUNCED, TRANSFER_KEY: text}))
        assert load.handle != hold.handle

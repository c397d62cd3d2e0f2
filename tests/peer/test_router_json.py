"""What routers in the field send to P and to D, replayed against both scheduler halves.

Each router is two functions on JSON text: the body for P out of the client's, and the body for D out of
P's answer. Only what they do to the body is here; facts were read in their sources in November 2026.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvconnect.transfer.orders import Results
from tests.halves.test_scheduler_half import ATTENTION, HANDLES, Request, connector

CLIENT = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "max_completion_tokens": 50,
    "min_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
}
SIX_KEYS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TRANSFER = "0f8c1c1e-9f0b-11f0-8000-000000000000"
Body = dict[str, Any]


def one_token(body: Body, *, always_both: bool = False, drop: tuple[str, ...] = ()) -> Body:
    """What every router does to make a prefill of a request."""
    leg = {key: value for key, value in body.items() if key not in ("stream_options", *drop)}
    leg["max_tokens"] = 1
    if always_both or "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    leg["stream"] = False
    return leg


def verbatim(body: Body, answer: Body) -> Body:
    return {**body, "kv_transfer_params": answer["kv_transfer_params"]}


@dataclass(frozen=True)
class Router:
    """``needs`` are keys of P's answer that the router reads, and fails without."""

    name: str
    to_prefill: Callable[[Body], Body]
    to_decode: Callable[[Body, Body], Body]
    needs: tuple[str, ...] = ()
    sequential: bool = True

    def __str__(self) -> str:
        return self.name


def six_keys(body: Body, **more: Any) -> Body:
    return {**one_token(body, **more), "kv_transfer_params": dict(SIX_KEYS)}


def toy_proxy_decode(body: Body, answer: Body) -> Body:
    # An empty dictionary counts as none.
    params = answer.get("kv_transfer_params", {})
    return {**body, "kv_transfer_params": params} if params else body


def production_stack_decode(body: Body, answer: Body) -> Body:
    # The host is overwritten with the one that the router itself reaches P by.
    return {**body, "kv_transfer_params": {**answer["kv_transfer_params"], "remote_host": "10.0.0.1"}}


def llmd_coordinator_decode(body: Body, answer: Body) -> Body:
    params = {**answer["kv_transfer_params"], "do_remote_decode": False, "do_remote_prefill": True}
    return {**body, "kv_transfer_params": params}


def ray_decode(body: Body, answer: Body) -> Body:
    # With tokenise-once the prompt's ids travel along, for the front end of D.
    return {**body, "kv_transfer_params": {**answer["kv_transfer_params"], "prompt_token_ids": [1, 2, 3]}}


def dynamo_decode(body: Body, answer: Body) -> Body:
    """Its sidecar keeps the dictionary in a protobuf Struct, which knows doubles only, and writes the
    port as text."""

    def as_struct(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: as_struct(item) for key, item in value.items()}
        if isinstance(value, list):
            return [as_struct(item) for item in value]
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    params = as_struct(answer["kv_transfer_params"])
    return {**body, "kv_transfer_params": {**params, "remote_port": str(int(params["remote_port"]))}}


def announced(body: Body, **more: Any) -> Body:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": TRANSFER}
    return {**one_token(body, **more), "kv_transfer_params": params}


def told(**where: Any) -> Callable[[Body, Body], Body]:
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": TRANSFER, **where}
    return lambda body, answer: {**body, "kv_transfer_params": params}


BOOTSTRAPPED = told(
    remote_bootstrap_addr="http://10.0.0.1:8998", remote_engine_id=HANDLES.introduce("10.0.0.1", 5600)
)
ROUTERS = [
    # llm-d/llm-d-router, pkg/sidecar/proxy/connector_nixlv2.go and pkg/common/request: both caps are
    # set, min_tokens goes, P's object is put into D's body as it was parsed.
    Router("llm-d sidecar, nixlv2", lambda b: six_keys(b, always_both=True, drop=("min_tokens",)), verbatim),
    # The same with NIXL push: a transfer id beside the six keys.
    Router(
        "llm-d sidecar, nixlv2 with a transfer id",
        lambda b: {
            **six_keys(b, always_both=True, drop=("min_tokens",)),
            "kv_transfer_params": {**SIX_KEYS, "transfer_id": TRANSFER},
        },
        verbatim,
    ),
    # llm-d's coordinator: a copy of P's dictionary, with the two flags set again.
    Router("llm-d coordinator", lambda b: six_keys(b, drop=("min_tokens",)), llmd_coordinator_decode),
    # vllm-router 0.1.17, as it was recorded: min_tokens is 1; without parameters in the answer D gets none.
    Router("vllm-router", lambda b: {**six_keys(b), "min_tokens": 1}, verbatim),
    # vLLM production-stack, disaggregated_prefill_orchestrated.
    Router("production-stack", six_keys, production_stack_decode, ("remote_host",)),
    # Ray Serve LLM, DefaultPDProtocolMixin: stream_options is null, not absent.
    Router("Ray Serve LLM", lambda b: {**six_keys(b, always_both=True), "stream_options": None}, ray_decode),
    # vllm, tests/v1/kv_connector/nixl_integration/toy_proxy_server.py.
    Router(
        "toy_proxy_server",
        lambda b: six_keys(b, drop=("min_tokens", "min_completion_tokens")),
        toy_proxy_decode,
    ),
    # ai-dynamo/dynamo, the Rust sidecar: P is asked with one key.
    Router(
        "Dynamo sidecar",
        lambda b: {**one_token(b), "kv_transfer_params": {"do_remote_decode": True}},
        dynamo_decode,
        ("remote_port",),
    ),
    # AIBrix gateway, the pd router without its own NIXL mode: the pod's address is written over.
    Router("AIBrix", six_keys, production_stack_decode),
    # Both at once, by Mooncake's protocol: P's bootstrap was asked before.
    Router(
        "vllm-router, mooncake", lambda b: {**announced(b), "min_tokens": 1}, BOOTSTRAPPED, sequential=False
    ),
    # llm-d/llm-d-router, pkg/sidecar/proxy/connector_mooncake.go.
    Router(
        "llm-d sidecar, mooncake",
        lambda b: announced(b, always_both=True, drop=("min_tokens",)),
        BOOTSTRAPPED,
        sequential=False,
    ),
    Router(
        "kvconnect, parallel", announced, told(remote_host="10.0.0.1", remote_port=5600), sequential=False
    ),
    Router(
        "kvconnect, parallel with an engine id",
        announced,
        told(remote_host="10.0.0.1", remote_port=5600, remote_engine_id="P"),
        sequential=False,
    ),
]


def over_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def over_json_and_msgpack(value: Any) -> Any:
    """To another process and on to its engine: what were tuples and what were lists cannot be told."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(over_json(value)))


def over_tuples(value: Any) -> Any:
    """Within one process, where nothing turns tuples into lists."""
    if isinstance(value, dict):
        return {key: over_tuples(item) for key, item in value.items()}
    return tuple(over_tuples(item) for item in value) if isinstance(value, list) else value


@pytest.mark.parametrize("carry", [over_json, over_json_and_msgpack, over_tuples])
@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_d_fetches_what_p_holds(router: Router, carry: Callable[[Any], Any]) -> None:
    prefill, decode = connector("kv_producer"), connector("kv_consumer")
    decode.build_orders()
    asked = carry(router.to_prefill(carry(CLIENT)))
    assert (asked["max_tokens"], asked["stream"]) == (1, False), "one token, whole"
    request = Request("cmpl-1-0-5d2a9e11", 40, asked["kv_transfer_params"])
    prefill.new_request(request)
    request.num_tokens += 1
    kept, params = prefill.request_finished(request, ([4, 5, 6],), delivered=True)
    assert kept
    assert set(params) >= {*router.needs}
    answer = carry({"id": "cmpl-1", "kv_transfer_params": params})
    body = carry(router.to_decode(carry(CLIENT), answer))
    assert {key: body[key] for key in CLIENT} == carry(CLIENT), "the client's own limits and stream"
    received = Request("cmpl-1-0-77b0c9f3", 40, body["kv_transfer_params"])
    decode.new_request(received)
    assert decode.matched_tokens(received, 0) == (40, True)
    decode.update_after_alloc(received, ([21, 22, 23],), 40)
    (hold,) = prefill.build_orders().holds
    (load,) = decode.build_orders().loads
    assert load.refusal is None
    assert (load.handle, load.num_tokens) == (hold.handle, hold.num_tokens)
    assert load.peer[1:] == ("10.0.0.1", 5600)
    assert load.peer[0] in ("P", "" if not router.sequential else "P")
    decode.update_results(Results(received=(received.request_id,)))
    prefill.update_results(Results(sent=(request.request_id,)))
    decode.request_finished(received, ([21, 22, 23],), delivered=True)
    assert set((prefill.state() | decode.state()).values()) == {0}


def test_the_answer_of_p_is_plain_json_with_lists_of_block_ids_by_group() -> None:
    other = dataclasses.replace(ATTENTION, layer_names=("b",))
    prefill = connector("kv_producer", (ATTENTION, other))
    request = Request("p", 41, dict(SIX_KEYS))
    _, params = prefill.request_finished(request, ((1, 2, 3), (4, 5, 6)), delivered=True)
    assert over_json(params) == params
    assert params["remote_block_ids"] == [[1, 2, 3], [4, 5, 6]]
    assert params["tp_size"] == 1


def test_a_router_that_drops_the_parameters_leaves_d_to_compute() -> None:
    decode = connector("kv_consumer")
    for params in (None, {}):
        assert decode.matched_tokens(Request("d", 40, params), 0) == (0, False)

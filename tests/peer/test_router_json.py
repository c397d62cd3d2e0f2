"""What routers in the field send to P and to D, replayed against both scheduler halves.

Only what a router makes of ``kv_transfer_params`` is here: what it sends to P, and what to D out of P's
answer. Facts were read in their sources in November 2026.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvconnect.transfer.orders import Results
from tests.halves.test_scheduler_half import ATTENTION, HANDLES, Request, connector

Params = dict[str, Any]

SIX_KEYS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ANNOUNCED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "transfer_id": "0f8c1c1e-9f0b-11f0-8000-000000000000",
}


def dynamo(answer: Params) -> Params:
    """Its sidecar keeps the dictionary in a protobuf Struct, which knows doubles only, and writes the
    port as text."""

    def as_struct(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: as_struct(item) for key, item in value.items()}
        if isinstance(value, list):
            return [as_struct(item) for item in value]
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    return {**as_struct(answer), "remote_port": str(answer["remote_port"])}


def told(**where: Any) -> Callable[[Params], Params]:
    return lambda answer: {**ANNOUNCED, "do_remote_prefill": True, "do_remote_decode": False, **where}


ROUTERS: dict[str, tuple[Params, Callable[[Params], Params]]] = {
    # llm-d/llm-d-router, pkg/sidecar/proxy/connector_nixlv2.go: P's object is put into D's body as it was
    # parsed. vllm-router 0.1.17, as it was recorded. vllm's nixl_integration/toy_proxy_server.py.
    "llm-d sidecar, vllm-router, toy_proxy_server": (SIX_KEYS, dict),
    "llm-d sidecar with NIXL push": ({**SIX_KEYS, "transfer_id": ANNOUNCED["transfer_id"]}, dict),
    # A copy of P's dictionary, with the two flags set again.
    "llm-d coordinator": (SIX_KEYS, lambda p: {**p, "do_remote_decode": False, "do_remote_prefill": True}),
    # disaggregated_prefill_orchestrated, and AIBrix' pd router without its own NIXL mode: the host is
    # overwritten with the one that the router itself reaches P by.
    "production-stack, AIBrix": (SIX_KEYS, lambda p: {**p, "remote_host": "10.0.0.1"}),
    # DefaultPDProtocolMixin: with tokenise-once the prompt's ids travel along, for the front end of D.
    "Ray Serve LLM": (SIX_KEYS, lambda p: {**p, "prompt_token_ids": [1, 2, 3]}),
    # ai-dynamo/dynamo, the Rust sidecar: P is asked with one key.
    "Dynamo sidecar": ({"do_remote_decode": True}, dynamo),
    # Both at once, by Mooncake's protocol: P's bootstrap was asked before. llm-d's is connector_mooncake.go.
    "vllm-router and llm-d sidecar, mooncake": (
        ANNOUNCED,
        told(
            remote_bootstrap_addr="http://10.0.0.1:8998",
            remote_engine_id=HANDLES.introduce("10.0.0.1", 5600),
        ),
    ),
    "kvconnect, parallel": (ANNOUNCED, told(remote_host="10.0.0.1", remote_port=5600)),
    "kvconnect, parallel with an engine id": (
        ANNOUNCED,
        told(remote_host="10.0.0.1", remote_port=5600, remote_engine_id="P"),
    ),
}


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
@pytest.mark.parametrize("router", ROUTERS)
def test_d_fetches_what_p_holds(router: str, carry: Callable[[Any], Any]) -> None:
    prefill, decode = connector("kv_producer"), connector("kv_consumer")
    decode.build_orders()
    to_prefill, to_decode = ROUTERS[router]
    request = Request("cmpl-1-0-5d2a9e11", 40, carry(to_prefill))
    prefill.new_request(request)
    request.num_tokens += 1
    kept, params = prefill.request_finished(request, ([4, 5, 6],), delivered=True)
    assert kept
    received = Request("cmpl-1-0-77b0c9f3", 40, carry(to_decode(over_json(params))))
    decode.new_request(received)
    assert decode.matched_tokens(received, 0) == (40, True)
    decode.update_after_alloc(received, ([21, 22, 23],), 40)
    (hold,) = prefill.build_orders().holds
    (load,) = decode.build_orders().loads
    assert load.refusal is None
    assert (load.handle, load.num_tokens) == (hold.handle, hold.num_tokens)
    assert load.peer[1:] == ("10.0.0.1", 5600)
    assert load.peer[0] in ("P", "" if to_prefill is ANNOUNCED else "P")
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
    assert (params["tp_size"], params["remote_host"], params["remote_port"]) == (1, "10.0.0.1", 5600)


def test_a_router_that_drops_the_parameters_leaves_d_to_compute() -> None:
    decode = connector("kv_consumer")
    for params in (None, {}):
        assert decode.matched_tokens(Request("d", 40, params), 0) == (0, False)

"""The HTTP interface on a real port."""

import asyncio
import json
import time

import aiohttp
import pytest

from kvconnect.errors import LocalError
from kvconnect.node.node_connector import Connector
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.server import NodeServer
from kvconnect.node.serving import build_engine
from tests.node.node_harness import CopyConnector, make_client, make_prompt


class Session:
    """A node on a free port and a client of it, inside ``asyncio.run``."""

    def __init__(self, connector=None, **options):
        defaults = {"num_blocks": 64, "max_model_len": 400, "max_num_batched_tokens": 128}
        self.options = NodeOptions(**{**defaults, **options})
        self.engine = build_engine(self.options, connector)

    async def __aenter__(self):
        self.server = NodeServer(self.engine)
        self.port = await self.server.start("127.0.0.1", 0)
        self.http = aiohttp.ClientSession(f"http://127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.server.stop(drain_timeout_s=0.2)

    async def post(self, body, headers=None, data=None):
        async with self.http.post(
            "/v1/completions", data=data or json.dumps(body), headers=headers
        ) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path):
        async with self.http.get(path) as response:
            text = await response.text()
            return response.status, json.loads(text) if "json" in response.content_type else text

    async def idle(self, timeout_s=3.0):
        """Wait until no block is held."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = (await self.get("/debug/state"))[1]
            if state["blocks"]["held"] == 0:
                return state
            await asyncio.sleep(0.01)
        raise AssertionError(f"still busy: {state}")


def run(test, connector=None, **options):
    """Run ``test(session)`` against a fresh node."""

    async def main():
        async with Session(connector, **options) as session:
            await test(session)

    asyncio.run(asyncio.wait_for(main(), 30))


PROMPT = make_prompt(50)


def test_a_completion():
    expected = make_client().complete(PROMPT)

    async def test(session):
        body = {"model": "gqa", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "n": 1}
        status, answer, headers = await session.post(
            {**body, "ignore_eos": True, "min_tokens": 1, "return_kv_block_ids": True},
            {"X-Request-Id": "mine"},
        )
        assert status == 200
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["choices"][0]["text"] == "".join(f" {token}" for token in expected)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": 50,
            "completion_tokens": 8,
            "total_tokens": 58,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert answer["id"] == "cmpl-mine"
        assert headers["X-Request-Id"] == "mine"
        assert answer["kv_block_ids"] == [[1, 2, 3, 4]]
        assert "draft_token_ids" not in answer
        _, again, _ = await session.post({**body, "prompt": [PROMPT]})
        assert again["choices"][0]["token_ids"] == expected
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert "kv_block_ids" not in again

    run(test)


def test_routers_may_name_requests_with_up_to_512_printable_characters():
    """Some put the addresses of both nodes into it."""

    async def test(session):
        for request_id in ("___prefill_addr_" + "p" * 154, "x" * 512, "mit Ü " * 20 + "!"):
            params = {"do_remote_decode": True}
            body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params}
            status, answer, _ = await session.post(body, {"X-Request-Id": request_id})
            assert (status, answer["id"]) == (200, f"cmpl-{request_id}"), answer

    run(test)


def test_a_text_prompt_is_its_bytes_and_drafts_are_returned():
    async def test(session):
        _, text, _ = await session.post({"prompt": "grün", "max_tokens": 4})
        _, ids, _ = await session.post({"prompt": list("grün".encode()), "max_tokens": 4})
        assert text["choices"] == ids["choices"]
        assert text["usage"]["prompt_tokens"] == 5
        assert len(text["draft_token_ids"]) == 4

    run(test, model="mixed")


def test_a_stream_gives_the_same_tokens():
    expected = make_client().complete(PROMPT)

    async def test(session):
        body = {"prompt": PROMPT, "max_tokens": 8, "stream": True}
        async with session.http.post("/v1/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected
        assert len(chunks) == 8
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * 7 + ["length"]
        assert chunks[-1]["usage"]["completion_tokens"] == 8
        assert "kv_transfer_params" in chunks[-1]

    run(test)


BAD_BODIES = [
    ([], 400, "Expected `object`, got `array`"),
    ({}, 400, "missing required field `prompt`"),
    ({"prompt": []}, 400, "prompt is empty"),
    ({"prompt": 5}, 400, "got `int` - at `$.prompt`"),
    ({"prompt": [1, "2"]}, 400, "got `str` - at `$.prompt[1]`"),
    ({"prompt": [1, True]}, 400, "got `bool` - at `$.prompt[1]`"),
    ({"prompt": [512]}, 400, "prompt[0] is 512"),
    ({"prompt": [-1]}, 400, "prompt[0] is -1"),
    ({"prompt": [[1], [2]]}, 400, "prompt[0] is an array"),
    ({"prompt": "\ud800"}, 400, "prompt is not valid Unicode"),
    ({"prompt": [1], "max_tokens": 0}, 400, "Expected `int` >= 1 - at `$.max_tokens`"),
    ({"prompt": [1], "max_tokens": 1.5}, 400, "got `float` - at `$.max_tokens`"),
    (
        {"prompt": [1], "n": 2},
        400,
        "n is 2, which is not supported by this node: leave it out",
    ),
    ({"prompt": [1], "temperature": 0.7}, 400, "temperature is 0.7, which is not supported"),
    ({"prompt": [1], "stream": "yes"}, 400, "got `str` - at `$.stream`"),
    ({"prompt": [1], "kv_transfer_params": 3}, 400, "got `int` - at `$.kv_transfer_params`"),
    ({"prompt": [1], "echo": True}, 400, "echo is True, which is not supported"),
    ({"prompt": [1], "model": "other"}, 404, "'other' is not served"),
    ({"prompt": [1] * 390, "max_tokens": 11}, 400, "is 401 tokens, max_model_len is 400"),
]


def test_bad_requests_name_the_field_and_leave_the_node_alive():
    async def test(session):
        for body, expected, text in BAD_BODIES:
            status, answer, _ = await session.post(body)
            assert (status, answer["error"]["code"]) == (expected, expected), answer
            assert text in answer["error"]["message"]
            assert answer["error"]["type"]
        for data in (b"{", b"\xff\xfe", b"[" * 100_000):
            status, answer, _ = await session.post(None, data=data)
            assert status == 400
            assert "not valid JSON" in answer["error"]["message"]
        for data, headers in (
            (b'{"prompt": [1], "\\ud800": 1}', {}),
            (b"xxxx", {"Content-Encoding": "gzip", "Connection": "close"}),
        ):
            status, answer, _ = await session.post(None, headers, data=data)
            assert status == 400, answer
        status, answer, _ = await session.post({"prompt": [1]}, {"X-Request-Id": "x" * 513})
        assert status == 400
        assert "X-Request-Id" in answer["error"]["message"]
        status, answer, _ = await session.post(None, data=b" " * (9 * 1024 * 1024))
        assert status == answer["error"]["code"] == 413
        assert (await session.get("/nope"))[1]["error"]["code"] == 404
        assert (await session.get("/v1/completions"))[1]["error"]["code"] == 405
        assert (await session.post({"prompt": [1]}))[0] == 200

    run(test)


def test_what_is_no_http_is_answered_and_not_logged_with_a_traceback(caplog, capfd):
    async def test(session):
        for data in (b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"z" * 20_000 + b"\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", session.port)
            writer.write(data)
            assert (await reader.read(100)).startswith(b"HTTP/1.0 400")
            writer.close()
        assert (await session.post({"prompt": [1]}))[0] == 200

    run(test)
    assert [record for record in caplog.records if record.exc_info] == []
    assert "Traceback" not in capfd.readouterr().err


def test_health_models_metrics_and_state():
    async def test(session):
        assert (await session.get("/health"))[0] == 200
        _, models = await session.get("/v1/models")
        assert models["data"][0]["id"] == "gqa"
        await session.post({"prompt": PROMPT, "max_tokens": 3})
        _, metrics = await session.get("/metrics")
        assert "process_max_fds" in metrics
        _, state = await session.get("/debug/state")
        assert state["blocks"] == {"free": 60, "held": 0, "total": 60, "reserved": 3}
        assert state["requests"]["running"] == 0
        assert state["counts"]["generated_tokens"] == 3
        assert state["connector"] == {"engine": "none"}

    run(test, reserved_blocks=3)


def test_concurrent_clients_get_what_they_would_get_alone():
    prompts = [make_prompt(20 + 13 * index, seed=index) for index in range(8)]
    alone = [make_client().complete(prompt, 12) for prompt in prompts]

    async def test(session):
        answers = await asyncio.gather(*(session.post({"prompt": p, "max_tokens": 12}) for p in prompts))
        assert [answer["choices"][0]["token_ids"] for _, answer, _ in answers] == alone
        await session.idle()

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(stream):
    async def test(session):
        body = {"prompt": [1], "max_tokens": 390, "stream": stream}
        leaving = asyncio.create_task(session.http.post("/v1/completions", json=body))
        await asyncio.sleep(0.1)
        if stream:
            (await leaving).close()
        else:
            leaving.cancel()
        state = await session.idle()
        assert state["counts"]["aborted"] == 1

    run(test)


def test_transfer_parameters_and_connector_state_are_shown():
    connector = CopyConnector()
    connector.state = lambda: {"peers": 0}

    async def test(session):
        body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        status, answer, _ = await session.post(body)
        assert status == 200
        assert answer["kv_transfer_params"]["do_remote_prefill"] is True
        _, state = await session.get("/debug/state")
        assert state["blocks"]["held"] == 4
        assert state["connector"] == {"peers": 0}
        connector.sent.append(answer["kv_transfer_params"]["name"])
        connector.wake()
        await session.idle(0.4)

    run(test, Connector(connector, connector))
    assert connector.closed


def test_a_failed_load_is_a_bad_gateway():
    connector = CopyConnector()
    connector.fail_with = "the peer left"

    async def test(session):
        body = {"prompt": PROMPT, "kv_transfer_params": {"do_remote_prefill": True}}
        status, answer, _ = await session.post(body)
        assert status == 502
        assert answer["error"]["message"] == "the peer left"
        async with session.http.post("/v1/completions", json={**body, "stream": True}) as response:
            assert response.status == 502

    run(test, Connector(connector, connector, recompute_failed_loads=False))


def test_a_broken_engine_answers_and_is_unhealthy():
    async def test(session):
        def fail(step):
            raise RuntimeError("the device is gone")

        session.engine.runner.execute = fail
        status, answer, _ = await session.post({"prompt": PROMPT})
        assert status == 500
        assert "the device is gone" in answer["error"]["message"]
        status, answer, _ = await session.post({"prompt": PROMPT})
        assert status == 503
        assert (await session.get("/health"))[0] == 503

    run(test)


def test_a_request_that_the_connector_broke_on_is_answered_once():
    connector = CopyConnector()

    async def test(session):
        def fail(request):
            raise RuntimeError("the scheduler has it already")

        connector.new_request = fail
        delivered, deliver = [], session.server._deliver

        def look(engine_id, output):
            delivered.append(output)
            deliver(engine_id, output)

        session.server._deliver = look
        assert (await session.post({"prompt": PROMPT}))[0] == 500
        session.engine.stop()
        assert len(delivered) == 1

    run(test, Connector(connector, connector))


def test_stopping_ends_what_runs():
    async def main():
        async with Session() as session:
            running = asyncio.create_task(session.post({"prompt": [1], "max_tokens": 390}))
            await asyncio.sleep(0.1)
            await session.server.stop(drain_timeout_s=0.0)
            with pytest.raises(LocalError, match="stopping"):
                session.engine.submit(None)
            assert not session.engine.alive
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_is_wrong_never_reaches_the_engine(monkeypatch):
    submitted = []

    async def test(session):
        monkeypatch.setattr(session.engine, "submit", submitted.append)
        for body, expected, _ in BAD_BODIES:
            assert (await session.post(body))[0] == expected
        deep = {"a": 1}
        for _ in range(300):
            deep = {"a": deep}
        for params, text in (
            ({"a": "x" * (64 << 10)}, "bytes of JSON, accepted: 65536"),
            ({**deep, "b": "x" * (64 << 10)}, "bytes of JSON, accepted: 65536"),
        ):
            status, answer, _ = await session.post({"prompt": [1], "kv_transfer_params": params})
            assert status == 400
            assert text in answer["error"]["message"]
        assert session.engine.snapshot.steps < 3

    run(test)
    assert submitted == []


@pytest.mark.parametrize(
    "params",
    [{"a": 2**70, "b": "\ud800", "c": [1.5, None, True, {"d": -(2**63) - 1}]}, {}, {"\u0000": "\u2028"}],
)
def test_transfer_parameters_reach_the_engine_as_they_were_sent(params, monkeypatch):
    seen = []

    async def test(session):
        submit = session.engine.submit

        def look(request):
            seen.append(request.kv_transfer_params)
            submit(request)

        monkeypatch.setattr(session.engine, "submit", look)
        assert (await session.post({"prompt": [1], "kv_transfer_params": params}))[0] == 200

    run(test)
    assert seen == [params]


def test_what_cannot_be_told_of_an_end_is_an_error_and_the_node_goes_on():
    connector = CopyConnector()

    async def test(session):
        connector.request_finished = lambda *_, **__: (False, {"of": object()})
        status, answer, _ = await session.post({"prompt": PROMPT, "max_tokens": 2})
        assert status == 500
        assert "object" in answer["error"]["message"]
        connector.request_finished = lambda *_, **__: (False, None)
        assert (await session.post({"prompt": PROMPT, "max_tokens": 2}))[0] == 200

    run(test, Connector(connector, connector))


def test_requests_in_flight_end_before_the_node_and_new_ones_are_refused():
    async def test(session):
        running = asyncio.create_task(session.post({"prompt": [1], "max_tokens": 200}))
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(session.server.stop(20.0))
        await asyncio.sleep(0.05)
        status, answer, _ = await session.post({"prompt": [1]})
        assert status == 503
        assert answer["error"]["message"] == "the node is stopping"
        assert (await session.get("/health"))[0] == 503
        status, answer, _ = await running
        assert status == 200
        assert len(answer["choices"][0]["token_ids"]) == 200
        await stopping

    run(test)


@pytest.mark.parametrize(("by_body", "by_header"), [("s", "other"), ("", "s"), (None, "s")])
def test_a_session_is_named_by_the_body_or_else_by_the_header(by_body, by_header):
    """As vLLM 0.33 has it; routers keep sessions by both."""

    async def test(session):
        pin = {"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {}}
        release = {**pin, "action_type": "release", "payload": {"session_id": "s"}}
        for action in (pin, release):
            hints = {"protocol_version": "1", "message_id": "m", "actions": [action]}
            body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"kv_hints": hints}}
            if by_body is not None:
                body["session_id"] = by_body
            status, answer, _ = await session.post(body, {"X-Session-ID": by_header})
            assert status == 200
            (done,) = answer["kv_transfer_params"]["kv_hint_results"]["actions"]
            assert (done["outcome"], done["num_tokens"]) == ("accepted", 48), done
        status, told, _ = await session.post({"prompt": PROMPT, "session_id": 7})
        assert (status, "session_id" in told["error"]["message"]) == (400, True)

    offload = {"cpu_bytes": 1 << 20, "pin_quota": 0.5}
    config = {"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "memory", "offload": offload}}
    run(test, kv_transfer_config=json.dumps(config))

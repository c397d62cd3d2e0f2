"""The HTTP interface on a real port: what it answers, and that what clients can make it hold is bounded."""

import asyncio
import contextlib
import json
import time

import aiohttp
import pytest

from kvconnect.errors import LocalError
from kvconnect.metrics import Metrics
from kvconnect.node.node_connector import Connector
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import Output
from kvconnect.node.server import HttpLimits, NodeServer
from kvconnect.node.serving import build_engine
from tests.node.node_harness import CopyConnector, answer_of, make_prompt
from tests.router.router_doubles import in_loop

PROMPT = make_prompt(50)
PRODUCER = {"do_remote_decode": True}


class Served:
    """A node on a free port and a client of it, inside ``asyncio.run``."""

    def __init__(self, engine, **limits):
        self.engine = engine
        self.server = NodeServer(engine, HttpLimits(**limits))

    async def __aenter__(self):
        self.port = await self.server.start("127.0.0.1", 0)
        self.http = aiohttp.ClientSession(f"http://127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.server.stop(drain_timeout_s=0.2)

    async def send(self, data, headers=None):
        async with self.http.post("/v1/completions", data=data, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def post(self, headers=None, **body):
        return (await self.send(json.dumps({"prompt": PROMPT, **body}), headers))[:2]

    async def get(self, path):
        async with self.http.get(path) as response:
            text = await response.text()
            return response.status, json.loads(text) if "json" in response.content_type else text

    async def idle(self, timeout_s=3.0):
        """Wait until no block is held."""
        deadline = time.monotonic() + timeout_s
        while (state := (await self.get("/debug/state"))[1])["blocks"]["held"]:
            assert time.monotonic() < deadline, f"still busy: {state}"
            await asyncio.sleep(0.01)
        return state

    async def raw(self, data=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await writer.drain()
        return reader, writer


def node(connector=None, **options):
    """A real one."""
    defaults = {"num_blocks": 64, "max_model_len": 400, "max_num_batched_tokens": 128}
    return Served(build_engine(NodeOptions(**{**defaults, **options}), connector))


@in_loop
async def test_a_completion():
    expected = answer_of(PROMPT)
    async with node() as session:
        body = {"model": "gqa", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "n": 1}
        more = {"ignore_eos": True, "min_tokens": 1}
        status, answer, headers = await session.send(json.dumps({**body, **more}), {"X-Request-Id": "mine"})
        assert status == 200
        (choice,) = answer["choices"]
        assert choice["token_ids"] == expected
        assert choice["text"] == "".join(f" {token}" for token in expected)
        assert choice["finish_reason"] == "length"
        usage = {"prompt_tokens": 50, "completion_tokens": 8, "total_tokens": 58}
        assert answer["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
        assert answer["id"] == "cmpl-mine"
        assert headers["X-Request-Id"] == "mine"
        assert "draft_token_ids" not in answer
        _, again = await session.post(**body)
        assert again["choices"][0]["token_ids"] == expected
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


@in_loop
async def test_a_text_prompt_is_its_bytes_and_drafts_are_returned():
    async with node(model="mixed") as session:
        _, text = await session.post(prompt="grün", max_tokens=4)
        _, ids = await session.post(prompt=list("grün".encode()), max_tokens=4)
        assert text["choices"] == ids["choices"]
        assert text["usage"]["prompt_tokens"] == 5
        assert len(text["draft_token_ids"]) == 4


@in_loop
async def test_a_stream_gives_the_same_tokens():
    expected = answer_of(PROMPT)
    async with node() as session:
        body = {"prompt": PROMPT, "max_tokens": 8, "stream": True}
        async with session.http.post("/v1/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 7 + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert "kv_transfer_params" in chunks[-1]


BAD_BODIES = [
    ([], 400, "must be a JSON object, not list"),
    ({}, 400, "missing required field `prompt`"),
    ({"prompt": []}, 400, "prompt is empty"),
    ({"prompt": 5}, 400, "got `int` - at `$.prompt`"),
    ({"prompt": [1, "2"]}, 400, "got `str` - at `$.prompt[1]`"),
    ({"prompt": [1, True]}, 400, "got `bool` - at `$.prompt[1]`"),
    ({"prompt": [1, 512]}, 400, "prompt has token 512, token ids are from 0 to 511"),
    ({"prompt": [1, -1]}, 400, "Expected `int` >= 0 - at `$.prompt[1]`"),
    ({"prompt": [[1]]}, 400, "got `array` - at `$.prompt[0]`"),
    ({"prompt": "\ud800"}, 400, "prompt is not valid Unicode"),
    ({"prompt": [1], "max_tokens": 0}, 400, "Expected `int` >= 1 - at `$.max_tokens`"),
    ({"prompt": [1], "max_tokens": 1.5}, 400, "got `float` - at `$.max_tokens`"),
    ({"prompt": [1], "n": 2}, 400, "n is 2, which is not supported by this node: leave it out"),
    ({"prompt": [1], "temperature": 0.7}, 400, "temperature is 0.7, which is not supported"),
    ({"prompt": [1], "stream": "yes"}, 400, "got `str` - at `$.stream`"),
    ({"prompt": [1], "session_id": 7}, 400, "session_id"),
    ({"prompt": [1], "kv_transfer_params": 3}, 400, "got `int` - at `$.kv_transfer_params`"),
    ({"prompt": [1], "echo": True}, 400, "echo is True, which is not supported"),
    ({"prompt": [1], "model": "other"}, 404, "'other' is not served"),
    ({"prompt": [1] * 390, "max_tokens": 11}, 400, "is 401 tokens, max_model_len is 400"),
    (b"{", 400, "is not JSON"),
    (b'{"prompt": [1], "\\ud800": 1}', 400, ""),
    (b" " * (9 << 20), 413, ""),
]


@in_loop
async def test_what_is_wrong_is_named_never_reaches_the_engine_and_leaves_the_node_alive():
    async with node() as session:
        for body, expected, text in BAD_BODIES:
            data = body if isinstance(body, bytes) else json.dumps(body)
            status, answer, _ = await session.send(data)
            assert (status, answer["error"]["code"]) == (expected, expected), answer
            assert text in answer["error"]["message"]
            assert answer["error"]["type"]
        packed = {"Content-Encoding": "gzip", "Connection": "close"}
        assert (await session.send(b"xxxx", packed))[0] == 400
        assert "x" * 513 not in (await session.post({"X-Request-Id": "x" * 513}))[1]["id"]
        assert (await session.get("/nope"))[1]["error"]["code"] == 404
        assert (await session.get("/v1/completions"))[1]["error"]["code"] == 405
        assert session.engine.snapshot["counts"]["prompt_tokens"] == len(PROMPT)
        assert (await session.post())[0] == 200


@in_loop
async def test_what_is_no_http_is_answered_and_not_logged_with_a_traceback(caplog, capfd):
    async with node() as session:
        for data in (b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"z" * 20_000 + b"\r\n\r\n"):
            reader, writer = await session.raw(data)
            assert (await reader.read(100)).startswith(b"HTTP/1.0 400")
            writer.close()
        assert (await session.post())[0] == 200
    assert [record for record in caplog.records if record.exc_info] == []
    assert "Traceback" not in capfd.readouterr().err


@in_loop
async def test_health_models_metrics_and_state():
    async with node(reserved_blocks=3) as session:
        assert (await session.get("/health"))[0] == 200
        _, models = await session.get("/v1/models")
        assert models["data"][0]["id"] == "gqa"
        await session.post(max_tokens=3)
        _, metrics = await session.get("/metrics")
        assert "process_max_fds" in metrics
        _, state = await session.get("/debug/state")
        assert state["blocks"] == {"free": 60, "held": 0, "total": 60, "reserved": 3}
        assert state["requests"]["running"] == 0
        assert state["counts"]["generated_tokens"] == 3
        assert state["connector"] == {"engine": "none"}


@in_loop
async def test_observations_are_counted_while_nobody_asks(monkeypatch):
    monkeypatch.setattr("kvconnect.node.server._ADD_S", 0.01)
    async with node() as session:
        metrics = Metrics()
        session.engine.worker.changes = metrics.changes
        for _ in range(3):
            for _ in range(4000):
                metrics.load_seconds.observe(0.2)
            await asyncio.sleep(0.1)
        metrics.leases.set(2)
        _, shown = await session.get("/metrics")
        assert "\nkvconnect_load_seconds_count 12000.0\n" in shown
        assert "\nkvconnect_leases_held 2.0\n" in shown


@in_loop
async def test_concurrent_clients_get_what_they_would_get_alone():
    prompts = [make_prompt(20 + 13 * index, seed=index) for index in range(8)]
    alone = [answer_of(prompt, 12) for prompt in prompts]
    async with node() as session:
        answers = await asyncio.gather(*(session.post(prompt=p, max_tokens=12) for p in prompts))
        assert [answer["choices"][0]["token_ids"] for _, answer in answers] == alone
        await session.idle()


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_client_that_leaves_ends_its_request(stream):
    async with node() as session:
        body = {"prompt": [1], "max_tokens": 390, "stream": stream}
        leaving = asyncio.create_task(session.http.post("/v1/completions", json=body))
        await asyncio.sleep(0.1)
        if stream:
            (await leaving).close()
        else:
            leaving.cancel()
        assert (await session.idle())["counts"]["aborted"] == 1


@in_loop
async def test_transfer_parameters_and_connector_state_are_shown():
    connector = CopyConnector()
    connector.state = lambda: {"peers": 0}
    async with node(Connector(connector, connector)) as session:
        status, answer = await session.post(max_tokens=1, kv_transfer_params=PRODUCER)
        assert status == 200
        assert answer["kv_transfer_params"]["do_remote_prefill"] is True
        _, state = await session.get("/debug/state")
        assert state["blocks"]["held"] == 4
        assert state["connector"] == {"peers": 0}
        connector.sent.append(answer["kv_transfer_params"]["name"])
        connector.wake()
        await session.idle(0.4)
    assert connector.closed


@in_loop
async def test_a_failed_load_is_a_bad_gateway():
    connector = CopyConnector()
    connector.fail_with = "the peer left"
    async with node(Connector(connector, connector, recompute_failed_loads=False)) as session:
        for stream in (False, True):
            status, answer = await session.post(stream=stream, kv_transfer_params={"do_remote_prefill": True})
            assert (status, answer["error"]["message"]) == (502, "the peer left")


def _fail(*_):
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("where", ["model", "connector"])
@in_loop
async def test_a_broken_engine_answers_once_and_is_unhealthy(where):
    connector = CopyConnector()
    async with node(Connector(connector, connector)) as session:
        delivered, deliver = [], session.server._deliver
        session.server._deliver = lambda *output: (delivered.append(output), deliver(*output))
        if where == "model":
            session.engine.runner.execute = _fail
        else:
            # The scheduler has the request already.
            connector.new_request = _fail
        status, answer = await session.post()
        assert status == 500
        assert "the device is gone" in answer["error"]["message"]
        assert (await session.post())[0] == 503
        assert (await session.get("/health"))[0] == 503
        session.engine.stop()
        assert len([one for one in delivered if one[0] == delivered[0][0]]) == 1


@in_loop
async def test_stopping_ends_what_runs():
    async with node() as session:
        running = asyncio.create_task(session.post(prompt=[1], max_tokens=390))
        await asyncio.sleep(0.1)
        await session.server.stop(drain_timeout_s=0.0)
        with pytest.raises(LocalError, match="stopping"):
            session.engine.submit(None)
        assert not session.engine.alive
        await asyncio.gather(running, return_exceptions=True)


@in_loop
async def test_requests_in_flight_end_before_the_node_and_new_ones_are_refused():
    async with node() as session:
        running = asyncio.create_task(session.post(prompt=[1], max_tokens=200))
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(session.server.stop(20.0))
        await asyncio.sleep(0.05)
        status, answer = await session.post()
        assert (status, answer["error"]["message"]) == (503, "the node is stopping")
        assert (await session.get("/health"))[0] == 503
        status, answer = await running
        assert status == 200
        assert len(answer["choices"][0]["token_ids"]) == 200
        await stopping


@in_loop
async def test_transfer_parameters_reach_the_engine_as_they_were_sent():
    odd = {"a": 2**70, "b": "\ud800", "c": [1.5, None, True, {"d": -(2**63) - 1}]}
    sent = [odd, {}, {"\u0000": "\u2028"}]
    seen = []
    async with node() as session:
        submit = session.engine.submit
        session.engine.submit = lambda request: (seen.append(request.kv_transfer_params), submit(request))
        for params in sent:
            assert (await session.post(kv_transfer_params=params))[0] == 200
    assert seen == sent


@in_loop
async def test_what_cannot_be_told_of_an_end_is_an_error_and_the_node_goes_on():
    connector = CopyConnector()
    async with node(Connector(connector, connector)) as session:
        connector.request_finished = lambda *_, **__: (False, {"of": object()})
        status, answer = await session.post(max_tokens=2)
        assert status == 500
        assert "object" in answer["error"]["message"]
        connector.request_finished = lambda *_, **__: (False, None)
        assert (await session.post(max_tokens=2))[0] == 200


@in_loop
async def test_a_session_is_named_by_the_body_or_else_by_the_header():
    """As vLLM 0.33 has it; routers keep sessions by both."""
    offload = {"cpu_bytes": 1 << 20, "pin_quota": 0.5}
    config = {"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "memory", "offload": offload}}
    pin = {"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {}}
    release = {**pin, "action_type": "release", "payload": {"session_id": "s"}}
    async with node(kv_transfer_config=json.dumps(config)) as session:
        for named, by_header in (({"session_id": "s"}, "other"), ({"session_id": ""}, "s"), ({}, "s")):
            for action in (pin, release):
                hints = {"protocol_version": "1", "message_id": "m", "actions": [action]}
                status, answer = await session.post(
                    {"X-Session-ID": by_header}, max_tokens=1, kv_transfer_params={"kv_hints": hints}, **named
                )
                assert status == 200
                (done,) = answer["kv_transfer_params"]["kv_hint_results"]["actions"]
                assert (done["outcome"], done["num_tokens"]) == ("accepted", 48), (named, by_header, done)


# --- what clients can make the server hold is bounded; those within the bounds are served meanwhile ---

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class IdleEngine:
    """An engine that ends a request when it is told to, and an aborted one no sooner."""

    options = NodeOptions(model="m", max_model_len=100)
    alive = True

    def __init__(self):
        self.requests, self.aborted = {}, []

    def start(self):
        pass

    stop = start

    def refusal(self, num_prompt_tokens, max_tokens):
        return None

    def submit(self, request):
        self.requests[request.request_id] = request

    def abort(self, engine_id):
        self.aborted.append(engine_id)

    def end(self, *engine_ids):
        for engine_id in engine_ids or self.requests:
            self.requests[engine_id].sink(Output((7,), finish_reason="length"))

    async def has(self, count):
        while len(self.requests) < count:
            await asyncio.sleep(0.005)


def idle(**limits):
    return Served(IdleEngine(), **limits)


async def begun(session, count=1):
    """A client that waits for its answer, once the engine has so many requests."""
    client = asyncio.create_task(session.post(prompt=[1]))
    await session.engine.has(count)
    return client


async def status_of(reader):
    return int((await reader.readuntil(b"\r\n")).split()[1])


@in_loop
async def test_requests_that_the_engine_has_not_ended_are_bounded():
    async with idle(max_requests=2) as session:
        engine = session.engine
        leaving, staying = await begun(session), await begun(session, 2)
        status, answer = await session.post()
        assert (status, answer["error"]["message"]) == (503, "the node serves 2 requests already")
        leaving.cancel()
        while not engine.aborted:
            await asyncio.sleep(0.005)
        # Its client left, but the engine still has it.
        assert (await session.post())[0] == 503
        engine.end(engine.aborted[0])
        served = await begun(session, 3)
        engine.end()
        assert (await served)[0] == (await staying)[0] == 200
        with contextlib.suppress(asyncio.CancelledError):
            await leaving


@in_loop
async def test_connections_are_bounded():
    async with idle(max_connections=3) as session:
        ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        some = [await session.raw() for _ in range(3)]
        await asyncio.sleep(0.05)
        reader, _ = await session.raw(ask)
        assert await status_of(reader) == 503
        assert (await reader.read()).endswith(b"\r\n\r\n"), "it is closed"
        some[0][1].close()
        await asyncio.sleep(0.05)
        reader, _ = await session.raw(ask)
        assert await status_of(reader) == 200


@in_loop
async def test_bodies_are_bounded_by_the_longest_prompt():
    async with idle() as session:
        large, _ = await session.raw(HEAD % 300_000 + b" " * 300_000)
        assert await status_of(large) == 413, "a prompt of the model's length is far smaller"
        whole, _ = await session.raw(HEAD % 257_000 + b" " * 257_000)
        assert await status_of(whole) == 400, "all of it was read, and it is no JSON"


@in_loop
async def test_bodies_that_never_arrive_keep_nobody_out_and_hold_up_no_stop():
    async with idle(max_requests=2) as session:
        unfinished = [await session.raw(HEAD % 100 + b"{") for _ in range(3)]
        await asyncio.sleep(0.1)
        served = await begun(session)
        session.engine.end()
        assert (await served)[0] == 200
        started = time.monotonic()
        await session.server.stop(10.0)
        assert time.monotonic() - started < 5.0
        assert len(unfinished) == 3


@in_loop
async def test_a_body_that_does_not_arrive_is_given_up():
    async with idle(body_timeout_s=0.2) as session:
        reader, _ = await session.raw(HEAD % 100 + b'{"prompt"')
        assert await status_of(reader) == 408
        await reader.readuntil(b"\r\n\r\n")
        assert b"did not arrive within 0.2 s" in await reader.read(300)


@in_loop
async def test_a_second_last_output_is_dropped(caplog):
    async with idle() as session:
        post = await begun(session)
        session.engine.end()
        session.engine.end()
        assert (await post)[0] == 200
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp"])
@in_loop
async def test_a_connection_without_a_request_is_closed_and_one_that_is_served_is_not(sent):
    async with idle(idle_timeout_s=0.4) as session:
        silent, _ = await session.raw(sent)
        served = await begun(session)
        started = time.monotonic()
        assert await silent.read() == b""
        assert 0.3 < time.monotonic() - started < 2.0
        session.engine.end()
        assert (await served)[0] == 200

"""The client of servers under load, against servers that only pretend."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest
from aiohttp import web

from tests.router.router_doubles import Node
from tests.vllm.load_client import Job, run, warm_up
from tests.vllm.load_figures import Load, arrivals_s

LOAD = Load(10, 4, 50.0)
HANDED = {"remote_host": "h", "remote_port": 5, "remote_engine_id": "e", "kvconnect_handle": "signed"}
STEP_S = 0.02


class Pretending:
    """P and D in one: notes every body, answers ``refuse`` requests of each leg with an error."""

    def __init__(self):
        self.asked: list = []
        self.refuse = {"P": 0, "D": 0}
        self.missing = 0
        self.broken: bytes | None = None
        self.open = self.most_open = 0

    async def answer(self, request):
        body = await request.json()
        leg = "D" if body.get("stream") else "P"
        self.asked.append((leg, time.monotonic(), body))
        if self.refuse[leg] > 0:
            self.refuse[leg] -= 1
            return web.Response(status=500, text="no room")
        if leg == "P":
            await asyncio.sleep(STEP_S)
            return web.json_response({"kv_transfer_params": {**HANDED, "of": body["prompt"][0]}})
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(body["max_tokens"] - self.missing):
            await asyncio.sleep(STEP_S)
            chunk = json.dumps({"choices": [{"text": ""}], "usage": {"completion_tokens": number + 1}})
            await response.write(self.broken or f"data: {chunk}\n\n".encode())
        # As vLLM ends a stream: nothing new.
        await response.write(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())
        self.open -= 1
        return response

    def legs(self, leg):
        return [body for which, _, body in self.asked if which == leg]


@pytest.fixture
def server():
    """In a loop of its own: the client runs one too."""
    pretending, loop = Pretending(), asyncio.new_event_loop()
    serving = Node(pretending.answer).serving()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    node = asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(10)
    pretending.url = node.url
    yield pretending
    asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def job_of(server, **more):
    return Job(
        **{"prefill": server.url, "decode": server.url, "load": LOAD, "requests": 6, "seed": 3, **more}
    )


def test_a_request_goes_to_prefill_and_then_to_decode(server):
    starts_at = time.monotonic()
    samples = run(job_of(server))
    assert [sample.error for sample in samples] == [""] * 6
    prefills, decodes = server.legs("P"), server.legs("D")
    assert {len(body["prompt"]) for body in prefills} == {10}
    assert all(body["kv_transfer_params"]["do_remote_decode"] for body in prefills)
    assert {(body["max_tokens"], body["ignore_eos"]) for body in decodes} == {(4, True)}
    # What P handed out for a prompt is what D gets with it.
    assert all(body["kv_transfer_params"] == {**HANDED, "of": body["prompt"][0]} for body in decodes)
    assert {str(body["prompt"]) for body in prefills} == {str(body["prompt"]) for body in decodes}
    for sample in samples:
        assert sample.prefill_s >= STEP_S
        assert sample.decode_s >= STEP_S
        assert sample.first_token_s >= sample.prefill_s + sample.decode_s
        assert len(sample.gaps_s) == 3
        # Two chunks may be read at once on a busy machine: only the end is not before the last was written.
        assert sample.decode_s + sum(sample.gaps_s) >= 4 * STEP_S
    arrived = [at - starts_at for leg, at, _ in server.asked if leg == "P"]
    for at, expected in zip(arrived, arrivals_s(50.0, 6, 3), strict=True):
        assert expected <= at


def test_clients_that_wait_for_their_answers(server):
    samples = run(job_of(server, in_flight=2, load=Load(10, 4), requests=7))
    assert len(samples) == 7
    assert server.most_open == 2


def test_both_servers_are_asked_at_once(server):
    job = job_of(server, is_parallel=True)
    channel = warm_up(job, 2)
    assert (channel.host, channel.port, channel.engine_id, channel.handle) == ("h", 5, "e", "signed")
    warm = {str(body["prompt"]) for body in server.legs("P")}
    server.asked.clear()
    samples = run(job, channel)
    assert [sample.error for sample in samples] == [""] * 6
    assert not warm & {str(body["prompt"]) for body in server.legs("P")}, "they would be cached"
    announced = {body["kv_transfer_params"]["transfer_id"] for body in server.legs("P")}
    assert len(announced) == 6
    assert {body["kv_transfer_params"]["transfer_id"] for body in server.legs("D")} == announced
    assert all(body["kv_transfer_params"]["kvconnect_peer"] == "signed" for body in server.legs("D"))
    # A client that begins late, on a busy machine, is no answer that is.
    took = [sample.first_token_s - sample.late_s for sample in samples]
    legs = [sample.prefill_s + sample.decode_s for sample in samples]
    assert all(one < other for one, other in zip(took, legs, strict=True))


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("leg", ["P", "D"])
def test_a_refusal_is_one_failure(server, leg, is_parallel):
    job = job_of(server, is_parallel=is_parallel)
    channel = warm_up(job, 1)
    server.refuse[leg] = 2
    samples = run(job, channel)
    failed = [sample for sample in samples if sample.error]
    assert [sample.error for sample in failed] == [f"{leg}: HTTP 500"] * 2
    assert "no room" in failed[0].detail


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"missing": 1}, "D: too few tokens"),
        ({"broken": b'data: {"error": {"message": "load failed"}}\n\n'}, "D: error in the stream"),
        ({"broken": b"data: {\n\n"}, "client: JSONDecodeError"),
    ],
)
def test_an_answer_that_is_none_is_a_failure(server, setting, error):
    vars(server).update(setting)
    assert [sample.error for sample in run(job_of(server))] == [error] * 6


def test_what_does_not_answer_is_a_failure(server):
    assert {sample.error for sample in run(job_of(server, timeout_s=STEP_S / 2))} == {"P: timeout"}
    gone = SimpleNamespace(url="http://127.0.0.1:9")
    assert {sample.error for sample in run(job_of(gone))} == {"P: ClientConnectorError"}

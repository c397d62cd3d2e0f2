"""The two ends of the link between a front and its engine, on one socket pair and with no engine."""

import asyncio
import random
import socket
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.node.front import service as service_module
from kvconnect.node.front.link import LinkPort
from kvconnect.node.front.messages import (
    Abort,
    Ask,
    Frames,
    Listening,
    Look,
    News,
    Submit,
    ToEngine,
    ToFront,
    encode_frame,
)
from kvconnect.node.front.port import NodeInfo, Submission
from kvconnect.node.front.service import EngineService
from kvconnect.node.limits import Footprint, GroupSize, RequestLimits
from kvconnect.node.output import Failure, Output

INFO = NodeInfo("m", 0, 512, RequestLimits(100, 64, Footprint((GroupSize(16, None, False),), 128)))

messages = st.lists(
    st.one_of(
        st.builds(
            Submit,
            st.integers(0, 2**40),
            st.text(max_size=20),
            st.lists(st.integers(0, 2**31), max_size=300),
            st.integers(1, 2**31),
            st.none() | st.binary(max_size=300),
        ),
        st.builds(Abort, st.integers(0, 2**40)),
        st.builds(Ask, st.sampled_from(Look)),
        st.just(Listening()),
    ),
    max_size=12,
)


@given(messages, st.randoms(use_true_random=False))
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(sent, rng):
    stream = b"".join(encode_frame(message) for message in sent)
    frames, found = Frames(ToEngine), []
    while stream:
        size = rng.choice((1, 3, 7, 50, len(stream)))
        found += frames.feed(stream[:size])
        stream = stream[size:]
    assert found == sent


def test_what_is_too_long_or_no_message_is_an_error():
    with pytest.raises(ValueError, match="the longest is"):
        Frames(ToEngine).feed(b"\xff\xff\xff\xff")
    with pytest.raises(msgspec.MsgspecError):
        Frames(ToEngine).feed(b"\x01\x00\x00\x00\xc1")
    with pytest.raises(msgspec.MsgspecError):
        Frames(ToFront).feed(encode_frame(Abort(1)))


class Desk:
    """What a service needs of an engine; ``say`` is the engine's thread."""

    def __init__(self):
        self.engine = SimpleNamespace(after_outputs=None)
        self.sinks = {}
        self.aborted = []
        self.refusal = None
        self.alive = True
        self.looks = 0

    def name(self, submission):
        return f"{submission.request_id}-{len(self.sinks)}"

    def submit(self, request_id, submission, sink):
        self.sinks[request_id] = sink
        return self.refusal

    def abort(self, request_id):
        self.aborted.append(request_id)

    def metrics(self):
        self.looks += 1
        return str(self.looks).encode(), "text/plain"

    def say(self, outputs):
        def step():
            for request_id, output in outputs:
                self.sinks[request_id](output)
            self.engine.after_outputs()

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()


class Link:
    """A service, and what is at the other end: a port, or the bare socket."""

    def __init__(self, *, bare=False):
        self.bare = bare
        self.desk = Desk()
        self.lost = []

    async def __aenter__(self):
        ours, self.theirs = socket.socketpair()
        self.service = EngineService(
            self.desk,
            ours,
            on_listening=lambda: self.lost.append("listening"),
            on_lost=lambda: self.lost.append("engine"),
        )
        if not self.bare:
            self.port = LinkPort(INFO, on_lost=lambda: self.lost.append("front"))
            loop = asyncio.get_running_loop()
            self.transport, _ = await loop.create_unix_connection(lambda: self.port, sock=self.theirs)
        return self

    async def __aexit__(self, *_):
        self.service.close()
        if self.bare:
            self.theirs.close()
        else:
            self.transport.close()


async def until(true):
    while not true():
        await asyncio.sleep(0.002)


def run(test, **options):
    async def main():
        async with Link(**options) as link:
            await test(link)

    asyncio.run(asyncio.wait_for(main(), 20))


def submission(name="r", tokens=(1, 2), params=None):
    return Submission(name, list(tokens), 5, params)


def test_outputs_arrive_whole_and_in_order():
    async def test(link):
        heard = {name: [] for name in "abc"}
        for name in "abc":
            link.port.submit(submission(name), heard[name].append)
        await until(lambda: len(link.desk.sinks) == 3)
        last = Output((9,), (8,), "length", None, {"do_remote_prefill": True, "n": [1, 2]}, ([1, 2], [0]), 48)
        failed = Output(failure=Failure(502, "the peer left", "kv_load_error"))
        expected = {
            "a": [Output((1,)), Output((2, 3), (4, 5)), last],
            "b": [failed],
            "c": [Output((6,)), Output(finish_reason="abort")],
        }
        names = dict(zip("abc", link.desk.sinks, strict=True))
        link.desk.say([(names["a"], expected["a"][0]), (names["b"], failed)])
        link.desk.say([(names["c"], expected["c"][0]), (names["a"], expected["a"][1])])
        link.desk.say([(names["c"], expected["c"][1]), (names["a"], last)])
        await until(lambda: link.port.num_open == 0)
        assert heard == expected
        assert link.service.num_open == 0

    run(test)


def test_a_step_is_one_message():
    async def test(link):
        for number in range(16):
            link.theirs.send(encode_frame(Submit(number, "r", [1], 5, None)))
        await until(lambda: len(link.desk.sinks) == 16)
        for token in range(3):
            link.desk.say([(name, Output((token,))) for name in link.desk.sinks])
        link.desk.say([])
        found = Frames(ToFront).feed(link.theirs.recv(1 << 16))
        assert [type(one) for one in found] == [News] * 3
        for token, news in enumerate(found):
            assert news.tokens == [(number, [token], None) for number in range(16)]

    run(test, bare=True)


def test_the_engine_does_not_wait_for_a_front_that_reads_slowly():
    async def test(link):
        rng = random.Random(0)
        link.theirs.send(encode_frame(Submit(0, "r", [1], 5, None)))
        await until(lambda: link.desk.sinks)
        (name,) = link.desk.sinks
        outputs = [Output(tuple(rng.choices(range(512), k=200))) for _ in range(2000)]
        started = time.monotonic()
        for output in outputs:
            link.desk.sinks[name](output)
            link.desk.engine.after_outputs()
        assert time.monotonic() - started < 2.0
        link.theirs.setblocking(False)
        frames, found = Frames(ToFront), []
        while len(found) < len(outputs):
            try:
                found += frames.feed(link.theirs.recv(1 << 16))
            except BlockingIOError:
                await asyncio.sleep(0.001)
        assert [tuple(news.tokens[0][1]) for news in found] == [one.token_ids for one in outputs]
        assert link.lost == []

    run(test, bare=True)


def test_a_front_that_reads_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(service_module, "_MOST_UNSENT_BYTES", 1 << 20)

    async def test(link):
        link.theirs.send(encode_frame(Submit(0, "r", [1], 5, None)))
        await until(lambda: link.desk.sinks)
        (name,) = link.desk.sinks
        for _ in range(3000):
            link.desk.say([(name, Output(tuple(range(400))))])
            if link.service._closed:
                break
            await asyncio.sleep(0)
        await until(lambda: link.lost == ["engine"])
        assert link.desk.aborted == [name]

    run(test, bare=True)


def test_an_abort_reaches_the_engine_once_and_the_request_stays_open_until_it_ends():
    async def test(link):
        heard = []
        number = link.port.submit(submission(), heard.append)
        await until(lambda: link.desk.sinks)
        (name,) = link.desk.sinks
        link.port.abort(number)
        await until(lambda: link.desk.aborted == [name])
        assert link.port.num_open == 1
        link.desk.say([(name, Output((1,)))])
        link.desk.say([(name, Output(finish_reason="abort"))])
        await until(lambda: link.port.num_open == 0)
        link.port.abort(number)
        await asyncio.sleep(0.02)
        assert heard == []
        assert link.desk.aborted == [name]

    run(test)


def test_a_refusal_ends_the_request():
    async def test(link):
        heard = []
        link.desk.refusal = Output(failure=Failure(503, "the engine loop has ended", "server_error"))
        link.port.submit(submission(), heard.append)
        await until(lambda: link.port.num_open == 0)
        assert heard == [link.desk.refusal]
        assert link.service.num_open == 0

    run(test)


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_the_end_of_a_front_ends_its_requests(how):
    async def test(link):
        for _ in range(3):
            link.theirs.send(encode_frame(Submit(_, "r", [1], 5, None)))
        await until(lambda: len(link.desk.sinks) == 3)
        if how == "close":
            link.theirs.close()
        else:
            link.theirs.send(b"\x01\x00\x00\x00\xc1")
        await until(lambda: link.lost == ["engine"])
        assert link.desk.aborted == list(link.desk.sinks)
        # The engine ends them later, and nobody is there.
        link.desk.say([(name, Output(finish_reason="abort")) for name in link.desk.sinks])

    run(test, bare=True)


def test_the_end_of_the_engine_is_told_after_what_it_said():
    async def test(link):
        heard = []
        link.port.submit(submission(), lambda output: heard.append((output, list(link.lost))))
        await until(lambda: link.desk.sinks)
        (name,) = link.desk.sinks
        link.desk.say([(name, Output((1,), finish_reason="length"))])
        link.service.close()
        await until(lambda: link.lost == ["front"])
        assert heard == [(Output((1,), finish_reason="length"), [])]

    run(test)


def test_a_look_is_never_older_than_its_question():
    async def test(link):
        first = asyncio.create_task(link.port.metrics())
        await asyncio.sleep(0)
        # Asked after the first was sent: its answer would be too old for them.
        rest = [asyncio.create_task(link.port.metrics()) for _ in range(50)]
        await asyncio.sleep(0)
        rest[0].cancel()
        assert (await first)[0] == b"1"
        assert {found[0] for found in await asyncio.gather(*rest[1:])} == {b"2"}
        assert link.desk.looks == 2

    run(test)

"""The front's end of the link: an engine in another process, as HTTP sees it.

Owns the socket. What arrives before the engine's end is gone is delivered; then ``on_lost`` is called.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from kvconnect.node.front.messages import (
    Abort,
    Ask,
    Frames,
    Listening,
    Look,
    News,
    Refuse,
    Seen,
    Stop,
    ToFront,
    encode_frame,
    output_of,
    submit_of,
)
from kvconnect.node.front.port import NodeInfo, OpenRequests, Sink, Submission
from kvconnect.node.output import Output

logger = logging.getLogger(__name__)

_SPACING_S = {Look.ALIVE: 0.002, Look.METRICS: 0.05, Look.STATE: 0.02}
"""How soon after a look the next of its kind may be, so that whoever asks often costs the engine little."""


class _Question:
    """One kind of look: asked for all who want it at once, one at a time, and not too often."""

    def __init__(self, ask: Callable[[], None], spacing_s: float) -> None:
        self._ask = ask
        self._spacing_s = spacing_s
        self._asked_at = float("-inf")
        self._under_way: asyncio.Future[Seen] | None = None
        self._next: asyncio.Future[Seen] | None = None

    async def answer(self) -> Seen:
        """What the engine says to a question that is asked from now on."""
        waited_for = self._next
        if waited_for is None:
            waited_for = self._next = asyncio.get_running_loop().create_future()
            if self._under_way is None:
                self._schedule()
        # One client that leaves does not take the answer from the others.
        return await asyncio.shield(waited_for)

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._asked_at + self._spacing_s - loop.time()
        if wait_s > 0:
            loop.call_later(wait_s, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        if self._under_way is not None or self._next is None:
            return
        self._under_way, self._next = self._next, None
        self._asked_at = asyncio.get_running_loop().time()
        self._ask()

    def answered(self, seen: Seen) -> None:
        """The engine said this."""
        asked, self._under_way = self._under_way, None
        if asked is not None and not asked.done():
            asked.set_result(seen)
        if self._next is not None:
            self._schedule()


class LinkPort(asyncio.Protocol):
    """The engine at the other end of a stream. Connect it as the stream's protocol."""

    def __init__(self, info: NodeInfo, *, on_lost: Callable[[], None]) -> None:
        self.on_refuse: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self._info = info
        self._on_lost = on_lost
        self._open = OpenRequests()
        self._frames = Frames(ToFront)
        self._transport: asyncio.Transport | None = None
        self._questions = {
            look: _Question(functools.partial(self._send, Ask(look)), spacing_s)
            for look, spacing_s in _SPACING_S.items()
        }

    # --- what HTTP calls --------------------------------------------------------------------------

    def start(self) -> None:
        """See ``EnginePort``: the engine's own process starts it."""

    async def stop(self) -> None:
        """See ``EnginePort``: the engine's own process has ended it."""

    @property
    def info(self) -> NodeInfo:
        """See ``EnginePort``."""
        return self._info

    @property
    def num_open(self) -> int:
        """See ``EnginePort``."""
        return len(self._open)

    def submit(self, submission: Submission, sink: Sink) -> int:
        """See ``EnginePort``."""
        number = self._open.add(sink)
        # Not waited for: how many may be open bounds what lies here while the engine does not read.
        self._send(submit_of(number, submission))
        return number

    def abort(self, number: int) -> None:
        """See ``EnginePort``."""
        if self._open.leave(number):
            self._send(Abort(number))

    async def alive(self) -> bool:
        """See ``EnginePort``."""
        return (await self._questions[Look.ALIVE].answer()).alive

    async def metrics(self) -> tuple[bytes, str]:
        """See ``EnginePort``."""
        seen = await self._questions[Look.METRICS].answer()
        return seen.data, seen.content_type

    async def state(self) -> str:
        """See ``EnginePort``."""
        return (await self._questions[Look.STATE].answer()).data.decode()

    def listening(self) -> None:
        """Tell the engine's process that clients can come."""
        self._send(Listening())

    def _send(self, message: Any) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    # --- what the event loop calls ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        try:
            messages = self._frames.feed(data)
        except (msgspec.MsgspecError, ValueError):
            logger.exception("what the engine's process says cannot be read")
            self._on_lost()
            return
        for message in messages:
            self._take(message)

    def connection_lost(self, _error: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = None
        self._on_lost()

    def _take(self, message: Any) -> None:
        match message:
            case News():
                for number, token_ids, drafts in message.tokens:
                    output = Output(tuple(token_ids), None if drafts is None else tuple(drafts))
                    self._open.deliver(number, output)
                for end in message.ends:
                    self._open.deliver(end.number, output_of(end))
            case Seen():
                self._questions[message.look].answered(message)
            case Refuse():
                self.on_refuse()
            case Stop():
                self.on_stop()

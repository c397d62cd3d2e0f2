"""Keeps a front running beside an engine: binds the address, starts the process, starts it again.

A front that dies takes its clients' connections with it and nothing else: the engine keeps what it holds for
peers, and the address stays bound. One that dies again and again is not worth keeping: then the node ends,
and whoever supervises it sees that.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import time

from kvconnect.errors import LocalError
from kvconnect.node.desk import EngineDesk
from kvconnect.node.front.child import FrontProcess
from kvconnect.node.front.limits import DRAIN_TIMEOUT_S
from kvconnect.node.front.messages import Hello, Refuse, Stop
from kvconnect.node.front.service import EngineService

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 5.0
# Its sockets close a moment before a process has ended.
_DEATH_S = 0.5
_MOST_RESTARTS = 3
_RESTARTS_WITHIN_S = 60.0


class FrontSupervisor:
    """One front after the other. Made on the main thread: a process starts at once, and waits for ``start``.

    ``gone`` is set when the last one has died, and there will be no other.
    """

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self._process = FrontProcess()
        self._desk: EngineDesk | None = None
        self._service: EngineService | None = None
        self._bound: asyncio.Server | None = None
        self._listening: asyncio.Future[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._deaths: collections.deque[float] = collections.deque(maxlen=_MOST_RESTARTS)
        self._is_refusing = False
        self._is_stopping = False

    async def start(self, desk: EngineDesk, host: str, port: int) -> int:
        """Start the engine, and listen. Returns the port, which the system chose if ``port`` is 0.

        Raises:
            OSError: the address cannot be bound.
            LocalError: the front ended, or did not listen in time.
        """
        self._desk = desk
        loop = asyncio.get_running_loop()
        # Bound here, so that the address is ours whatever becomes of a front; only fronts listen on it.
        self._bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        desk.engine.start()
        await self._open()
        return int(self._bound.sockets[0].getsockname()[1])

    def refuse(self) -> None:
        """Take no new request from now on; those in flight go on."""
        self._is_refusing = True
        if self._service is not None:
            self._service.send(Refuse())

    async def stop(self, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Refuse new requests, give those in flight some time, then end everything. Idempotent."""
        if self._is_stopping:
            return
        self.refuse()
        await self._wait_for_answers(drain_timeout_s)
        self._is_stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
        loop = asyncio.get_running_loop()
        if self._desk is not None:
            await loop.run_in_executor(None, self._desk.engine.stop)
        if self._service is not None and self._service.link is self._process.link:
            # It comes after the last answers.
            self._service.send(Stop())
        else:
            # It was not greeted, and has nobody to answer.
            self._process.link.close()
        await loop.run_in_executor(None, self._process.end, _END_TIMEOUT_S)
        if self._service is not None:
            self._service.close()
        if self._bound is not None:
            self._bound.close()

    async def _wait_for_answers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._num_open() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if number := self._num_open():
            logger.warning("%d requests were still in flight and are ended", number)

    def _num_open(self) -> int:
        return self._service.num_open if self._service is not None else 0

    async def _open(self) -> None:
        """Have the process that waits serve."""
        assert self._desk is not None
        assert self._bound is not None
        process, sockets = self._process, self._bound.sockets
        listening = self._listening = asyncio.get_running_loop().create_future()
        try:
            process.greet(Hello(self._desk.info, len(sockets)), [one.fileno() for one in sockets])
        except OSError as error:
            process.link.close()
            raise LocalError(f"the node's HTTP front ended before it was greeted: {error}") from error
        self._service = EngineService(
            self._desk,
            process.link,
            on_listening=functools.partial(_settle, listening),
            on_lost=self._lost,
        )
        if self._is_refusing:
            self._service.send(Refuse())
        try:
            await asyncio.wait_for(listening, _START_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._service.close()
            text = f"the node's HTTP front did not listen within {_START_TIMEOUT_S:g} s"
            raise LocalError(text) from None

    def _lost(self) -> None:
        listening = self._listening
        if listening is not None and not listening.done():
            listening.set_exception(LocalError("the node's HTTP front ended before it listened"))
        elif not self._is_stopping:
            self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        assert self._desk is not None
        loop = asyncio.get_running_loop()
        while True:
            code = await loop.run_in_executor(None, self._process.end, _DEATH_S)
            now = time.monotonic()
            if len(self._deaths) == _MOST_RESTARTS and now - self._deaths[0] < _RESTARTS_WITHIN_S:
                logger.error("the node's HTTP front ended with code %d, once too often: the node ends", code)
                self.gone.set()
                return
            self._deaths.append(now)
            self._desk.front_restarts += 1
            logger.error("the node's HTTP front ended with code %d and is started again", code)
            try:
                self._process = FrontProcess()
                await self._open()
                return
            except (OSError, LocalError) as error:
                logger.error("the node's HTTP front did not start: %s", error)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

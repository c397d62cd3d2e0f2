"""An engine in the process that also reads HTTP: what its thread says is brought to the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from kvconnect.node.desk import EngineDesk
from kvconnect.node.front.port import NodeInfo, OpenRequests, Sink, Submission
from kvconnect.node.output import Output


class LocalPort:
    """``desk``'s engine for HTTP on the event loop that runs when the port is made."""

    def __init__(self, desk: EngineDesk) -> None:
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        self._open = OpenRequests()
        self._request_ids: dict[int, str] = {}

    def start(self) -> None:
        """See ``EnginePort``."""
        self._desk.engine.start()

    async def stop(self) -> None:
        """See ``EnginePort``."""
        await self._loop.run_in_executor(None, self._desk.engine.stop)

    @property
    def info(self) -> NodeInfo:
        """See ``EnginePort``."""
        return self._desk.info

    @property
    def num_open(self) -> int:
        """See ``EnginePort``."""
        return len(self._open)

    def submit(self, submission: Submission, sink: Sink) -> int:
        """See ``EnginePort``."""
        number = self._open.add(sink)

        def bring(output: Output) -> None:
            # A loop that was closed has no client left to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver, number, output)

        request_id = self._request_ids[number] = self._desk.name(submission)
        refusal = self._desk.submit(request_id, submission, bring)
        if refusal is not None:
            bring(refusal)
        return number

    def abort(self, number: int) -> None:
        """See ``EnginePort``."""
        if self._open.leave(number):
            self._desk.abort(self._request_ids[number])

    async def alive(self) -> bool:
        """See ``EnginePort``."""
        return self._desk.alive

    async def metrics(self) -> tuple[bytes, str]:
        """See ``EnginePort``."""
        return self._desk.metrics()

    async def state(self) -> str:
        """See ``EnginePort``."""
        return self._desk.state()

    def _deliver(self, number: int, output: Output) -> None:
        if output.is_last:
            self._request_ids.pop(number, None)
        self._open.deliver(number, output)

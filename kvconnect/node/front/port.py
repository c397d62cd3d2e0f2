"""What HTTP asks of an engine, wherever that runs: requests, their end, and a few looks inside.

All calls come from one event loop's thread, and sinks are called on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvconnect.node.limits import RequestLimits
from kvconnect.node.output import Output

Sink = Callable[[Output], None]


@dataclass(frozen=True)
class NodeInfo:
    """What never changes of a node, and what requests are checked against."""

    model: str
    seed: int
    vocab_size: int
    limits: RequestLimits


@dataclass(frozen=True)
class Submission:
    """A checked request. ``request_id`` is the client's, and need not be unique."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None


class EnginePort(Protocol):
    """An engine as HTTP sees it."""

    def start(self) -> None:
        """Before anything else: start the engine, if it runs in this process."""
        ...

    async def stop(self) -> None:
        """At the end: end the engine, if it runs in this process, and with it what is open."""
        ...

    @property
    def info(self) -> NodeInfo:
        """What never changes of it."""
        ...

    @property
    def num_open(self) -> int:
        """Requests that it was given and has not ended; those that were aborted are among them."""
        ...

    def submit(self, submission: Submission, sink: Sink) -> int:
        """Give it a request. ``sink`` hears all of it, a refusal too. Returns the request's number here."""
        ...

    def abort(self, number: int) -> None:
        """End a request whose client left. Its sink is called no more. One that has ended is left alone."""
        ...

    async def alive(self) -> bool:
        """Whether it computes."""
        ...

    async def metrics(self) -> tuple[bytes, str]:
        """Metrics of its process in Prometheus' text format, and their content type."""
        ...

    async def state(self) -> str:
        """What it holds, as JSON."""
        ...


class OpenRequests:
    """The sinks of requests that an engine was given and has not ended, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._sinks: dict[int, Sink | None] = {}

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, sink: Sink) -> int:
        """One more. Returns its number."""
        number = next(self._numbers)
        self._sinks[number] = sink
        return number

    def leave(self, number: int) -> bool:
        """Its client left: it stays open, and nobody listens. False: it has ended."""
        if number not in self._sinks:
            return False
        self._sinks[number] = None
        return True

    def deliver(self, number: int, output: Output) -> None:
        """Pass an output on; after the last one the request is no longer open."""
        sink = self._sinks.get(number)
        if output.is_last:
            self._sinks.pop(number, None)
        if sink is not None:
            sink(output)

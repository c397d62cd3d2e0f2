"""The seam between kvconnect and the libraries that move bytes: no handle or exception of theirs crosses it.

The rule that everything above relies on: a batch that was submitted comes back from ``poll``
exactly once, and the completion states whether the memory it named is quiescent (``quiescent``): no
byte of it will still be read or written on behalf of this batch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvconnect.errors import EngineError


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of memory to register. ``device`` is ``"cpu"`` or ``"cuda:N"``."""

    address: int
    length_bytes: int
    device: str = "cpu"

    @property
    def gpu(self) -> int:
        """The number of its GPU, -1 for the CPU. Raises ``EngineError``."""
        kind, _, number = self.device.partition(":")
        if self.device != "cpu" and not (kind == "cuda" and number.isdecimal()):
            raise EngineError(
                f"cannot register memory of device {self.device!r}: 'cpu' and 'cuda:N' are known"
            )
        return int(number or -1)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, and the bounds that a caller keeps.

    ``max_bytes`` are of one batch, ``max_batches_per_peer`` are in flight at one time.
    ``target_must_poll``: a transfer advances only while its target polls often, as with UCX that has no
    progress thread. ``lane`` is what carries the bytes, in the engine's own words, for people.
    ``may_be_bypassed``: peers of this machine may be written to through shared memory instead, since no
    protocol was named.
    """

    name: str
    max_bytes: int
    max_batches_per_peer: int
    target_must_poll: bool
    lane: str = ""
    may_be_bypassed: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.lane})" if self.lane else self.name


@dataclass(frozen=True, slots=True)
class Batch:
    """``total_bytes`` at our address ``source`` to be written to the peer's address ``target``.

    ``batch_id`` is chosen by the caller and never used twice. ``timeout_s`` counts from ``submit``.
    """

    batch_id: int
    peer: str
    source: int
    target: int
    total_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """The one answer to a batch.

    ``ok`` implies ``quiescent``. A failure that is not: the library could not prove that it stopped, and the
    caller keeps the named memory out of use.
    ``seconds`` runs from the post to the moment the engine saw the end.
    """

    batch_id: int
    ok: bool
    quiescent: bool
    total_bytes: int
    seconds: float
    error: str = ""


class Engine(Protocol):
    """The verbs of a transfer engine. One owner thread calls all of them; none blocks for long."""

    capabilities: Capabilities

    def register(self, spans: Sequence[Span]) -> None:
        """Make memory reachable for transfers, all or nothing, in one batch call to the library.

        Raises ``EngineError``: a span is empty, overlaps a registered one, or the library refuses it.
        """
        ...

    def unregister(self, spans: Sequence[Span]) -> None:
        """Take back spans exactly as they were registered, or raise ``EngineError`` and take back none."""
        ...

    def card(self) -> bytes:
        """What a peer needs to reach this engine's registered memory. Opaque, small, current."""
        ...

    def connect(self, peer: str, card: bytes) -> None:
        """Introduce a peer under a name, in place of one of that name. Does not wait for the network.

        Raises ``EngineError``: the card is not one of this engine's kind.
        """
        ...

    def submit(self, batch: Batch) -> None:
        """Start a batch. Never waits for the transfer; every failure comes back through ``poll``.

        Raises ``LocalError``: the batch breaks ``capabilities`` or the peer is unknown: a caller's bug.
        """
        ...

    def poll(self) -> list[Completion]:
        """Advance what is in flight, and what peers have in flight to us; return what ended."""
        ...

    def cancel(self, batch_id: int) -> None:
        """Ask for an early end of a batch. It is still answered once, through ``poll``."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Batches in flight to it end as failures, through ``poll``."""
        ...

    def close(self) -> None:
        """Stop everything and release the memory. Idempotent; bounded in time."""
        ...


class SpanSet:
    """The registered spans of an engine, and the checks that no library makes in time.

    Mooncake over TCP, for one, sends from memory that was never registered.
    """

    def __init__(self) -> None:
        self._rebuild(())

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans.values())

    def add(self, spans: Sequence[Span]) -> None:
        """Add all, or none and raise ``EngineError``: a span is empty or overlaps another one."""
        for span in spans:
            if span.length_bytes <= 0 or span.address <= 0:
                raise EngineError(
                    f"cannot register {span.length_bytes} bytes at {span.address:#x}: "
                    "a span needs a positive address and length"
                )
        ordered = sorted([*self, *spans], key=lambda span: span.address)
        for before, after in itertools.pairwise(ordered):
            if before.address + before.length_bytes > after.address:
                raise EngineError(
                    f"cannot register {after.length_bytes} bytes at {after.address:#x}: they overlap "
                    f"{before.length_bytes} bytes at {before.address:#x}; register each storage once"
                )
        self._rebuild(ordered)

    def remove(self, spans: Sequence[Span]) -> None:
        """Remove all, or none and raise ``EngineError``: a span is not in the set exactly as given."""
        for span in spans:
            if self._spans.get(span.address) != span:
                raise EngineError(
                    f"cannot unregister {span.length_bytes} bytes at {span.address:#x}: "
                    "no such span is registered"
                )
        gone = {span.address for span in spans}
        self._rebuild([span for span in self if span.address not in gone])

    def find(self, address: int, length_bytes: int) -> Span | None:
        """The span that so many bytes lie in, or None."""
        at = bisect_right(self._starts, address) - 1
        span = self._spans[self._starts[at]] if at >= 0 else None
        is_inside = span is not None and 0 <= length_bytes <= span.address + span.length_bytes - address
        return span if is_inside else None

    def _rebuild(self, ordered: Sequence[Span]) -> None:
        self._spans = {span.address: span for span in ordered}
        self._starts = list(self._spans)

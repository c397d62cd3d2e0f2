"""The interface between kvconnect and transfer libraries: no handle or exception of a library crosses it.

All callers rely on one rule: ``poll`` returns exactly one completion for each submitted batch, and the
completion states whether the batch's memory is quiescent, that is, the library will not read or write any
byte of it any more on behalf of this batch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvconnect.engine.lanes import UNKNOWN, Transport
from kvconnect.errors import EngineError


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of memory to register. ``device`` is ``"cpu"`` or ``"cuda:N"``."""

    address: int
    length_bytes: int
    device: str = "cpu"

    @property
    def gpu(self) -> int:
        """The number of the GPU, -1 for the CPU. Raises ``EngineError``: the device is unknown."""
        kind, _, number = self.device.partition(":")
        if self.device != "cpu" and not (kind == "cuda" and number.isdecimal()):
            raise EngineError(
                f"cannot register memory of device {self.device!r}: 'cpu' and 'cuda:N' are known"
            )
        return int(number or -1)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine, and the bounds that a caller must keep.

    ``max_bytes`` bounds one batch, ``max_batches_per_peer`` the batches in flight to a peer at a time.
    ``target_must_poll``: a transfer advances only while its target polls often, as with UCX without a
    progress thread. ``lane`` is the engine's own name for its transport, for people; ``carries`` is the lane
    that all of its bytes take, if the engine knows.
    ``may_be_bypassed``: the configuration names no protocol, so peers on this machine may be written to
    through shared memory instead.
    """

    name: str
    max_bytes: int
    max_batches_per_peer: int
    target_must_poll: bool
    lane: str = ""
    carries: Transport = UNKNOWN
    may_be_bypassed: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.lane})" if self.lane else self.name


@dataclass(frozen=True, slots=True)
class Batch:
    """A copy of ``total_bytes`` from the local address ``source`` to the peer's address ``target``.

    The caller chooses ``batch_id``, and never uses it twice. ``timeout_s`` counts from ``submit``.
    """

    batch_id: int
    peer: str
    source: int
    target: int
    total_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a batch.

    ``ok`` implies ``quiescent``. After a failure that is not quiescent, the library may still access the
    batch's memory, and the caller must keep this memory in quarantine.
    ``seconds`` is the time from ``submit`` to the moment at which the engine noticed the end.
    """

    batch_id: int
    ok: bool
    quiescent: bool
    total_bytes: int
    seconds: float
    error: str = ""


class Engine(Protocol):
    """A transfer engine. One owner thread calls all methods; none of them blocks for long."""

    capabilities: Capabilities

    def register(self, spans: Sequence[Span]) -> None:
        """Make memory reachable for transfers, all or nothing, in one batch call to the library.

        Raises ``EngineError``: a span is empty, overlaps a registered one, or the library refuses it.
        """
        ...

    def unregister(self, spans: Sequence[Span]) -> None:
        """Unregister spans exactly as registered, all or nothing. Raises ``EngineError``: one is unknown."""
        ...

    def card(self) -> bytes:
        """The bytes by which a peer's engine reaches the memory that is registered now.

        ``adapter.card_host`` reads the address in it, if it makes the peer connect to one.
        """
        ...

    def connect(self, peer: str, card: bytes) -> None:
        """Add a peer under a name, or replace the peer of that name. Does not wait for the network.

        Raises ``EngineError``: the card is not of this kind of engine.
        """
        ...

    def submit(self, batch: Batch) -> None:
        """Start a batch. Never waits for the transfer; every failure comes back through ``poll``.

        Raises ``LocalError``: the batch breaks ``capabilities`` or the peer is unknown: a caller's bug.
        """
        ...

    def poll(self) -> list[Completion]:
        """Advance batches in flight, also those of peers to this node; return the completions."""
        ...

    def cancel(self, batch_id: int) -> None:
        """End a batch early if possible. ``poll`` still returns its one completion."""
        ...

    def disconnect(self, peer: str) -> None:
        """Remove a peer. ``poll`` returns batches in flight to it as failures."""
        ...

    def close(self) -> None:
        """End all batches and release the memory. Idempotent; bounded in time."""
        ...


class SpanSet:
    """The registered spans of an engine, for checks that libraries make too late or not at all.

    Mooncake over TCP, for example, sends from memory that was never registered.
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
        """The span that contains all ``length_bytes`` at ``address``, or None."""
        at = bisect_right(self._starts, address) - 1
        span = self._spans[self._starts[at]] if at >= 0 else None
        is_inside = span is not None and 0 <= length_bytes <= span.address + span.length_bytes - address
        return span if is_inside else None

    def _rebuild(self, ordered: Sequence[Span]) -> None:
        self._spans = {span.address: span for span in ordered}
        self._starts = list(self._spans)

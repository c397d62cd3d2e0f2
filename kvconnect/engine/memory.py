"""The memory engine: a test double in the package that moves real bytes within one process.

``poll`` copies CPU memory, without threads and by the caller's clock, so that a simulator can drive the
engine deterministically. Every copy is checked against the target's registered spans, as by an RDMA card.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvconnect.engine.adapter import Adapter, Flight, decode_card, range_problem
from kvconnect.engine.base import Batch, Capabilities, Completion, Span
from kvconnect.engine.lanes import Transport
from kvconnect.errors import ConfigError, EngineError


class MemoryCard(msgspec.Struct, tag="kvconnect-memory-2", frozen=True):
    """The random token of an engine in this process."""

    token: bytes


# Every open engine of this process by its token.
_engines: dict[bytes, MemoryEngine] = {}
_engines_lock = threading.Lock()


class MemoryEngine(Adapter):
    """An engine over ordinary memory. Raises ``ConfigError``: a protocol is named, and it has none."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        protocol: str = "auto",
        *,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = 64 << 20,
        max_batches_per_peer: int = 8,
    ) -> None:
        if protocol != "auto":
            raise ConfigError(f"protocol is {protocol!r}: the memory engine has none, leave it at 'auto'")
        capabilities = Capabilities(
            name="memory",
            max_bytes=max_bytes,
            max_batches_per_peer=max_batches_per_peer,
            target_must_poll=False,
            lane="memory of this process",
            carries=Transport("shared_memory"),
        )
        super().__init__(capabilities, clock)
        # Guards the spans: engines of other threads write to this one's memory.
        self._lock = threading.Lock()
        self._token = secrets.token_bytes(16)
        with _engines_lock:
            _engines[self._token] = self

    def register(self, spans: Sequence[Span]) -> None:
        self._check_open()
        for span in spans:
            if span.device != "cpu":
                raise EngineError(f"the memory engine moves CPU memory, not {span.device}")
        with self._lock:
            self._spans.add(spans)

    def unregister(self, spans: Sequence[Span]) -> None:
        with self._lock:
            self._spans.remove(spans)

    def card(self) -> bytes:
        self._check_open()
        return msgspec.msgpack.encode(MemoryCard(self._token))

    def connect(self, peer: str, card: bytes) -> None:
        self._check_open()
        token = decode_card(card, MemoryCard, "memory").token
        if self._peers.get(peer) != token:
            self.disconnect(peer)
        self._peers[peer] = token

    def submit(self, batch: Batch) -> None:
        self._admit(batch)
        self._flights[batch.batch_id] = Flight(batch=batch, submitted_at=self._clock())

    def poll(self) -> list[Completion]:
        for flight in list(self._flights.values()):
            self._advance(flight)
        return self._take_finished() if self._finished else []

    def _shut_down(self) -> None:
        with _engines_lock:
            _engines.pop(self._token, None)

    def _advance(self, flight: Flight) -> None:
        batch = flight.batch
        if self._clock() >= flight.deadline:
            self._answer(flight, flight.overdue)
        elif batch.total_bytes:
            self._answer(flight, self._copy_here(batch, self._local_target(batch.peer)))
        else:
            self._answer(flight, "")

    def _local_target(self, peer: str) -> MemoryEngine | None:
        return _engine_of(self._peers.get(peer, b""))

    def _copy_here(self, batch: Batch, target: MemoryEngine | None) -> str:
        """Copy into another engine's memory; returns the error, empty on success."""
        if target is None:
            return f"peer {batch.peer!r} is gone"
        with target._lock:
            error = range_problem(batch, self._spans, target._spans)
            if not error:
                ctypes.memmove(batch.target, batch.source, batch.total_bytes)
        return error

    def _end_early(self, flight: Flight, error: str) -> None:
        self._answer(flight, error)


def _engine_of(token: bytes) -> MemoryEngine | None:
    with _engines_lock:
        return _engines.get(token)

"""The memory engine: a double that ships with the package and moves real bytes within one process.

Bytes of CPU memory are copied inside ``poll``, without threads and on a clock of the caller's choice, so a
simulator can drive it deterministically. The target's registration is checked for every range, as an RDMA
card would. The controls (``hold``, ``fail_next``, ...) produce each way in which a library can disappoint.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from kvconnect.engine.adapter import Adapter, Flight, decode_card, range_problem
from kvconnect.engine.base import Addresses, Batch, Capabilities, Completion, Span
from kvconnect.errors import ConfigError, EngineError


class MemoryCard(msgspec.Struct, tag="kvconnect-memory-2", frozen=True):
    """The random token of an engine of this process."""

    token: bytes


@dataclass(slots=True)
class _Faults:
    """What the controls ask of the next batch."""

    error: str = ""
    fail: bool = False
    quiet: bool = True
    delay_s: float = 0.0
    cut_bytes: int | None = None
    flip_byte: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _Flight(Flight):
    start_at: float
    faults: _Faults


# Every open engine of this process by its token.
_engines: dict[bytes, MemoryEngine] = {}
_engines_lock = threading.Lock()


class MemoryEngine(Adapter):
    """An engine over ordinary memory. See ``kvconnect.engine.base.Engine`` for the verbs.

    Args:
        host, protocol: as every engine takes them; there is nothing to reach.
        clock: seconds, for delays, timeouts and durations.
        max_copies, max_bytes, max_batches_per_peer: the bounds to announce.

    Raises:
        ConfigError: a protocol is named, and there is none.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        protocol: str = "auto",
        *,
        clock: Callable[[], float] = time.monotonic,
        max_copies: int = 16_384,
        max_bytes: int = 64 << 20,
        max_batches_per_peer: int = 8,
    ) -> None:
        if protocol != "auto":
            raise ConfigError(f"protocol is {protocol!r}: the memory engine has none, leave it at 'auto'")
        capabilities = Capabilities(
            name="memory",
            max_copies=max_copies,
            max_bytes=max_bytes,
            max_batches_per_peer=max_batches_per_peer,
            target_must_poll=False,
            can_renew=True,
        )
        super().__init__(capabilities, clock)
        # Guards the spans: engines of other threads write to this one's memory.
        self._lock = threading.Lock()
        self._token = secrets.token_bytes(16)
        self._held = False
        self._next = _Faults()
        self._late: list[tuple[Batch, bytes]] = []
        with _engines_lock:
            _engines[self._token] = self

    # ---- the verbs of every engine

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

    def renew_registration(self) -> bool:
        """Take another token: a peer that knows only the one before writes no more."""
        self._check_open()
        token = secrets.token_bytes(16)
        with _engines_lock:
            del _engines[self._token]
            _engines[token] = self
        self._token = token
        return True

    def card(self) -> bytes:
        self._check_open()
        return msgspec.msgpack.encode(MemoryCard(self._token))

    def connect(self, peer: str, card: bytes) -> None:
        self._check_open()
        token = decode_card(peer, card, MemoryCard, "memory").token
        if self._peers.get(peer) != token:
            self.disconnect(peer)
        self._peers[peer] = token

    def submit(self, batch: Batch) -> None:
        self._admit(batch)
        faults, self._next = self._next, _Faults()
        now = self._clock()
        self._flights[batch.batch_id] = _Flight(
            batch=batch, submitted_at=now, start_at=now + faults.delay_s, faults=faults
        )

    def poll(self) -> list[Completion]:
        for flight in list(self._flights.values()):
            self._advance(flight)
        return self._take_finished()

    def _shut_down(self) -> None:
        with _engines_lock:
            _engines.pop(self._token, None)

    # ---- the controls of a test

    def hold(self) -> None:
        """From now on nothing moves and nothing completes (but for timeouts), until ``release``."""
        self._held = True

    def release(self) -> None:
        """End ``hold``: what waited goes on at the next ``poll``."""
        self._held = False

    def fail_next(self, quiet: bool, error: str = "failed on request") -> None:
        """Fail the next submitted batch and move none of its bytes, before ``land_late`` where not quiet."""
        self._next.fail, self._next.quiet, self._next.error = True, quiet, error

    def delay_next(self, seconds: float) -> None:
        """Let the next submitted batch begin ``seconds`` after its submit, by the clock."""
        self._next.delay_s = seconds

    def cut_next(self, after_bytes: int, quiet: bool = True, error: str = "cut on request") -> None:
        """Move only the first ``after_bytes`` of the next submitted batch, then fail it."""
        self._next.cut_bytes, self._next.quiet, self._next.error = after_bytes, quiet, error

    def corrupt_next(self, byte_offset: int) -> None:
        """Flip the byte at an offset (modulo its size) of the next submitted batch, which ends well."""
        self._next.flip_byte = byte_offset

    def land_late(self) -> int:
        """Move the bytes of every batch that failed without being quiet; returns how many batches."""
        late, self._late = self._late, []
        for batch, token in late:
            self._copy_here(batch, _engine_of(token))
        return len(late)

    # ---- how a batch ends

    def _advance(self, flight: _Flight) -> None:
        batch, faults, now = flight.batch, flight.faults, self._clock()
        if now >= flight.deadline:
            self._answer(flight, flight.overdue)
        elif self._held or now < flight.start_at:
            return
        elif faults.fail:
            self._answer(flight, faults.error, faults.quiet)
        elif not batch.total_bytes:
            self._answer(flight, "")
        else:
            self._start(flight, _head(batch, faults.cut_bytes))

    def _start(self, flight: _Flight, batch: Batch) -> None:
        faults = flight.faults
        error = self._copy_here(batch, self._local_target(batch.peer))
        if not error and faults.flip_byte is not None and batch.total_bytes:
            _flip(batch, faults.flip_byte % batch.total_bytes)
        if not error and faults.cut_bytes is not None:
            self._answer(flight, faults.error, faults.quiet)
        else:
            self._answer(flight, error)

    def _local_target(self, peer: str) -> MemoryEngine | None:
        return _engine_of(self._peers.get(peer, b""))

    def _copy_here(self, batch: Batch, target: MemoryEngine | None) -> str:
        """Copy into another engine's memory; returns the error, empty if it was done."""
        if target is None:
            return f"peer {batch.peer!r} is gone"
        with target._lock:
            error = range_problem(batch, self._spans, target._spans)
            if not error:
                _move(batch.source, batch.target, batch.length)
        return error

    def _end_early(self, flight: _Flight, error: str) -> None:
        self._answer(flight, error)

    def _answer(self, flight: Flight, error: str, quiet: bool = True) -> None:
        batch = flight.batch
        if not quiet:
            # To who it was submitted, whatever that name stands for by then.
            self._late.append((batch, self._peers.get(batch.peer, b"")))
            del self._late[:-64]
        super()._answer(flight, error, quiet)


def _engine_of(token: bytes) -> MemoryEngine | None:
    with _engines_lock:
        return _engines.get(token)


def _move(source: Addresses, target: Addresses, length: Addresses) -> None:
    """Copy address ranges; neighbours on both sides become one copy."""
    keep = length > 0
    if not keep.all():
        source, target, length = source[keep], target[keep], length[keep]
    if len(length) == 0:
        return
    joined = (source[1:] == source[:-1] + length[:-1]) & (target[1:] == target[:-1] + length[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    sizes = np.add.reduceat(length, heads)
    for to, from_, size in zip(target[heads].tolist(), source[heads].tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(to, from_, size)


def _head(batch: Batch, cut_bytes: int | None) -> Batch:
    """The batch without what comes after its first ``cut_bytes``."""
    if cut_bytes is None:
        return batch
    before = np.cumsum(batch.length) - batch.length
    return replace(batch, length=np.clip(cut_bytes - before, 0, batch.length))


def _flip(batch: Batch, offset: int) -> None:
    """Flip the byte that landed at ``offset`` of the batch."""
    ends = np.cumsum(batch.length)
    copy = int(np.searchsorted(ends, offset, side="right"))
    address = int(batch.target[copy] + offset - (ends[copy] - batch.length[copy]))
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 0xFF

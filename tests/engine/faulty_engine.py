"""The memory engine with controls that produce each way in which a library can disappoint."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

from kvconnect.engine.adapter import Flight
from kvconnect.engine.base import Batch
from kvconnect.engine.memory import MemoryEngine, _engine_of


@dataclass(slots=True)
class _Faults:
    """What the controls ask of the next batch."""

    error: str = ""
    fail: bool = False
    quiescent: bool = True
    delay_s: float = 0.0
    cut_bytes: int | None = None
    flip_byte: int | None = None


class FaultyEngine(MemoryEngine):
    """A ``MemoryEngine`` whose batches wait, fail, are cut or corrupted as a test asks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held = False
        self._next = _Faults()
        self._batch_faults: dict[int, _Faults] = {}
        self._late: list[tuple[Batch, bytes]] = []

    # ---- the controls of a test

    def hold(self) -> None:
        """From now on nothing moves and nothing completes (but for timeouts), until ``release``."""
        self._held = True

    def release(self) -> None:
        """End ``hold``: what waited goes on at the next ``poll``."""
        self._held = False

    def fail_next(self, quiescent: bool, error: str = "failed on request") -> None:
        """Fail the next submitted batch. Its bytes move by ``land_late`` alone, if not quiescent."""
        self._next.fail, self._next.quiescent, self._next.error = True, quiescent, error

    def delay_next(self, seconds: float) -> None:
        """Let the next submitted batch begin ``seconds`` after its submit, by the clock."""
        self._next.delay_s = seconds

    def cut_next(self, after_bytes: int, quiescent: bool = True, error: str = "cut on request") -> None:
        """Move only the first ``after_bytes`` of the next submitted batch, then fail it."""
        self._next.cut_bytes, self._next.quiescent, self._next.error = after_bytes, quiescent, error

    def corrupt_next(self, byte_offset: int) -> None:
        """Flip the byte at an offset (modulo its size) of the next submitted batch, which ends well."""
        self._next.flip_byte = byte_offset

    def land_late(self) -> int:
        """Move the bytes of every batch that failed without being quiescent; returns how many batches."""
        late, self._late = self._late, []
        for batch, token in late:
            self._copy_here(batch, _engine_of(token))
        return len(late)

    # ---- how a batch goes

    def submit(self, batch: Batch) -> None:
        super().submit(batch)
        self._batch_faults[batch.batch_id], self._next = self._next, _Faults()

    def start_at(self, flight: Flight) -> float:
        """When a batch may begin."""
        return flight.submitted_at + self._batch_faults[flight.batch.batch_id].delay_s

    def _advance(self, flight: Flight) -> None:
        batch, faults, now = flight.batch, self._batch_faults[flight.batch.batch_id], self._clock()
        if now >= flight.deadline:
            self._answer(flight, flight.overdue)
        elif self._held or now < self.start_at(flight):
            return
        elif faults.fail:
            self._answer(flight, faults.error, faults.quiescent)
        elif not batch.total_bytes:
            self._answer(flight, "")
        else:
            most = batch.total_bytes if faults.cut_bytes is None else faults.cut_bytes
            self._run(flight, replace(batch, total_bytes=min(batch.total_bytes, most)))

    def _run(self, flight: Flight, batch: Batch) -> None:
        faults = self._batch_faults[batch.batch_id]
        error = self._copy_here(batch, self._local_target(batch.peer))
        if not error and faults.flip_byte is not None and batch.total_bytes:
            ctypes.c_uint8.from_address(batch.target + faults.flip_byte % batch.total_bytes).value ^= 0xFF
        if not error and faults.cut_bytes is not None:
            self._answer(flight, faults.error, faults.quiescent)
        else:
            self._answer(flight, error)

    def _answer(self, flight: Flight, error: str, quiescent: bool = True) -> None:
        batch = flight.batch
        self._batch_faults.pop(batch.batch_id, None)
        if not quiescent:
            # To who it was submitted, whatever that name stands for by then.
            self._late.append((batch, self._peers.get(batch.peer, b"")))
            del self._late[:-64]
        super()._answer(flight, error, quiescent)

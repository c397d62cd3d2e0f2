"""How copies travel between a device and its host, tried at the start: by copy engines, or by a kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.launching import Loading, Mover, NumberPool
from kvconnect.offload.copies.queues import Queue
from kvconnect.offload.copies.row_parts import RowParts
from kvconnect.offload.copies.rows import Column
from kvconnect.offload.copies.staging import Staging
from kvconnect.offload.copies.tiles import Parts, Piece

logger = logging.getLogger(__name__)

_TRIED_BYTES = 32 << 20
_TRIED_ROWS = 1024
_TRIES = 3
# The fewest programs that keep the link to the host busy are taken: they occupy multiprocessors of the model.
_TRIED_PROGRAMS = (8, 16, 32)
_AS_GOOD = 0.95
# How much of the copy engines' rate a kernel must have to be taken. On the way out it must be worth the
# multiprocessors. On the way back copy engines have a cost too: a step's inputs wait behind what they have to
# do, and while one thread waits for a step's tokens no other can give them more.
_WORTH_A_KERNEL = (1.15, 0.85)


@dataclass(frozen=True)
class Way:
    """How blocks leave the device, or come back: ``dma`` with 0 programs, or ``kernel``."""

    mode: str
    programs: int
    bytes_per_s: float


class Trial:
    """Copies between rows that hold nothing yet and staging memory, both ways and by both means."""

    def __init__(
        self, parts: RowParts, arena: RowArena, staging: Staging, mover: Mover, queue: Queue
    ) -> None:
        self._parts, self._arena, self._staging = parts, arena, staging
        self._mover, self._queue, self._numbers = mover, queue, NumberPool(mover)

    def choose(self, mode: str, programs: int) -> tuple[Way, Way]:
        """The ways out and back. What was found is logged, once.

        ``mode`` is ``auto``, or what it must be; ``programs`` are a kernel's, 0 for as many as it needs.
        """
        piece = self._piece()
        found = []
        for out in (True, False):
            ways = [Way("dma", 0, self._rate(partial(self._copy, piece, out), piece))]
            if self._arena.pinned:
                ways.append(self._kernel(piece, out, programs))
            found.append(ways)
        chosen = [self._choose(ways, mode, worth) for ways, worth in zip(found, _WORTH_A_KERNEL, strict=True)]
        logger.info(
            "blocks leave the device by %s and come back by %s; GB/s of %d rows of %d bytes: out %s, back %s",
            *(way.mode for way in chosen),
            len(piece.length),
            int(piece.length[0]),
            *(", ".join(f"{way.mode} {way.bytes_per_s / 1e9:.1f}" for way in ways) for ways in found),
        )
        return chosen[0], chosen[1]

    def _choose(self, ways: list[Way], mode: str, worth: float) -> Way:
        by_mode = {way.mode: way for way in ways}
        engines = by_mode["dma"]
        if mode != "auto":
            return by_mode.get(mode, engines)
        kernel = by_mode.get("kernel", engines)
        return kernel if kernel.bytes_per_s > worth * engines.bytes_per_s else engines

    def _kernel(self, piece: Piece, out: bool, programs: int) -> Way:
        tried = [
            Way("kernel", count, self._rate(partial(self._move, piece, out, count), piece))
            for count in ((programs,) if programs else _TRIED_PROGRAMS)
        ]
        best = max(way.bytes_per_s for way in tried)
        return next(way for way in tried if way.bytes_per_s >= _AS_GOOD * best)

    def _piece(self) -> Piece:
        """Rows of the class that has most memory, with gaps between them if there are enough."""
        plan = self._arena.plan
        group, length = self._parts.tried_group, self._parts.tried_bytes
        rows = plan.row_class(group).num_rows
        most_bytes = min(_TRIED_BYTES, self._staging.out_bytes)
        count = max(1, min(most_bytes // length, _TRIED_ROWS, rows // 2))
        numbers: Column = np.arange(count, dtype=np.int64) * (2 if rows >= 2 * count else 1)
        nothing = np.zeros(count, dtype=np.int64)
        parts = Parts(nothing, nothing, self._arena.addresses(group, numbers), nothing + length)
        return parts.pieces(most_bytes, self._arena.borders)[0]

    def _copy(self, piece: Piece, out: bool) -> None:
        host, place, length = piece.copies
        staged = self._staging.address + place
        self._queue.copy(*((staged, host) if out else (host, staged)), length)

    def _move(self, piece: Piece, out: bool, programs: int) -> None:
        """What is packed leaves as it is; what comes back is cut as the pages are that it belongs to."""
        kind = self._parts.plain_kind(piece.length)
        if not out:
            kind = np.full_like(kind, self._parts.tried_kind)
        loading = Loading(self._mover, self._numbers)
        launches = loading.add(kind, self._staging.address + piece.place, piece.address)
        loading.load(self._queue)
        loading.start(self._queue, launches, 0, out, programs)
        self._numbers.give_back(self._queue.record())

    def _rate(self, way: Callable[[], None], piece: Piece) -> float:
        """Bytes per second of the best of a few tries."""
        way()
        best_s = float("inf")
        for _ in range(_TRIES):
            before = self._queue.record(timed=True)
            way()
            after = self._queue.record(timed=True)
            after.wait()
            best_s = min(best_s, after.seconds_since(before))
        return piece.total_bytes / max(best_s, 1e-9)

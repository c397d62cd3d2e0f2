"""The short calibration when peers meet: how fast the engine moves bytes on this link.

P writes a few batches from its scratch memory to the peer's, which is never read. Until they are done the
peer's fetches wait; that is no longer than a connection takes to be made.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from kvconnect.engine.base import Completion
from kvconnect.pack.arena import Arena
from kvconnect.worker.outbox import BatchOutbox, Columns

_FIRST_BYTES, _GROWTH = 4096, 4
_LONGEST_S = 0.5
"""Nothing follows a batch that took longer: a link as slow as that has shown it."""
_CPU_BYTES = 4 << 20
_UNCACHED_BYTES = 64 << 20
_MOST_COPIES = 64
_CUDA_SHARE = 0.85
_CPU_SHARE = 0.6
"""What packing reaches of a plain copy: see `python -m benchmarks pack`."""


class Sample(NamedTuple):
    """One batch of a probe: a copy of so many bytes."""

    total_bytes: int
    seconds: float


class ProbeOutbox(BatchOutbox):
    """Copies of growing length, each alone on its way. ``samples`` are what they took.

    Args:
        source: our scratch memory.
        target: the peer's.
        scratch_bytes: of the smaller of the two.
    """

    is_alone = True

    def __init__(self, source: int, target: int, scratch_bytes: int) -> None:
        self.samples: list[Sample] = []
        # The first batch makes the connection, and measures nothing.
        length = min(_FIRST_BYTES, scratch_bytes)
        lengths = [length, length]
        while (length := length * _GROWTH) < scratch_bytes:
            lengths.append(length)
        # The largest three times: one that was disturbed does not measure the link.
        lengths += [scratch_bytes] * 3
        super().__init__((_copy(source, target, length) for length in lengths), copies=0)
        self._scratch_bytes = scratch_bytes
        self._is_connected = False

    @property
    def bytes_per_s(self) -> float:
        """The most that a copy of the largest length reached: what disturbed the others is not the link's."""
        timed = [one for one in self.samples if one.seconds > 0]
        largest = max((one.total_bytes for one in timed), default=0)
        return max((largest / one.seconds for one in timed if one.total_bytes == largest), default=0.0)

    @property
    def is_whole(self) -> bool:
        """The largest copy was made: no error and no slow batch came before it."""
        return any(one.total_bytes == self._scratch_bytes for one in self.samples)

    def submitted(self, batch_id: int) -> None:
        """What follows that batch depends on what it takes."""
        self._next = None

    def ended(self, completion: Completion) -> None:
        """The engine is done with a batch, the next of them."""
        if completion.ok and self._is_connected:
            self.samples.append(Sample(completion.total_bytes, completion.seconds))
        if not self._is_connected or completion.seconds <= _LONGEST_S:
            self._next = next(self._batches, None)
        self._is_connected = True


def _copy(source: int, target: int, length: int) -> Columns:
    column = np.array((source, target, length), dtype=np.int64)
    return column[:1], column[1:2], column[2:]


def probe_bytes(slot_bytes: int, on_cuda: bool) -> int:
    """How much scratch memory a worker has: what a fast link needs to show its speed."""
    return slot_bytes if on_cuda else min(slot_bytes, _CPU_BYTES)


def pack_bytes_per_s(arena: Arena) -> float:
    """About how fast pages are packed here: a plain copy, and the usual part of it."""
    return copy_bytes_per_s(arena) * (_CUDA_SHARE if arena.device.type == "cuda" else _CPU_SHARE)


def copy_bytes_per_s(arena: Arena) -> float:
    """How fast a plain copy into a slot is."""
    on_cuda = arena.device.type == "cuda"
    target: Any = arena.view(arena.addresses[0], arena.slot_bytes)
    sources: Any
    if not on_cuda:
        # Pages lie in memory: what is in the processor's cache, as a slot is, is copied several times faster.
        copies = max(1, min(_MOST_COPIES, _UNCACHED_BYTES // arena.slot_bytes))
        # By numpy, as pages are packed: torch would take all cores.
        sources, target = np.ones((copies, arena.slot_bytes), dtype=np.uint8), target.numpy()
    elif len(arena.addresses) > 1:
        sources = arena.view(arena.addresses[1], arena.slot_bytes)[None]
    else:
        sources = arena.view(arena.scratch_address, min(arena.scratch_bytes, arena.slot_bytes))[None]
    seconds = math.inf
    for _ in range(3):
        # The first copy is the first use of this memory, and slow.
        start = time.perf_counter()
        for source in sources:
            target[: len(source)] = source
        if on_cuda:
            torch.cuda.synchronize(arena.device)
        seconds = min(seconds, time.perf_counter() - start)
    return int(sources.nbytes) / seconds

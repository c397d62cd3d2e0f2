"""A lower tier in memory: as full and as unreliable as a test wants it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.tier import MAX_HASH_BYTES, Content, TierRow, TierUpdate


class MemoryTier:
    """A ``LowerTier`` that keeps rows in a dictionary, the last used longest. One thread does its work.

    It keeps ``limit_bytes`` of rows at most, and at most ``max_queued_bytes`` wait to be written. Its changes
    are reported only if it is ``indexed``.
    """

    def __init__(
        self,
        limit_bytes: int = 1 << 30,
        *,
        max_queued_bytes: int = 1 << 30,
        indexed: bool = True,
        name: str = "memory",
    ) -> None:
        self.name = name
        self.indexed = indexed
        self.is_failing = False
        self._limit_bytes = limit_bytes
        self._max_queued_bytes = max_queued_bytes
        self._tracker = CompletionTracker()
        self._kept: OrderedDict[Content, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._pinned: set[Content] = set()
        self._queued_bytes = 0
        self._epoch = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "kvconnect-memory-tier")

    def on_update(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever there is something to report."""
        self._tracker.on_update(wake)

    def write(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to keep rows."""
        self._tracker.open("written", job, len(rows))
        for row in rows:
            with self._lock:
                is_taken = self._queued_bytes + len(row.memory) <= self._max_queued_bytes
                if is_taken:
                    self._queued_bytes += len(row.memory)
            if is_taken:
                self._submit(partial(self._write, job, row, self._epoch))
            else:
                self._tracker.fail(f"{self.name}_queue_full")
                self._tracker.settle("written", job, 1, [row.content])

    def read(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to read rows."""
        self._tracker.open("read", job, len(rows))
        for row in rows:
            self._submit(partial(self._read, job, row))

    def seek(self, job: int, contents: Sequence[Content]) -> None:
        """Begin to look for contents."""
        self._tracker.open("found", job, len(contents))
        if contents:
            self._submit(partial(self._seek, job, contents))

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        """Contents that are pinned make no room, there or not; the others may again."""
        with self._lock:
            for group, hash_, is_pinned in pins:
                (self._pinned.add if is_pinned else self._pinned.discard)((group, hash_))

    def poll(self) -> TierUpdate:
        """What is new."""
        return self._tracker.take()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._epoch += 1
            self._kept.clear()
            self._pinned.clear()
            self._kept_bytes = 0
            self._tracker.forget_changes()

    def close(self) -> bool:
        """Stop."""
        self._is_closed = True
        self._thread.shutdown()
        return True

    def state(self) -> dict[str, Any]:
        """What there is to see."""
        jobs = self._tracker.open_jobs()
        return {"records": len(self._kept), "reserved_bytes": self._kept_bytes, "jobs": jobs}

    # ---- its thread

    def _submit(self, work: Callable[[], None]) -> None:
        if self._is_closed:
            work()
        else:
            self._thread.submit(work)

    @property
    def _is_off(self) -> bool:
        return self.is_failing or self._is_closed

    def _write(self, job: int, row: TierRow, epoch: int) -> None:
        with self._lock:
            self._queued_bytes -= len(row.memory)
            fits = 0 < len(row.memory) <= self._limit_bytes and 0 < len(row.hash) <= MAX_HASH_BYTES
            fits = fits and epoch == self._epoch and not self._is_off
            if fits and row.content not in self._kept:
                self._kept[row.content] = bytes(row.memory)
                self._kept_bytes += len(row.memory)
                gone = []
                while self._kept_bytes > self._limit_bytes:
                    content = next(one for one in self._kept if one not in self._pinned)
                    self._kept_bytes -= len(self._kept.pop(content))
                    gone.append(content)
                if self.indexed:
                    self._tracker.add([row.content])
                    self._tracker.remove(gone)
        if not fits:
            self._tracker.fail(f"{self.name}_refused")
        self._tracker.settle("written", job, 1, () if fits else [row.content])

    def _read(self, job: int, row: TierRow) -> None:
        with self._lock:
            found = None if self._is_off else self._kept.get(row.content)
            is_right = found is not None and len(found) == len(row.memory)
            if found is not None and is_right:
                self._kept.move_to_end(row.content)
                row.memory[:] = found
            elif self.indexed and row.content not in self._kept:
                self._tracker.remove([row.content])
        self._tracker.settle("read", job, 1, () if is_right else [row.content])

    def _seek(self, job: int, contents: Sequence[Content]) -> None:
        with self._lock:
            found = [content for content in contents if content in self._kept and not self._is_off]
        self._tracker.settle("found", job, len(contents), found)

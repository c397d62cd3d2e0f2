"""A lower tier in memory: as full and as unreliable as a test wants it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from kvconnect.offload.tier import MAX_HASH_BYTES, CompletionTracker, Content, Kind, LowerTier, TierRow


class MemoryTier(LowerTier):
    """One that keeps rows in a dictionary, the last used longest. One thread does its work.

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
        self.tracker = CompletionTracker()
        self._kept: OrderedDict[Content, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._pinned: set[Content] = set()
        self._queued_bytes = 0
        self._epoch = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "kvconnect-memory-tier")

    def write(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to keep rows."""
        self.tracker.open("write", job, len(rows))
        taken: list[TierRow] = []
        refused: list[TierRow] = []
        with self._lock:
            for row in rows:
                fits = self._queued_bytes + len(row.memory) <= self._max_queued_bytes
                (taken if fits else refused).append(row)
                self._queued_bytes += len(row.memory) if fits else 0
        if taken:
            self._submit(partial(self._write, job, taken, self._epoch))
        if refused:
            self.tracker.fail(f"{self.name}_queue_full", times=len(refused))
            self._end("write", job, len(refused), [row.content for row in refused])

    def read(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to read rows."""
        self.tracker.open("read", job, len(rows))
        if rows:
            self._submit(partial(self._read, job, rows))

    def seek(self, job: int, contents: Sequence[Content]) -> None:
        """Begin to look for contents."""
        self.tracker.open("seek", job, len(contents))
        if contents:
            self._submit(partial(self._seek, job, contents))

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        """Contents that are pinned make no room, there or not; the others may again."""
        with self._lock:
            for group, hash_, is_pinned in pins:
                (self._pinned.add if is_pinned else self._pinned.discard)((group, hash_))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._epoch += 1
            self._kept.clear()
            self._pinned.clear()
            self._kept_bytes = 0
            self.tracker.forget_changes()

    def close(self) -> bool:
        """Stop."""
        self._is_closed = True
        self._thread.shutdown()
        return True

    def state(self) -> dict[str, Any]:
        """What there is to see."""
        return {"records": len(self._kept), "taken_bytes": self._kept_bytes, "limit_bytes": self._limit_bytes}

    # ---- its thread

    def _submit(self, work: Callable[[], None]) -> None:
        if self._is_closed:
            work()
        else:
            self._thread.submit(work)

    @property
    def _is_off(self) -> bool:
        return self.is_failing or self._is_closed

    def _end(self, kind: Kind, job: int, count: int, named: Sequence[Content] = ()) -> None:
        self.tracker.settle(kind, job, count, named)

    def _write(self, job: int, rows: Sequence[TierRow], epoch: int) -> None:
        failed = []
        for row in rows:
            with self._lock:
                self._queued_bytes -= len(row.memory)
                fits = 0 < len(row.memory) <= self._limit_bytes and 0 < len(row.hash) <= MAX_HASH_BYTES
                if fits and epoch == self._epoch and not self._is_off:
                    self._keep(row)
                    continue
            failed.append(row.content)
        self.tracker.fail(f"{self.name}_refused", times=len(failed))
        self._end("write", job, len(rows), failed)

    def _keep(self, row: TierRow) -> None:
        gone = []
        if row.content not in self._kept:
            self._kept[row.content] = bytes(row.memory)
            self._kept_bytes += len(row.memory)
            while self._kept_bytes > self._limit_bytes:
                content = next(one for one in self._kept if one not in self._pinned)
                self._kept_bytes -= len(self._kept.pop(content))
                gone.append(content)
            if self.indexed:
                self.tracker.add([row.content])
                self.tracker.remove(gone)

    def _read(self, job: int, rows: Sequence[TierRow]) -> None:
        missing = []
        for row in rows:
            with self._lock:
                found = None if self._is_off else self._kept.get(row.content)
                if found is not None and len(found) == len(row.memory):
                    self._kept.move_to_end(row.content)
                    row.memory[:] = found
                    continue
                if self.indexed and row.content not in self._kept:
                    self.tracker.remove([row.content])
            missing.append(row.content)
        self._end("read", job, len(rows), missing)

    def _seek(self, job: int, contents: Sequence[Content]) -> None:
        with self._lock:
            found = [content for content in contents if content in self._kept and not self._is_off]
        self._end("seek", job, len(contents), found)

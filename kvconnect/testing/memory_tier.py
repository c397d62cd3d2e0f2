"""A lower tier in memory: as slow, as full and as unreliable as a test wants it."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.tier import MAX_HASH_BYTES, Content, TierNews, TierRow


class MemoryTier:
    """A ``LowerTier`` that keeps rows in a dictionary, the last used longest. One thread does its work.

    ``hold`` stops the work until ``release``; with ``is_failing`` nothing is written or read; ``spoil`` takes
    a content away that was told as there.

    Args:
        limit_bytes: most bytes of rows.
        max_queued_bytes: most bytes of rows that wait to be written.
        indexed: whether changes are told.
        name: what it is called.
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
        self._desk = CompletionTracker()
        self._kept: OrderedDict[Content, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._queued_bytes = 0
        self._epoch = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._free = threading.Event()
        self._free.set()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvconnect-memory-tier", daemon=True)
        self._thread.start()

    # ---- what a test does

    def hold(self) -> None:
        """Begin nothing more."""
        self._free.clear()

    def release(self) -> None:
        """Go on."""
        self._free.set()

    def spoil(self, content: Content) -> None:
        """Lose a content without telling."""
        with self._lock:
            self._kept_bytes -= len(self._kept.pop(content))

    # ---- what its owner calls

    def on_news(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever there is something to tell."""
        self._desk.on_news(wake)

    def write(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to keep rows."""
        self._desk.open("written", job, len(rows))
        for row in rows:
            with self._lock:
                is_taken = self._queued_bytes + len(row.memory) <= self._max_queued_bytes
                if is_taken:
                    self._queued_bytes += len(row.memory)
            if is_taken:
                self._submit(partial(self._write, job, row, self._epoch))
            else:
                self._desk.fail(f"{self.name}_queue_full")
                self._desk.settle("written", job, 1, [row.content])

    def read(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to read rows."""
        self._desk.open("read", job, len(rows))
        for row in rows:
            self._submit(partial(self._read, job, row))

    def seek(self, job: int, contents: Sequence[Content]) -> None:
        """Begin to look for contents."""
        self._desk.open("found", job, len(contents))
        if contents:
            self._submit(partial(self._seek, job, contents))

    def poll(self) -> TierNews:
        """What is new."""
        return self._desk.take()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._epoch += 1
            self._kept.clear()
            self._kept_bytes = 0
            self._desk.forget_changes()

    def close(self) -> bool:
        """Stop."""
        self._is_closed = True
        self._free.set()
        self._queue.put(None)
        self._thread.join()
        return True

    def state(self) -> dict[str, Any]:
        """What there is to see."""
        return {
            "records": len(self._kept),
            "reserved_bytes": self._kept_bytes,
            "jobs": self._desk.open_jobs(),
        }

    # ---- its thread

    def _submit(self, work: Callable[[], None]) -> None:
        if self._is_closed:
            work()
        else:
            self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._free.wait()
            work()
            del work

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
                    content, old = self._kept.popitem(last=False)
                    self._kept_bytes -= len(old)
                    gone.append(content)
                if self.indexed:
                    self._desk.add([row.content])
                    self._desk.remove(gone)
        if not fits:
            self._desk.fail(f"{self.name}_refused")
        self._desk.settle("written", job, 1, () if fits else [row.content])

    def _read(self, job: int, row: TierRow) -> None:
        with self._lock:
            found = None if self._is_off else self._kept.get(row.content)
            is_right = found is not None and len(found) == len(row.memory)
            if found is not None and is_right:
                self._kept.move_to_end(row.content)
                row.memory[:] = found
            elif self.indexed and row.content not in self._kept:
                self._desk.remove([row.content])
        self._desk.settle("read", job, 1, () if is_right else [row.content])

    def _seek(self, job: int, contents: Sequence[Content]) -> None:
        with self._lock:
            found = [content for content in contents if content in self._kept and not self._is_off]
        self._desk.settle("found", job, len(contents), found)

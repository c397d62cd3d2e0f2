"""A tier below host memory: a cache of rows by content, with asynchronous writes and reads.

Every failure inside a tier is a miss and a counted reason. A tier raises for none of them, never returns
bytes that differ from the bytes written, and never blocks its caller. It knows no requests or block ids.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from kvconnect.offload.tier import CompletionTracker, Content, Kind, TierCall, TierRow, TierUpdate

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class LowerTier:
    """A tier of one worker rank: carries out calls in order, in parts, on threads for each kind of call.

    One thread calls it. Its threads are daemons: an executor of the standard library would keep the process
    from exiting while a disk or a store hangs.

    Args:
        threads: the number of threads by kind of call.
        max_queued_bytes: most bytes of rows that wait to be written, or are being written.
    """

    name: str
    """Identifies the tier in orders and metrics."""

    def __init__(
        self, tracker: CompletionTracker, threads: Mapping[Kind, int], max_queued_bytes: int
    ) -> None:
        self.tracker = tracker
        self.is_closing = False
        self.queued_bytes, self._max_queued_bytes = 0, max_queued_bytes
        self._lock = threading.Lock()
        self._queues: dict[Kind, queue.SimpleQueue[Callable[[], object] | None]]
        self._queues = {kind: queue.SimpleQueue() for kind in threads}
        self._threads = [
            (kind, threading.Thread(target=self._serve, args=(kind,), name=f"kvconnect-{self.name}-{kind}"))
            for kind, count in threads.items()
            for _ in range(count)
        ]
        for _, thread in self._threads:
            thread.daemon = True
            thread.start()

    def begin(self, call: TierCall) -> None:
        """Begin a call, which ``poll`` reports once it has ended.

        Of a write, contents that the tier already has are not written again. Rows beyond the bound of the
        queue fail at once. Empty rows, empty hashes and hashes longer than ``MAX_HASH_BYTES`` fail too. Of a
        read, a record of another length than its row is a miss.
        """
        rows = call.rows
        if call.kind == "write":
            lengths = accumulate(len(row.memory) for row in rows)
            with self._lock:
                room_bytes = self._max_queued_bytes - self.queued_bytes
                rows = rows[: sum(length <= room_bytes for length in lengths)]
                self.queued_bytes += _memory_bytes(rows)
        for part in self._parts(call.kind, rows):
            self._submit(call.kind, partial(self._run, call, part, self.tracker.epoch))
        rest = call.rows[len(rows) :]
        self.tracker.fail(f"{self.name}_queue_full", times=len(rest))
        if rest or not call.rows:
            self.tracker.settle(call, rest)

    def poll(self) -> TierUpdate:
        """Calls that ended, changes and failures since the last poll. Never blocks."""
        return self.tracker.take()

    def has(self, contents: Sequence[Content]) -> Sequence[bool]:
        """For each content whether the tier has it; False where the tier keeps no index. Thread-safe."""
        return [False] * len(contents)

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        """Pin or unpin contents: group, hash, whether pinned. The disk tier evicts no pinned content."""
        return

    def clear(self) -> None:
        """Forget all contents. Later calls find and read nothing that was written or ordered before.

        The tier does not report these contents as removed. Calls under way are reported as usual.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """The tier's state for an operator: numbers and short texts."""
        raise NotImplementedError

    def close(self) -> bool:
        """Stop within seconds; what has not begun fails. ``poll`` still reports all calls. Idempotent.

        Returns whether all rows' memory is quiescent; it is not if a disk or network operation hangs.
        """
        with self._lock:
            self.is_closing = True
        for kind, _ in self._threads:
            self._queues[kind].put(None)
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for _, thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for _, thread in self._threads)

    def _submit(self, kind: Kind, work: Callable[[], object]) -> None:
        """Run work on a thread of this kind, or on the calling thread once the tier is closing."""
        with self._lock:
            if not self.is_closing:
                self._queues[kind].put(work)
                return
        self._do(work)

    # ---- for subclasses

    def _parts(self, kind: Kind, rows: Sequence[TierRow]) -> Iterable[Sequence[TierRow]]:
        """Divide the rows of a call into parts, each of which is carried out at once."""
        raise NotImplementedError

    def _carry_out(self, kind: Kind, rows: Sequence[TierRow], epoch: int) -> Sequence[bool]:
        """On a thread: whether the call was successful, for each row; empty if it was for none.

        ``epoch`` is the tracker's at the begin of the call: what is written after a clear must not be found.
        """
        raise NotImplementedError

    def _note(self, error: Exception) -> str:
        """Count an error of our own; returns the reason that it counts as."""
        reason = f"{self.name}_internal"
        if reason not in self.tracker.logged:
            logger.error("internal error in the tier %s, which goes on", self.name, exc_info=error)
        self.tracker.fail(reason)
        return reason

    # ---- on the threads

    def _serve(self, kind: Kind) -> None:
        while (work := self._queues[kind].get()) is not None:
            self._do(work)
            # Work may hold the memory of rows, and the next piece may be long in coming.
            del work

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._note(error)

    def _run(self, call: TierCall, rows: Sequence[TierRow], epoch: int) -> None:
        is_good: Sequence[bool] = ()
        try:
            if not self.is_closing:
                is_good = self._carry_out(call.kind, rows, epoch)
        except Exception as error:
            self._note(error)
        if call.kind == "write":
            with self._lock:
                self.queued_bytes -= _memory_bytes(rows)
        self.tracker.settle(call, rows, is_good)


def _memory_bytes(rows: Sequence[TierRow]) -> int:
    return sum(len(row.memory) for row in rows)

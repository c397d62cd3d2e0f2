"""A lower tier in memory: as full and as unreliable as a test wants it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvconnect.offload.lower_tier import LowerTier
from kvconnect.offload.tier import MAX_HASH_BYTES, CompletionTracker, Kind, TierRow

_THREADS: Mapping[Kind, int] = {"write": 1, "read": 1, "seek": 1}


class MemoryTier(LowerTier):
    """One that keeps rows in a dictionary, the last used longest.

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
        threads: Mapping[Kind, int] = _THREADS,
    ) -> None:
        self.name = name
        self.indexed = indexed
        self.is_failing = False
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()
        self._kept_bytes = 0
        self._pinned: set[tuple[int, bytes]] = set()
        super().__init__(CompletionTracker(name), threads, max_queued_bytes)

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        """Contents that are pinned make no room, there or not; the others may again."""
        with self._lock:
            for group, hash_, is_pinned in pins:
                (self._pinned.add if is_pinned else self._pinned.discard)((group, hash_))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._pinned.clear()
            self._kept_bytes = 0
            self.tracker.clear()

    def state(self) -> dict[str, Any]:
        """What there is to see."""
        return {"records": len(self._kept), "taken_bytes": self._kept_bytes, "limit_bytes": self._limit_bytes}

    # ---- its threads

    def _parts(self, kind: Kind, rows: Sequence[TierRow]) -> Sequence[Sequence[TierRow]]:
        return [rows] if rows else []

    def _carry_out(self, kind: Kind, rows: Sequence[TierRow], epoch: int) -> Sequence[bool]:
        with self._lock:
            if self.is_failing or (kind == "write" and epoch != self.tracker.epoch):
                is_good = [False] * len(rows)
            else:
                calls: Mapping[Kind, Callable[[TierRow], bool]]
                calls = {
                    "write": self._keep,
                    "read": self._read,
                    "seek": lambda row: row.content in self._kept,
                }
                is_good = list(map(calls[kind], rows))
        if kind == "write":
            self.tracker.fail(f"{self.name}_refused", times=is_good.count(False))
        return is_good

    def _keep(self, row: TierRow) -> bool:
        if not 0 < len(row.memory) <= self._limit_bytes or not 0 < len(row.hash) <= MAX_HASH_BYTES:
            return False
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
        return True

    def _read(self, row: TierRow) -> bool:
        found = self._kept.get(row.content)
        if found is not None and len(found) == len(row.memory):
            self._kept.move_to_end(row.content)
            row.memory[:] = found
            return True
        if self.indexed and found is None:
            self.tracker.remove([row.content])
        return False

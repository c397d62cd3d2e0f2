"""Where the threads of a tier leave what became of its jobs, until its owner polls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from kvconnect.errors import LocalError
from kvconnect.offload.tier import Content, TierUpdate

Kind = Literal["written", "read", "found"]


class CompletionTracker:
    """Jobs under way in parts, changes, failures. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._open: dict[tuple[Kind, int], tuple[int, list[Content]]] = {}
        self.is_recovering = False
        self._start_anew()

    def _start_anew(self) -> None:
        self._done: dict[Kind, dict[int, tuple[Content, ...]]] = {"written": {}, "read": {}, "found": {}}
        self._changes: dict[Content, bool] = {}
        self._footers: dict[Content, bytes] = {}
        self._failures: Counter[str] = Counter()

    def on_update(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def open(self, kind: Kind, job: int, count: int) -> None:
        """A job of ``count`` contents begins; with none it is done at once. See ``LowerTier`` for errors."""
        with self._lock:
            if (kind, job) in self._open or job in self._done[kind]:
                raise LocalError(
                    f"job {job} ({kind}) is under way; accepted: a job that was reported, or new"
                )
            self._open[kind, job] = count, []
        if not count:
            self.settle(kind, job, 0)

    def settle(self, kind: Kind, job: int, count: int, named: Iterable[Content] = ()) -> None:
        """``count`` contents of a job are dealt with; ``named`` are those of them that its report names."""
        with self._lock:
            left, every = self._open.pop((kind, job))
            every += named
            if left > count:
                self._open[kind, job] = left - count, every
                return
            self._done[kind][job] = tuple(every)
        self._wake()

    def add(
        self,
        contents: Sequence[Content],
        footers: Mapping[Content, bytes] = MappingProxyType({}),
        *,
        is_there: bool = True,
    ) -> None:
        if contents:
            with self._lock:
                self._changes.update(dict.fromkeys(contents, is_there))
                self._footers.update(footers)
            self._wake()

    def remove(self, contents: Sequence[Content]) -> None:
        self.add(contents, is_there=False)

    def forget_changes(self) -> None:
        with self._lock:
            self._changes, self._footers = {}, {}

    def recovered(self) -> None:
        """What the tier had before its start is added."""
        self.is_recovering = False
        self._wake()

    def fail(self, reason: str, times: int = 1) -> None:
        if times:
            with self._lock:
                self._failures[reason] += times
            self._wake()

    def open_jobs(self) -> int:
        return len(self._open)

    def take(self) -> TierUpdate:
        """Everything that is new, once."""
        with self._lock:
            is_recovering = self.is_recovering
            done, failures, changes, footers = self._done, self._failures, self._changes, self._footers
            self._start_anew()
        return TierUpdate(
            written=done["written"],
            read=done["read"],
            found=done["found"],
            added=tuple(content for content, is_there in changes.items() if is_there),
            removed=tuple(content for content, is_there in changes.items() if not is_there),
            footers=footers,
            failures=dict(failures),
            is_recovering=is_recovering,
        )

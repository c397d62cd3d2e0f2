"""What a tier below host memory is: it keeps rows by content, and gives them back or reports that it cannot.

A tier is a cache. Each failure in it is a miss and a counted reason; the tier never raises for that, never
gives back bytes that are not those which were written, and never keeps its caller waiting.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from kvconnect.config import OffloadConfig
from kvconnect.errors import LocalError

logger = logging.getLogger(__name__)

Content = tuple[int, bytes]
"""What a row holds: the cache group, and the hash of the tokens up to the end of the block."""

MAX_HASH_BYTES = 64
"""The longest hash that a tier takes."""

HOST = "host"
"""What host memory is called among the tiers, and where hits are reported by where they came from."""
DISK = "disk"
STORE = "store"

SOUGHT = frozenset({STORE})
"""The tiers that keep no index here: they never report what they have got, and must be asked."""


def lower_tier_names(config: OffloadConfig) -> tuple[str, ...]:
    """The tiers below host memory, nearest first. Both halves of a connector know them by these names."""
    return tuple(name for name, is_named in ((DISK, config.disk_path), (STORE, config.store)) if is_named)


class TierRow(NamedTuple):
    """A row in host memory and what it holds, or shall hold.

    ``memory`` is contiguous bytes, as long as the row, and writable where it is read into. It must stay until
    the job it belongs to was reported. What is written may have a ``footer``: what the content stands for.
    """

    group: int
    hash: bytes
    memory: memoryview
    footer: bytes = b""

    @property
    def content(self) -> Content:
        return (self.group, self.hash)


Kind = Literal["write", "read", "seek"]
"""What a job of a tier is, named for the call that begins it."""


@dataclass(frozen=True)
class TierUpdate:
    """What became of a tier's jobs since it was last asked, and what changed. Every job comes once.

    ``done`` has by kind and job the contents that its report names. Of a write it is those that are not kept,
    none as a rule: the rows' memory is not read any more. Of a read, those that are not there, or not right:
    the rows' memory is not written any more. Of what was sought, those that the tier has.
    ``added`` and ``removed`` are what a tier has got, and has no more, none in both; ``footers`` those of
    what it had before its start, where it was to look for them. ``failures`` are reasons, with how often.
    While it ``is_recovering`` more is added of what it had.
    """

    done: Mapping[Kind, Mapping[int, tuple[Content, ...]]] = field(default_factory=dict)
    added: tuple[Content, ...] = ()
    removed: tuple[Content, ...] = ()
    footers: Mapping[Content, bytes] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    is_recovering: bool = False

    def __bool__(self) -> bool:
        return bool(any(self.done.values()) or self.added or self.removed or self.failures)


class CompletionTracker:
    """Where the threads of a tier leave what became of its jobs, in parts, until its owner polls.

    For any thread. The first failure of a kind is logged; the count has the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._open: dict[tuple[Kind, int], tuple[int, list[Content]]] = {}
        self.is_recovering = False
        self.logged: set[str] = set()
        self._start_anew()

    def _start_anew(self) -> None:
        self._done: dict[Kind, dict[int, tuple[Content, ...]]] = {"write": {}, "read": {}, "seek": {}}
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

    def fail(self, reason: str, about: object = "", *, times: int = 1) -> None:
        if not times:
            return
        with self._lock:
            self._failures[reason] += times
            is_new = reason not in self.logged
            self.logged.add(reason)
        if is_new:
            logger.warning("%s, counted from now on: %s", reason, about)
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
            done=done,
            added=tuple(content for content, is_there in changes.items() if is_there),
            removed=tuple(content for content, is_there in changes.items() if not is_there),
            footers=footers,
            failures=dict(failures),
            is_recovering=is_recovering,
        )


class LowerTier(Protocol):
    """A tier of one worker rank. One thread calls it; all its work is done on threads of its own.

    ``name`` is what orders and metrics call it. Jobs are numbers of the caller's choice; one of each kind may
    be used again once it was reported. To begin one that is under way raises ``LocalError``.
    """

    name: str
    tracker: CompletionTracker

    def on_update(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on a thread of the tier, whenever ``poll`` has something to report."""
        self.tracker.on_update(wake)

    def poll(self) -> TierUpdate:
        """What is new. Never waits."""
        return self.tracker.take()

    def has(self, contents: Sequence[Content]) -> Sequence[bool]:
        """Of each content whether it is there now, as far as a tier can tell any thread at once."""
        return [False] * len(contents)

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        """By group and hash whether a content is pinned: a tier that can keeps it from making room then."""
        return

    def write(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to keep these rows. What it has already it does not write again.

        Rows that would wait beyond the bound of its queue fail at once. A row that can never be kept, without
        bytes or with a hash of none or more than ``MAX_HASH_BYTES``, fails.
        """
        ...

    def read(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to read these contents into memory. What has another length than its row is a miss."""
        ...

    def seek(self, job: int, contents: Sequence[Content]) -> None:
        """Begin to find out which of these contents it has."""
        ...

    def clear(self) -> None:
        """Forget everything. Nothing that was written or ordered before is found or read by later jobs.

        It is not reported as removed: its caller knows. Jobs under way are reported as ever.
        """
        ...

    def close(self) -> bool:
        """Stop, within seconds. Jobs that have not begun fail. Returns whether no row's memory is touched any
        more; only a disk or a network that hangs is a reason why it might be.

        May be called several times. ``poll`` still reports what is left to report.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What there is to see, for a person who looks: numbers and short texts."""
        ...

"""What tiers and their users tell each other: contents, rows, calls, and what came of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from kvconnect.config import OffloadConfig

logger = logging.getLogger(__name__)

Content = tuple[int, bytes]
"""The name of one block's KV: its cache group, and the chain hash of all tokens up to the block's end."""

MAX_HASH_BYTES = 64
"""The longest hash that a tier accepts, in bytes."""

HOST = "host"
"""The name of host memory among the tiers, and in the counts of restored tokens by tier."""
DISK = "disk"
STORE = "store"

SOUGHT = frozenset({STORE})
"""Tiers without an index in this process: each lookup must ask them which contents they have."""


def lower_tier_names(config: OffloadConfig) -> tuple[str, ...]:
    """The names of the configured tiers below host memory, nearest first; both halves use these names."""
    return tuple(name for name, is_named in ((DISK, config.disk_path), (STORE, config.store)) if is_named)


class TierRow(NamedTuple):
    """A row in host memory, with the content that it holds or that a tier reads into it.

    ``memory`` is the row's contiguous bytes, writable for a read. The caller keeps it valid until the tier
    has reported the call. ``footer``, for writes only, has the content's tokens for events; empty for none.
    """

    group: int
    hash: bytes
    memory: memoryview = memoryview(b"")
    footer: bytes = b""

    @property
    def content(self) -> Content:
        return (self.group, self.hash)


Kind = Literal["write", "read", "seek"]
"""What a call asks of a tier: to write rows, to read contents into rows, or to find contents.

Only tiers without an index in this process are asked to find.
"""


@dataclass(eq=False)
class TierCall:
    """A call of a tier, which ends once all rows are settled; ``job`` and ``began_s`` are the caller's own.

    Attributes:
        rows: those of a seek have no memory.
        named: for a write, contents that the tier did not keep, normally none; for a read, contents that were
            missing or corrupt; for a seek, contents that the tier has. Once the call has ended, the tier
            neither reads nor writes the rows' memory.
    """

    kind: Kind
    rows: Sequence[TierRow]
    job: Any = None
    began_s: float = 0.0
    named: list[Content] = field(default_factory=list)
    num_settled: int = 0


@dataclass
class TierUpdate:
    """Calls that ended, and contents that a tier gained or lost, since the last poll.

    Attributes:
        done: each call once.
        changes: contents that the tier gained (True) and lost.
        footers: by content, for contents from before the tier's start, if the tier was to read footers.
        failures: counts by reason.
    """

    done: list[TierCall] = field(default_factory=list)
    changes: dict[Content, bool] = field(default_factory=dict)
    footers: dict[Content, bytes] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.done or self.changes or self.failures)

    def changed(self, is_added: bool) -> list[Content]:
        """The contents that the tier gained, or those that it lost."""
        return [content for content, is_there in self.changes.items() if is_there == is_added]


_DAMAGED = "a row is not what was written, and is removed: if that repeats, the {} is faulty"
TEXTS = {
    "disk_full": "nothing is written, as the disk or its quota is full: free some of it, or lower disk_bytes",
    "disk_read_only": "nothing is written: look at the mount, the owner and the mode of disk_path",
    "disk_gone": "nothing is kept, as the folder is gone: mount it again",
    "disk_held": "nothing is kept, as another process has the folder: give each server its own disk_path",
    "disk_io": "the disk failed, and is tried again: look at the log of the kernel",
    "disk_queue_full": "a part is not written, as the disk is slower than what comes",
    "disk_too_large": "a row is longer than disk_bytes or the file system allows: raise disk_bytes",
    **dict.fromkeys(("disk_corrupt", "disk_truncated", "disk_foreign"), _DAMAGED.format("disk")),
    "store_full": "nothing is kept, as the store is full: give it more memory",
    **dict.fromkeys(("store_wrong_size", "store_corrupt", "store_foreign"), _DAMAGED.format("store")),
    "store_unreachable": "the store cannot be used, and keeps nothing until it can: look at offload.store "
    "and its master",
    "store_io": "the store failed: look at the log of its master",
    "store_queue_full": "a part is not kept, as the store is slower than what comes",
    "store_not_cleared": "it could not be cleared, and is not used until it can be",
}
"""What the log has of a reason. Others are logged where they happen, or follow from one of these."""


class CompletionTracker:
    """Collects, from a tier's threads, calls that ended, changes and failures until the owner polls.

    Thread-safe. The first failure of each reason in ``TEXTS`` is logged, with ``where``; all others are only
    counted. ``epoch`` grows with every ``clear``. ``wake`` is called, on any thread, when there is news.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self.wake: Callable[[], None] = lambda: None
        self.epoch = 0
        self.is_recovering = False
        """Whether the tier has yet to add contents from before its start."""
        self.logged: set[str] = set()
        self._update = TierUpdate()

    def settle(self, call: TierCall, rows: Sequence[TierRow], is_good: Sequence[bool] = ()) -> None:
        """End rows of a call, with a flag for each row; without flags they have failed, or were not found."""
        each = zip(rows, is_good or [False] * len(rows), strict=True)
        named = [row.content for row, is_well in each if is_well == (call.kind == "seek")]
        with self._lock:
            call.named += named
            call.num_settled += len(rows)
            if call.num_settled < len(call.rows):
                return
            self._update.done.append(call)
        self.wake()

    def add(
        self,
        contents: Sequence[Content],
        footers: Mapping[Content, bytes] = MappingProxyType({}),
        *,
        is_there: bool = True,
    ) -> None:
        if contents:
            with self._lock:
                self._update.changes.update(dict.fromkeys(contents, is_there))
                self._update.footers.update(footers)
            self.wake()

    def remove(self, contents: Sequence[Content]) -> None:
        self.add(contents, is_there=False)

    def clear(self) -> None:
        """All contents are gone: forget changes, which the owner knows to be void."""
        with self._lock:
            self.epoch += 1
            self._update.changes, self._update.footers = {}, {}

    def recovered(self) -> None:
        """The tier has added all contents from before its start."""
        self.is_recovering = False
        self.wake()

    def fail(self, reason: str, about: object = "", *, times: int = 1) -> None:
        if not times:
            return
        with self._lock:
            self._update.failures[reason] += times
            is_new = reason not in self.logged
            self.logged.add(reason)
        if is_new and reason in TEXTS:
            where = f"{self._where}: {about}" if about else self._where
            logger.warning(
                "offload, %s: %s (further ones are only counted, as %s)", where, TEXTS[reason], reason
            )
        self.wake()

    def take(self) -> TierUpdate:
        """Everything since the last call."""
        with self._lock:
            taken, self._update = self._update, TierUpdate()
        return taken

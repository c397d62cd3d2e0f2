"""What a tier below host memory is: it keeps rows by content, and gives them back or reports that it cannot.

A tier is a cache. Each failure in it is a miss and a counted reason; the tier never raises for that, never
gives back bytes that are not those which were written, and never keeps its caller waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvconnect.config import OffloadConfig

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


@dataclass(frozen=True)
class TierUpdate:
    """What became of a tier's jobs since it was last asked, and what changed. Every job comes once.

    ``written`` are, by job, the contents that are not kept, none as a rule: the rows' memory is not read any
    more. ``read`` are those that are not there, or not right: the rows' memory is not written any more.
    ``found`` are those that the tier has. ``added`` and ``removed`` are what an indexed tier has got, and has
    no more, none in both; ``footers`` those of what it had before its start, where it was to look for them.
    ``failures`` are reasons, with how often. While it ``is_recovering`` more is added of what it had.
    """

    written: Mapping[int, tuple[Content, ...]] = field(default_factory=dict)
    read: Mapping[int, tuple[Content, ...]] = field(default_factory=dict)
    found: Mapping[int, tuple[Content, ...]] = field(default_factory=dict)
    added: tuple[Content, ...] = ()
    removed: tuple[Content, ...] = ()
    footers: Mapping[Content, bytes] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    is_recovering: bool = False

    def __bool__(self) -> bool:
        return bool(self.written or self.read or self.found or self.added or self.removed or self.failures)


class LowerTier(Protocol):
    """A tier of one worker rank. One thread calls it; all its work is done on threads of its own.

    ``name`` is what orders and metrics call it. It is ``indexed`` if it reports what it has by ``added`` and
    ``removed``; if not, it must be asked by ``seek``. Jobs are numbers of the caller's choice; one of each
    kind may be used again once it was reported. To begin one that is under way raises ``LocalError``. A tier
    that can keep contents from making room has ``pin`` too: with group, hash, and whether it is pinned now.
    One that can tell any thread at once of each of some contents whether it is there has ``has``.
    """

    name: str
    indexed: bool

    def on_update(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on a thread of the tier, whenever ``poll`` has something to report."""
        ...

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

    def poll(self) -> TierUpdate:
        """What is new. Never waits."""
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

"""What a disk tier is told once, and how it names what goes wrong."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass

from kvconnect.config import OffloadConfig
from kvconnect.errors import ConfigError
from kvconnect.offload.disk.files import bytes_on_disk
from kvconnect.offload.disk.folder import OVERHEAD_BYTES

logger = logging.getLogger(__name__)

_LEAST_SEGMENTS = 4
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PERMISSION = (errno.EROFS, errno.EACCES, errno.EPERM)

DISK_FULL = "disk_full"
DISK_PAUSED = "disk_paused"
DISK_QUEUE_FULL = "disk_queue_full"
DISK_REFUSED = "disk_refused"
DISK_TOO_LARGE = "disk_too_large"
DISK_GONE = "disk_gone"


def reason_of(error: OSError) -> str:
    """What a failed system call is counted as."""
    if error.errno in _NO_ROOM:
        return DISK_FULL
    if error.errno in _NO_PERMISSION:
        return "disk_read_only"
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
        return DISK_GONE
    return "disk_held" if error.errno == errno.EBUSY else "disk_io"


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """Bounds of a disk tier.

    Attributes:
        limit_bytes: most bytes on the disk, of everything that the tier keeps there.
        segment_bytes: size of a segment.
        threads: threads that read, and one that writes.
        max_queued_bytes: most bytes of rows that wait to be written.
        retry_s: how long it leaves a disk alone that refused to be written, the first time and at most.
        second_chance: what part of a segment that makes room may be written again, because it was read.
    """

    limit_bytes: int
    segment_bytes: int
    threads: int = 4
    max_queued_bytes: int = 1 << 30
    retry_s: tuple[float, float] = (1.0, 60.0)
    second_chance: float = 0.25

    @property
    def segments_limit_bytes(self) -> int:
        """What all segments may take."""
        return self.limit_bytes - OVERHEAD_BYTES

    @property
    def capacity_bytes(self) -> int:
        """Bytes of records that a segment takes, as a rule: no more than lets a few be there."""
        overhead_bytes = bytes_on_disk(0)
        return max(min(self.segment_bytes, self.segments_limit_bytes // _LEAST_SEGMENTS - overhead_bytes), 1)

    @classmethod
    def of(cls, config: OffloadConfig) -> DiskOptions:
        """The disk's part of a configuration.

        Raises:
            ConfigError: a bound leaves no room for anything.
        """
        least_bytes = 2 * OVERHEAD_BYTES
        if config.disk_bytes < least_bytes:
            raise ConfigError(
                f"disk_bytes is {config.disk_bytes}; accepted: at least {least_bytes}, where disk_path is set"
            )
        return cls(
            limit_bytes=config.disk_bytes,
            segment_bytes=config.disk_segment_bytes,
            threads=max(1, config.disk_threads - 1),
            max_queued_bytes=config.max_queued_bytes,
        )


class Complaints:
    """Says once what goes wrong, and again only after it went well in between."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, reason: str, text: str) -> None:
        """Log it, unless it was already."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("%s", text)

    def ended(self, reason: str, text: str) -> None:
        """Log that it is over, if it was logged."""
        if reason in self._said:
            self._said.discard(reason)
            logger.info("%s", text)

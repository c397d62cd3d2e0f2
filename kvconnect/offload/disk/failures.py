"""What goes wrong on a disk: what it counts as, when it is logged, how long the disk is left alone."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

DISK_FULL = "disk_full"
DISK_GONE = "disk_gone"
DISK_PAUSED = "disk_paused"
DISK_QUEUE_FULL = "disk_queue_full"
DISK_REFUSED = "disk_refused"
DISK_TOO_LARGE = "disk_too_large"
DISK_TORN = "disk_torn"
DISK_TRUNCATED = "disk_truncated"

_REASONS = {
    errno.ENOSPC: DISK_FULL,
    errno.EDQUOT: DISK_FULL,
    errno.EFBIG: DISK_TOO_LARGE,
    errno.EROFS: "disk_read_only",
    errno.EACCES: "disk_read_only",
    errno.EPERM: "disk_read_only",
    errno.ENOENT: DISK_GONE,
    errno.ESTALE: DISK_GONE,
    errno.ENOTDIR: DISK_GONE,
    errno.EBUSY: "disk_held",
}


def reason_of(error: BaseException) -> str:
    """What an error is counted as."""
    if not isinstance(error, OSError):
        return "disk_internal"
    return _REASONS.get(error.errno or 0, "disk_io")


class LogOnce:
    """Logs what goes wrong once, and again only after it went well in between."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, reason: str, text: str) -> None:
        """Log it, unless it was already."""
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("%s", text)

    def ended(self, reason: str, text: str) -> None:
        """Log that it is over, if it was logged."""
        if reason in self._logged:
            self._logged.discard(reason)
            logger.info("%s", text)


class Pause:
    """How long a disk that refused to be written is left alone: twice as long each time, up to a limit.

    Args:
        retry_s: the first time, and at most.
        clock: seconds that only grow.
    """

    def __init__(self, retry_s: tuple[float, float], clock: Callable[[], float]) -> None:
        self._first_s, self._most_s = retry_s
        self._clock = clock
        self._length_s = self._until_s = 0.0
        self.reason = ""

    @property
    def is_on(self) -> bool:
        """Whether nothing shall be written now."""
        return self._until_s > self._clock()

    def begin(self, reason: str) -> None:
        """It refused, once more."""
        self._length_s = min(self._length_s * 2, self._most_s) if self._length_s else self._first_s
        self._until_s = self._clock() + self._length_s
        self.reason = reason

    def end(self) -> None:
        """It was written."""
        self._length_s = self._until_s = 0.0
        self.reason = ""

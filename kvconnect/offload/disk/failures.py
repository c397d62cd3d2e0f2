"""What goes wrong on a disk: what it counts as, and how long the disk is left alone."""

from __future__ import annotations

import errno
import time

from kvconnect.errors import ConfigError, LocalError

CLOSED = "disk_closed"
FULL = "disk_full"
GONE = "disk_gone"
INTERNAL = "disk_internal"
REFUSED = "disk_refused"
TOO_LARGE = "disk_too_large"

_REASONS = {
    errno.ECANCELED: CLOSED,
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: TOO_LARGE,
    errno.EROFS: "disk_read_only",
    errno.EACCES: "disk_read_only",
    errno.EPERM: "disk_read_only",
    errno.ENOENT: GONE,
    errno.ESTALE: GONE,
    errno.ENOTDIR: GONE,
}


def reason_of(error: Exception) -> str:
    """What an error is counted as."""
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, "disk_io")
    if isinstance(error, ConfigError):
        return "disk_held"
    return REFUSED if isinstance(error, LocalError) else INTERNAL


class Pause:
    """How long a disk that refused to be written is left alone: twice as long each time, up to a limit.

    Args:
        retry_s: the first time, and at most.
    """

    def __init__(self, retry_s: tuple[float, float]) -> None:
        self._first_s, self._most_s = retry_s
        self._length_s = self._until_s = 0.0
        self.reason = ""

    @property
    def is_on(self) -> bool:
        return self._until_s > time.monotonic()

    def begin(self, reason: str) -> None:
        """It refused, once more."""
        self._length_s = min(self._length_s * 2, self._most_s) if self._length_s else self._first_s
        self._until_s = time.monotonic() + self._length_s
        self.reason = reason

    def end(self) -> None:
        """It was written."""
        self._length_s, self.reason = 0.0, ""

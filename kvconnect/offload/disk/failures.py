"""What goes wrong on a disk, and what it counts as."""

from __future__ import annotations

import errno

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

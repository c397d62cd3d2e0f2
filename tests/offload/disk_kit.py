"""Disks that fail on command, and what a test looks at from outside."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.tier import DiskTier
from kvconnect.testing.tier_suite import HANG_S, TierDriver

NAMESPACE = "0123456789abcdef" * 4


class FaultyFiles(Files):
    """Raises what a test asks for: ``faults`` are errnos by the name of a call. ``room_bytes`` is what may
    still be written, None for any."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.room_bytes: int | None = None
        self.no_room = errno.ENOSPC
        self.calls: dict[str, int] = {}

    def _may_fail(self, call: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        if call in self.faults:
            raise OSError(self.faults[call], os.strerror(self.faults[call]))

    def open(self, folder, name, flags):
        self._may_fail("create" if flags & os.O_CREAT and ".kv" in name else "open")
        return super().open(folder, name, flags)

    def read(self, file, buffers, offset):
        self._may_fail("read")
        return super().read(file, buffers, offset)

    def write(self, file, buffers, offset):
        self._may_fail("write")
        if self.room_bytes is None:
            return super().write(file, buffers, offset)
        if not self.room_bytes:
            raise OSError(self.no_room, os.strerror(self.no_room))
        data = b"".join(bytes(buffer) for buffer in buffers)[: self.room_bytes]
        self.room_bytes -= len(data)
        return super().write(file, [data], offset)

    def rename(self, folder, name, new_name):
        self._may_fail("rename")
        super().rename(folder, name, new_name)

    def listing(self, folder):
        self._may_fail("listing")
        return super().listing(folder)

    def remove(self, folder, name):
        self._may_fail("remove")
        if self.room_bytes is not None and os.path.exists(f"/proc/self/fd/{folder}/{name}"):
            self.room_bytes += os.stat(name, dir_fd=folder).st_size
        super().remove(folder, name)


def open_tier(path: Path, limit_bytes: int = 8 << 20, *, rank=0, world_size=1, **settings) -> DiskTier:
    """A disk tier that has found what was there before."""
    namespace = settings.pop("namespace", NAMESPACE)
    tier = DiskTier(path, namespace, limit_bytes, owner=(rank, world_size), **settings)
    assert tier.wait_recovered(HANG_S)
    return tier


def open_driver(path: Path, *args, **settings) -> TierDriver:
    """The same, to be driven."""
    driver = TierDriver(open_tier(path, *args, **settings))
    driver.poll()
    return driver


def row_paths(tier: DiskTier) -> list[Path]:
    """The files of a tier's rows."""
    return sorted(tier.path.glob("*.kv"))


def wait_until(condition, what: str) -> None:
    """Until a condition holds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)

"""Disks that fail on command, and what a test looks at from outside."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvconnect.offload.disk.disk_tier import DiskTier
from kvconnect.offload.disk.folder import DiskFolder, FolderOwner, row_name
from tests.faults.disk import taken_bytes
from tests.offload.tier_suite import TierDriver, until

NAMESPACE = "0123456789abcdef" * 4


BUG = 0
"""Among the errnos of ``Faults``: an error of our own."""


class Faults:
    """What goes wrong in a folder: ``faults`` are errnos by the name of a call. ``room_bytes`` is what may
    still be written, None for any. Called, it opens a folder of ``folder_type``. ``most_bytes`` were taken by
    a folder after any write."""

    def __init__(self, folder_type=None) -> None:
        self.folder_type = folder_type or FaultyFolder
        self.faults: dict[str, int] = {}
        self.room_bytes: int | None = None
        self.most_bytes = 0

    def __call__(self, path, *, is_made=True):
        return self.folder_type(self, path, is_made=is_made)


class FaultyFolder(DiskFolder):
    """Raises what a test asks for."""

    def __init__(self, faults, path, *, is_made) -> None:
        self.faults = faults
        super().__init__(path, is_made=is_made)

    def _may_fail(self, call: str) -> None:
        error = self.faults.faults.get(call)
        if error is not None:
            raise OSError(error, os.strerror(error)) if error else RuntimeError("injected")

    def open(self, name, flags):
        self._may_fail("create" if flags & os.O_CREAT and ".kv" in name else "open")
        return super().open(name, flags)

    def read(self, file, buffers, offset):
        self._may_fail("read")
        return super().read(file, buffers, offset)

    def write(self, file, buffers, offset):
        faults = self.faults
        if faults.faults.get("write"):
            # A part of it is on the disk by then.
            super().write(file, [b"part"], offset)
        self._may_fail("write")
        if faults.room_bytes is None:
            written = super().write(file, buffers, offset)
            faults.most_bytes = max(faults.most_bytes, taken_bytes(self.path))
            return written
        if not faults.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = b"".join(bytes(buffer) for buffer in buffers)[: faults.room_bytes]
        faults.room_bytes -= len(data)
        return super().write(file, [data], offset)

    def rename(self, name, new_name):
        self._may_fail("rename")
        super().rename(name, new_name)

    def listing(self):
        self._may_fail("listing")
        return super().listing()

    def remove(self, name):
        self._may_fail("remove")
        if self.faults.room_bytes is not None and (self.path / name).exists():
            self.faults.room_bytes += (self.path / name).stat().st_size
        super().remove(name)


def open_tier(
    path: Path,
    limit_bytes: int = 8 << 20,
    *,
    namespace=NAMESPACE,
    rank=0,
    world_size=1,
    label="",
    model="",
    **settings,
) -> DiskTier:
    """A disk tier that has found what was there before."""
    tier = DiskTier(path, FolderOwner(namespace, rank, world_size, label, model), limit_bytes, **settings)
    until(lambda: not tier.state()["recovering"], "it does not recover")
    return tier


def open_driver(path: Path, *args, **settings) -> TierDriver:
    """The same, to be driven."""
    driver = TierDriver(open_tier(path, *args, **settings))
    driver.poll()
    return driver


def check(tier: DiskTier) -> None:
    """That what a tier knows of its rows agrees with itself."""
    catalog = tier._catalog
    with catalog._lock:
        assert not catalog._doomed.keys() & {row_name(content) for content in catalog._rows}
        kept_bytes = sum(catalog._rows.values())
        assert catalog.taken_bytes == kept_bytes + sum(catalog._doomed.values())


def row_paths(tier: DiskTier) -> list[Path]:
    """The files of a tier's rows."""
    return sorted(tier.path.glob("*.kv"))

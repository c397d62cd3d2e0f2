"""What former processes left beside our folder: folders of other namespaces that no process uses.

They count within the bound of the rank that took their place, and make room before anything else does: after
a change of the model a disk does not hold two caches.
"""

from __future__ import annotations

from pathlib import Path

from kvconnect.errors import ConfigError
from kvconnect.offload.disk.files import FileFacts, Files, bytes_on_disk
from kvconnect.offload.disk.folder import OVERHEAD_BYTES, DiskFolder, parse_folder_name

_LEAST_BYTES = 16 << 20
"""What is removed at once: to take a folder's lock for every row would take longer than to remove it."""


class Abandoned:
    """The folders beside ours that no process holds. One thread uses it.

    Args:
        ours: our own folder.
        files: how files are reached.
        rank: of this worker.
        world_size: how many workers there are: those of a rank beyond it are taken over too.
    """

    def __init__(self, ours: Path, files: Files, rank: int, world_size: int) -> None:
        self._files = files
        # By folder its rows, most recently used first.
        self._rows: dict[Path, list[FileFacts]] = {}
        self.length_bytes = 0
        try:
            beside = sorted(ours.parent.iterdir())
        except OSError:
            return
        for path in beside:
            parsed = parse_folder_name(path.name)
            if parsed is None or path == ours or parsed[1] % world_size != rank % world_size:
                continue
            folder = self._open(path)
            if folder is not None:
                try:
                    self._rows[path] = folder.listing()[::-1]
                    self.length_bytes += OVERHEAD_BYTES + sum(map(_taken_bytes, self._rows[path]))
                except OSError:
                    continue
                finally:
                    folder.close()

    def remove_oldest(self, length_bytes: int) -> bool:
        """Remove the rows of a folder that were used least recently, and the folder once it is empty; False
        if nothing is left.

        A folder that is used again, or cannot be removed, is left alone from now on.
        """
        if not self._rows:
            return False
        path = min(self._rows, key=lambda one: self._rows[one][-1].used_s if self._rows[one] else 0.0)
        folder, rows = self._open(path), self._rows[path]
        try:
            if folder is None:
                raise FileNotFoundError(path)
            end = self.length_bytes - max(length_bytes, _LEAST_BYTES)
            while rows and self.length_bytes > end:
                self._files.remove(folder.folder, rows[-1].name)
                self.length_bytes -= _taken_bytes(rows.pop())
            if not rows:
                folder.remove()
                self._forget(path)
        except OSError:
            self._forget(path)
        finally:
            if folder is not None:
                folder.close()
        return True

    def _forget(self, path: Path) -> None:
        self.length_bytes -= OVERHEAD_BYTES + sum(map(_taken_bytes, self._rows.pop(path)))

    def _open(self, path: Path) -> DiskFolder | None:
        try:
            return DiskFolder(path, self._files, is_made=False)
        except (OSError, ConfigError):
            return None


def _taken_bytes(facts: FileFacts) -> int:
    return bytes_on_disk(facts.length_bytes)

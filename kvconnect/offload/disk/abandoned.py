"""What former processes left in a tier's path: folders of other namespaces that nobody uses any more.

They count within the bound of the rank that took their place, and make room before anything else does: after
a change of the model a disk does not hold two caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvconnect.errors import ConfigError
from kvconnect.offload.disk.files import FileFacts, Files, bytes_on_disk
from kvconnect.offload.disk.folder import OVERHEAD_BYTES, DiskFolder, parse_folder_name


@dataclass(eq=False)
class _Left:
    path: Path
    segments: list[FileFacts]

    @property
    def length_bytes(self) -> int:
        return OVERHEAD_BYTES + sum(bytes_on_disk(facts.length_bytes) for facts in self.segments)


class Abandoned:
    """The folders beside ours that nobody holds. One thread uses it.

    Args:
        ours: our own folder.
        files: how files are reached.
        rank: of this worker.
        world_size: how many workers there are: those of a rank beyond it are taken over too.
    """

    def __init__(self, ours: Path, files: Files, rank: int, world_size: int) -> None:
        self._files = files
        self._left: list[_Left] = []
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
                    segments = [facts for _number, facts in folder.segments()]
                    self._left.append(_Left(path, segments))
                except OSError:
                    continue
                finally:
                    folder.close()

    @property
    def length_bytes(self) -> int:
        """What they take on the disk at most."""
        return sum(left.length_bytes for left in self._left)

    def remove_oldest(self) -> bool:
        """Remove the segment that was written first, or an empty folder; False if nothing is left.

        A folder that is used again, or cannot be removed, is left alone from now on.
        """
        if not self._left:
            return False
        left = min(self._left, key=lambda one: min((facts.modified_s for facts in one.segments), default=0.0))
        folder = self._open(left.path)
        try:
            if folder is None:
                self._left.remove(left)
            elif left.segments:
                oldest = min(left.segments, key=lambda facts: facts.modified_s)
                left.segments.remove(oldest)
                self._files.remove(folder.folder, oldest.name)
            else:
                self._left.remove(left)
                folder.remove()
        except FileNotFoundError:
            pass
        except OSError:
            if left in self._left:
                self._left.remove(left)
        finally:
            if folder is not None:
                folder.close()
        return True

    def _open(self, path: Path) -> DiskFolder | None:
        try:
            return DiskFolder(path, self._files, is_made=False)
        except (OSError, ConfigError):
            return None

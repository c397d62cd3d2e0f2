"""Which rows are on the disk and what they take: the state that a disk tier's threads share.

No file is touched here. Every call takes the lock once, for as long as it takes to look at its arguments,
but for what was there before a start, which may be millions of rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.disk.folder import UNFINISHED, RowFile, row_name
from kvconnect.offload.tier import Content

_ADOPTED_AT_ONCE = 1024
"""About a millisecond on the lock, for which questions wait."""


@dataclass(eq=False)
class KeptFile:
    """A row that was written: another one if it is written again."""

    disk_bytes: int


class Catalog:
    """Contents and what their files take, least recently used first. Changes are reported to a tracker.

    ``taken_bytes`` is what all files take at most; ``epoch`` is another number after every ``clear``. If it
    ``waits``, what was there before is reported when its footers are read.
    """

    def __init__(self, tracker: CompletionTracker, *, waits: bool = False) -> None:
        self.taken_bytes = self.epoch = 0
        self._waits = waits
        self._unreported: list[Content] = []
        self._tracker = tracker
        self._lock = threading.Lock()
        self._rows: OrderedDict[Content, KeptFile] = OrderedDict()
        self._pinned: set[Content] = set()
        # Files that are of no content any more, and still take room: by name how many bytes.
        self._doomed: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, contents: Sequence[Content], *, is_use: bool = False) -> list[KeptFile | None]:
        """Those of these that are there; if they are used, these make room last."""
        with self._lock:
            # The end of a sequence makes room before the beginning, without which it is useless.
            for content in reversed(contents) if is_use else ():
                if content in self._rows:
                    self._rows.move_to_end(content)
            return [self._rows.get(content) for content in contents]

    def begin(self, length_bytes: int) -> None:
        """A row is about to be written: from now on its file takes room, and belongs to no content."""
        with self._lock:
            self.taken_bytes += length_bytes - self._doomed.get(UNFINISHED, 0)
            self._doomed[UNFINISHED] = length_bytes

    def add(self, content: Content, epoch: int) -> None:
        """The row that was begun is whole; its file is to go if all was cleared since ``epoch``."""
        name = row_name(content)
        with self._lock:
            length_bytes = self._doomed.pop(UNFINISHED)
            # The file that had the name before is replaced.
            self.taken_bytes -= self._doomed.pop(name, 0)
            if epoch != self.epoch:
                self._doomed[name] = length_bytes
                return
            self._rows[content] = KeptFile(length_bytes)
            self._tracker.add([content])

    def adopt(self, files: Sequence[RowFile], epoch: int) -> None:
        """Files that were there before, least recently used first; all are to go if all was cleared since."""
        for first in range(0, len(files), _ADOPTED_AT_ONCE):
            some = files[first : first + _ADOPTED_AT_ONCE]
            rows = {file.content: KeptFile(file.disk_bytes) for file in some if file.content is not None}
            with self._lock:
                rows = rows if epoch == self.epoch else {}
                self.taken_bytes += sum(file.disk_bytes for file in some)
                self._doomed.update((file.name, file.disk_bytes) for file in some if file.content not in rows)
                self._rows.update(rows)
                if self._waits:
                    self._unreported += rows
                else:
                    self._tracker.add(list(rows))

    def unreported(self, most: int) -> list[Content]:
        """The next of what was there before and was not reported: once, and most recently used first."""
        with self._lock:
            taken = self._unreported[-most:]
            del self._unreported[-most:]
        return taken[::-1]

    def report(self, footers: Mapping[Content, bytes]) -> None:
        """Report contents that were there before, with what they stand for, unless they are gone."""
        with self._lock:
            self._tracker.add([content for content in footers if content in self._rows], footers)

    def confirm(self, contents: Sequence[Content]) -> None:
        """Report those that are there anew: where another rank missed one, it is dropped for all of them."""
        with self._lock:
            self._tracker.add([content for content in contents if content in self._rows])

    def forget(self, missing: Sequence[Content], wrong: Mapping[Content, KeptFile]) -> None:
        """Report contents that are not there, or whose rows are wrong, unless they were written again."""
        with self._lock:
            for content, kept in wrong.items():
                if self._rows.get(content) is kept:
                    self._doom(content)
            self._tracker.remove([content for content in missing if content not in self._rows])

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        """Contents that are pinned make no room from now on, there or not; the others may again."""
        with self._lock:
            self._pinned.update((group, hash_) for group, hash_, is_pinned in pins if is_pinned)
            self._pinned.difference_update(
                (group, hash_) for group, hash_, is_pinned in pins if not is_pinned
            )

    def doom_oldest(self, length_bytes: int) -> bool:
        """Forget what was used least recently, so many bytes; its files go next. False: nothing may go."""
        doomed = []
        with self._lock:
            for _ in range(len(self._rows)):
                if length_bytes <= 0:
                    break
                oldest = next(iter(self._rows))
                if oldest in self._pinned:
                    # Not looked at again before the others were.
                    self._rows.move_to_end(oldest)
                    continue
                doomed.append(oldest)
                length_bytes -= self._rows[oldest].disk_bytes
                self._doom(oldest)
            self._tracker.remove(doomed)
        return bool(doomed)

    def _doom(self, content: Content) -> None:
        self._doomed[row_name(content)] = self._rows.pop(content).disk_bytes

    def doomed(self) -> list[str]:
        """The files that are to go."""
        with self._lock:
            return list(self._doomed)

    def gone(self, name: str) -> None:
        """A doomed file takes no room any more."""
        with self._lock:
            self.taken_bytes -= self._doomed.pop(name, 0)

    def clear(self) -> None:
        """Forget everything: all files are to go."""
        with self._lock:
            self.epoch += 1
            self._doomed.update((row_name(content), kept.disk_bytes) for content, kept in self._rows.items())
            self._rows = OrderedDict()
            self._pinned = set()
            self._unreported = []
            self._tracker.forget_changes()

    def lose(self) -> None:
        """All files are gone."""
        with self._lock:
            self._tracker.remove(list(self._rows))
            self._rows.clear()
            self._doomed.clear()
            self.taken_bytes = 0

"""Which rows are on the disk and what they take: the state that a disk tier's threads share.

No file is touched here. Every call takes the lock once, for as long as it takes to look at its arguments.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvconnect.offload.tier import Content


class Row:
    """A row's file, and what it takes on the disk at most."""

    __slots__ = ("length_bytes", "name")

    def __init__(self, name: str, length_bytes: int) -> None:
        self.name = name
        self.length_bytes = length_bytes


class Catalog:
    """Contents by their files, least recently used first.

    Args:
        on_change: called when there is something for ``take_changes`` to tell.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._rows: OrderedDict[Content, Row] = OrderedDict()
        # Files that are of no content any more, and still take room: by name how many bytes.
        self._doomed: dict[str, int] = {}
        self._changes: dict[Content, bool] = {}
        self._taken_bytes = 0
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """Another number after every ``clear``."""
        return self._epoch

    @property
    def taken_bytes(self) -> int:
        """What all files take at most."""
        return self._taken_bytes

    def has(self, contents: Sequence[Content]) -> list[bool]:
        """Which of these are there."""
        with self._lock:
            return [content in self._rows for content in contents]

    def use(self, contents: Sequence[Content]) -> list[Row | None]:
        """The rows of these, None for those that are not there. They make room last."""
        with self._lock:
            found = [self._rows.get(content) for content in contents]
            # Of a sequence the end makes room before the beginning, without which it is of no use.
            for content, row in zip(reversed(contents), reversed(found), strict=True):
                if row is not None:
                    self._rows.move_to_end(content)
        return found

    def begin(self, name: str, length_bytes: int) -> None:
        """A file is about to be made: from now on it takes room, and is of no content."""
        with self._lock:
            self._taken_bytes += length_bytes - self._doomed.get(name, 0)
            self._doomed[name] = length_bytes

    def add(self, content: Content, row: Row, epoch: int, unfinished_name: str = "") -> bool:
        """A content is in a file, which was ``unfinished_name`` before; not if all was cleared meanwhile."""
        with self._lock:
            length_bytes = self._doomed.pop(unfinished_name, 0)
            replaced = self._doomed.pop(row.name, 0)
            self._taken_bytes += row.length_bytes - length_bytes - replaced
            if epoch != self._epoch:
                self._doomed[row.name] = row.length_bytes
                return False
            self._rows[content] = row
            self._changes[content] = True
        self._on_change()
        return True

    def adopt(self, rows: Sequence[tuple[Content, Row]], epoch: int) -> None:
        """Files that were there before, least recently used first; to go, if all was cleared since."""
        with self._lock:
            self._taken_bytes += sum(row.length_bytes for _content, row in rows)
            if epoch == self._epoch:
                self._rows.update(rows)
                self._changes.update((content, True) for content, _row in rows)
            else:
                self._doomed.update((row.name, row.length_bytes) for _content, row in rows)
        self._on_change()

    def drop(self, wrong: Iterable[tuple[Content, Row]]) -> None:
        """Forget contents whose rows are not right, unless they were written again by now."""
        with self._lock:
            for content, row in wrong:
                if self._rows.get(content) is row:
                    self._forget(content)
        self._on_change()

    def _forget(self, content: Content) -> None:
        row = self._rows.pop(content)
        self._doomed[row.name] = row.length_bytes
        self._changes[content] = False

    def doom_oldest(self) -> bool:
        """Forget what was used least recently; its file goes next. False if nothing is there."""
        with self._lock:
            if not self._rows:
                return False
            self._forget(next(iter(self._rows)))
        self._on_change()
        return True

    def doomed(self) -> list[str]:
        """The files that are to go."""
        with self._lock:
            return list(self._doomed)

    def gone(self, name: str) -> None:
        """A doomed file takes no room any more."""
        with self._lock:
            self._taken_bytes -= self._doomed.pop(name, 0)

    def deny(self, contents: Iterable[Content]) -> None:
        """Report contents as removed that are not there, though a read of them was ordered."""
        with self._lock:
            for content in contents:
                if content not in self._rows:
                    self._changes[content] = False
        self._on_change()

    def take_changes(self) -> tuple[tuple[Content, ...], tuple[Content, ...]]:
        """What is there that was not, and what is not there any more, since the last call."""
        with self._lock:
            changes, self._changes = self._changes, {}
        added = tuple(content for content, is_there in changes.items() if is_there)
        return added, tuple(content for content, is_there in changes.items() if not is_there)

    def clear(self) -> None:
        """Forget everything: all files are to go."""
        with self._lock:
            self._epoch += 1
            self._doomed.update((row.name, row.length_bytes) for row in self._rows.values())
            self._rows, self._changes = OrderedDict(), {}

    def lose(self) -> None:
        """All files are gone."""
        with self._lock:
            self._changes.update(dict.fromkeys(self._rows, False))
            self._rows.clear()
            self._doomed.clear()
            self._taken_bytes = 0
        self._on_change()

    def check(self) -> None:
        """For tests: that all of this agrees with itself."""
        with self._lock:
            assert not self._doomed.keys() & {row.name for row in self._rows.values()}
            total = sum(row.length_bytes for row in self._rows.values()) + sum(self._doomed.values())
            assert self._taken_bytes == total

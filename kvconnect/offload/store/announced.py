"""What of a store this rank has announced: the store itself never reports what it has."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.tier import Content

MOST = 1 << 17
"""Of more, those that were used least recently are taken back: a router then knows less than there is."""


class Announced(CompletionTracker):
    """Reports as changes the ``most`` contents that were written or read last; with 0, none."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._seen_lock = threading.Lock()
        self._seen: OrderedDict[Content, None] = OrderedDict()

    def there(self, contents: Iterable[Content]) -> None:
        """The store has these, known ones too: where another rank missed one, it is known no more."""
        if not self.most:
            return
        with self._seen_lock:
            there = list(contents)
            for content in there:
                self._seen[content] = None
                self._seen.move_to_end(content)
            self.add(there)
            over = max(0, len(self._seen) - self.most)
            self.remove([self._seen.popitem(last=False)[0] for _ in range(over)])

    def gone(self, contents: Iterable[Content]) -> None:
        """The store was asked for these, and has them not."""
        with self._seen_lock:
            known = [content for content in contents if content in self._seen]
            for content in known:
                del self._seen[content]
            self.remove(known)

    def lost(self, reason: str) -> None:
        """The store cannot be reached: nothing of it can be had."""
        with self._seen_lock:
            self.remove(list(self._seen))
            self._seen.clear()
        self.fail(reason)

    def forget_changes(self) -> None:
        """All was cleared, as the owner knows."""
        with self._seen_lock:
            super().forget_changes()
            self._seen.clear()

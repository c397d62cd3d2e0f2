"""A cache of NIXL transfers of one copy, to be posted again from the same slot to the same slot.

To make a transfer costs NIXL several times what it takes to post it, and slots are used in turn. Owns the
transfers that are idle; one that is under way belongs to its batch, and is put back only if it succeeded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

_MAX_IDLE = 256


class Copy(NamedTuple):
    """What a transfer of one copy was made from."""

    agent: str
    source: int
    target: int
    length: int


class TransferCache:
    """Idle transfers by what they were made from; the least recently used one is evicted.

    Args:
        release: gives a transfer back to the library.
    """

    def __init__(self, release: Callable[[Any], None]) -> None:
        self._release = release
        self._idle: OrderedDict[Copy, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, copy: Copy) -> Any | None:
        """An idle transfer of this copy; None if there is none, or another batch has it."""
        return self._idle.pop(copy, None)

    def put(self, copy: Copy, handle: Any) -> None:
        """A transfer has succeeded, and can be posted again."""
        former = self._idle.pop(copy, None)
        self._idle[copy] = handle
        if former is not None:
            self._release(former)
        elif len(self._idle) > _MAX_IDLE:
            self._release(self._idle.popitem(last=False)[1])

    def drop(self, agent: str | None = None) -> None:
        """Release those to one agent, or all: what they were made from has changed."""
        for copy in [copy for copy in self._idle if agent in (None, copy.agent)]:
            self._release(self._idle.pop(copy))

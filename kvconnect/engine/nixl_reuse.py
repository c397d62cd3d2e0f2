"""Transfers of one copy that are kept to be posted again: from the same slot to the same slot.

To make a transfer costs NIXL several times what it takes to post it, and slots come again and again. Owns
the transfers that are idle; one that is under way is its batch's, and comes back only if all went well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvconnect.engine.base import Batch, Verb

_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a transfer of one copy is: all that it was made from."""

    agent: str
    verb: Verb
    local: int
    remote: int
    length: int


class KeptTransfers:
    """Idle transfers, each of which can be posted once it is taken.

    Args:
        release: gives a transfer back to the library.
    """

    def __init__(self, release: Callable[[Any], None]) -> None:
        self._release = release
        self._idle: OrderedDict[Stretch, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, stretch: Stretch) -> Any | None:
        """An idle transfer of this stretch; None if there is none, or another batch has it."""
        return self._idle.pop(stretch, None)

    def keep(self, stretch: Stretch, handle: Any) -> None:
        """A transfer has ended well, and can be posted again. The one unused longest may have to go."""
        before = self._idle.pop(stretch, None)
        self._idle[stretch] = handle
        if before is not None:
            self._release(before)
        elif len(self._idle) > _MOST_KEPT:
            self._release(self._idle.popitem(last=False)[1])

    def drop(self, agent: str | None = None) -> None:
        """Release those to one agent, or all: what they were made from is no longer so."""
        gone = [stretch for stretch in self._idle if agent in (None, stretch.agent)]
        for stretch in gone:
            self._release(self._idle.pop(stretch))


def stretch_of(batch: Batch, agent: str) -> Stretch | None:
    """The stretch of a batch that is one copy; None for others."""
    if len(batch.length) != 1:
        return None
    local, remote, length = (int(column[0]) for column in (batch.local, batch.remote, batch.length))
    return Stretch(agent, batch.verb, local, remote, length)

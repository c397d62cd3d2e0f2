"""Memory that copies pass through: a ring of spans, each with what must be done before it is used again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvconnect.errors import LocalError

# A restore is a row of short pieces, of which one is unpacked while the next arrive.
_RESTORE_SPANS = 4
_MOST_RESTORE_BYTES = 128 << 20

LEAST_STAGING_BYTES = 1 << 20
_LEAST_FITTED_BYTES = 16 << 20

Fence = TypeVar("Fence")


def fitted_staging(wanted_bytes: int, spare: int | None) -> int:
    """As much staging memory as ``spare`` bytes of the device hold, and what copies cannot do without."""
    return wanted_bytes if spare is None else min(wanted_bytes, max(spare, _LEAST_FITTED_BYTES))


class Ring(Generic[Fence]):
    """Spans of ``length_bytes`` from ``address`` on, given out in turn.

    A span is taken, used, and sealed with a fence: the event after which nobody uses it.
    """

    def __init__(self, address: int, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._address = address
        self._next = 0
        self._sealed: deque[tuple[int, int, Fence]] = deque()
        self._open: tuple[int, int] | None = None

    def take(self, length_bytes: int) -> tuple[int, Fence | None]:
        """The address of a span, and the fence that must be passed before it is used; None for none.

        Fences are passed in the order in which spans were sealed.

        Raises:
            LocalError: the span is longer than the ring, or the last one was not sealed.
        """
        if length_bytes > self.length_bytes:
            raise LocalError(f"a span has {length_bytes} bytes; accepted: up to {self.length_bytes}")
        if self._open is not None:
            raise LocalError("a span was taken before the last one was sealed")
        start = self._next if self._next + length_bytes <= self.length_bytes else 0
        self._open = start, start + length_bytes
        self._next = start + length_bytes
        fence: Fence | None = None
        # The oldest come first, so that whatever lies in the way is at the front; a fence stands for those
        # before it as well.
        in_the_way = [begin < start + length_bytes and start < end for begin, end, _ in self._sealed]
        last = max((index for index, hit in enumerate(in_the_way) if hit), default=-1)
        for _ in range(last + 1):
            fence = self._sealed.popleft()[2]
        return self._address + start, fence

    def seal(self, fence: Fence) -> None:
        """Nobody uses the span that was taken last once this fence is passed."""
        if self._open is not None:
            self._sealed.append((*self._open, fence))
            self._open = None


@dataclass(frozen=True)
class Staging:
    """Memory of the device for copies under way: ``out_bytes`` from ``address`` on, then ``back_bytes``."""

    address: int
    out_bytes: int
    back_bytes: int

    @classmethod
    def divide(cls, address: int, length_bytes: int) -> Staging:
        """Give a restore what keeps it going, and snapshots, which come at once, all of the rest."""
        back_bytes = min(length_bytes // 2, _MOST_RESTORE_BYTES) // 256 * 256
        return cls(address, (length_bytes - back_bytes) // 256 * 256, back_bytes)

    @property
    def part_bytes(self) -> int:
        """Rows that are longer than this travel in parts."""
        return self.back_bytes // _RESTORE_SPANS

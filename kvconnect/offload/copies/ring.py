"""Memory that copies pass through: a ring of spans, each with what must be done before it is used again."""

from __future__ import annotations

from collections import deque

from kvconnect.errors import LocalError
from kvconnect.offload.copies.streams import CudaEvent


class Ring:
    """Spans of ``length_bytes`` from ``address`` on, given out in turn.

    A span is taken, used, and sealed with a fence: the event after which nothing uses it, or None.
    """

    def __init__(self, address: int, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._address = address
        self._next = 0
        self._sealed: deque[tuple[int, int, CudaEvent | None]] = deque()
        self._open: tuple[int, int] | None = None

    def take(self, length_bytes: int) -> tuple[int, CudaEvent | None]:
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
        fence: CudaEvent | None = None
        # The oldest come first, so that what lies in the way is at the front; a fence stands for those
        # before it as well.
        in_the_way = [begin < start + length_bytes and start < end for begin, end, _ in self._sealed]
        last = max((index for index, hit in enumerate(in_the_way) if hit), default=-1)
        for _ in range(last + 1):
            fence = self._sealed.popleft()[2]
        return self._address + start, fence

    def seal(self, fence: CudaEvent | None) -> None:
        """Nothing uses the span that was taken last once this fence is passed."""
        if self._open is not None:
            self._sealed.append((*self._open, fence))
            self._open = None

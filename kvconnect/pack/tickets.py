"""How the host learns that kernels are done, and what their digests are.

Kernels of one stream add to one sum that is never set back. After each, the sum is copied to a place in
pinned memory; a digest is the difference of two such values. So no program of a kernel waits for another.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from kvconnect.errors import LocalError

_PLACES = 256


class Tickets:
    """Tickets of one stream, which is current at each call; None on a CPU. Kernels add to ``sums``."""

    def __init__(self, sums: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._on_cuda = sums.is_cuda
        self._stream = stream
        self._places = torch.zeros(_PLACES, dtype=torch.int64, pin_memory=self._on_cuda)
        self._values = self._places.numpy()
        # Views that are made once: they cost as much as the copy from one to the other.
        self._sum = sums[0]
        self._each_place = list(self._places.unbind())
        self._events = [torch.cuda.Event() for _ in range(_PLACES if self._on_cuda else 0)]  # type: ignore[no-untyped-call]
        self._issued = 0
        self._pending: deque[KernelTicket] = deque()
        self._last_value = 0

    def check_room(self) -> None:
        """There is a place that no ticket will read any more.

        Raises:
            LocalError: there is none.
        """
        if len(self._pending) == _PLACES:
            if not self._pending[0].done:
                raise LocalError(f"{_PLACES} packs and unpacks are under way; accepted: fewer")
            self.settle(self._pending[0])

    def issue(self, with_digest: bool, reads: object) -> KernelTicket:
        """A ticket of what was launched just now. It keeps ``reads``, which owns what the kernel reads."""
        place = self._issued % _PLACES
        self._issued += 1
        if with_digest:
            self._each_place[place].copy_(self._sum, non_blocking=True)
        event: Any = None
        if self._on_cuda:
            # The ticket that had this place before is settled, and asks its event no more.
            event = self._events[place]
            event.record(self._stream)
        ticket = KernelTicket(self, place, event, with_digest, reads)
        self._pending.append(ticket)
        return ticket

    def settle(self, ticket: KernelTicket) -> None:
        """Read the digests up to this ticket's, which is done."""
        while not ticket.settled:
            oldest = self._pending.popleft()
            if oldest.with_digest:
                value = int(self._values[oldest.place])
                oldest.settle((value - self._last_value) % 2**64)
                self._last_value = value
            else:
                oldest.settle(None)


class KernelTicket:
    """A launched pack or unpack. See ``PackTicket``."""

    def __init__(self, tickets: Tickets, place: int, event: Any, with_digest: bool, reads: object) -> None:
        self.place = place
        self.with_digest = with_digest
        self.settled = False
        self._tickets = tickets
        self._event = event
        # What the kernel reads must not be given to others before that.
        self._reads: object = reads
        self._digest: int | None = None

    def settle(self, digest: int | None) -> None:
        """It is done, and this is its digest."""
        self.settled, self._digest, self._reads = True, digest, None

    @property
    def done(self) -> bool:
        """See ``PackTicket``."""
        return self.settled or self._event is None or bool(self._event.query())

    @property
    def digest(self) -> int | None:
        """See ``PackTicket``."""
        if not self.done:
            raise LocalError("the digest of a pack or unpack is not known before it is done")
        self._tickets.settle(self)
        return self._digest

    def wait(self) -> None:
        """See ``PackTicket``."""
        if not self.done:
            self._event.synchronize()

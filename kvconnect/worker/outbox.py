"""What a sending has to give to the engine: pages as they lie, or slots that it packs them into.

Two outboxes with one face. The sender above knows batches and bounds, and not which of the two it feeds.
Owned by the transfer thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvconnect.engine.base import Addresses, Completion
from kvconnect.errors import KVConnectError
from kvconnect.pack.packer import Packer, PackTicket
from kvconnect.peer.messages import Grant
from kvconnect.plan.transfer import Plan
from kvconnect.worker.slots import Slot, SlotEvent, SlotPool
from kvconnect.worker.supply import Supply

Columns = tuple[Addresses, Addresses, Addresses]


@dataclass(frozen=True)
class Arrived:
    """A chunk that lies in its landing slot."""

    chunk: int
    generation: int
    length_bytes: int
    digest: int | None


class Outbox(Protocol):
    """Batches of one sending. ``path`` is what it is called in metrics."""

    path: str

    @property
    def exhausted(self) -> bool:
        """Every batch was submitted."""
        ...

    @property
    def busy(self) -> bool:
        """Kernels of ours read the blocks, or slots are held."""
        ...

    @property
    def goes_on(self) -> bool:
        """It can be advanced, or will be able to, without anybody telling us."""
        ...

    @property
    def copies(self) -> int:
        """Copies that the engine is asked for in all."""
        ...

    def advance(self, stopping: bool) -> str:
        """Prepare batches; if ``stopping``, give up what is not submitted. An error, or nothing."""
        ...

    def peek(self) -> Columns | None:
        """The batch that can be submitted next, as source, target and length; None if none can now."""
        ...

    def submitted(self, batch_id: int) -> None:
        """That batch was given to the engine."""
        ...

    def ended(self, completion: Completion) -> Arrived | None:
        """The engine is done with a batch. The chunk that has arrived by it, if it is one."""
        ...


class PageOutbox:
    """The direct path: a plan, cut into batches."""

    path = "direct"

    def __init__(self, plan: Plan, max_copies: int, max_bytes: int) -> None:
        self.copies = plan.copies
        self.busy = False
        self.goes_on = True
        self._batches: Iterator[Columns] = plan.batches(max_copies, max_bytes)
        self._next = next(self._batches, None)

    @property
    def exhausted(self) -> bool:
        """See ``Outbox``."""
        return self._next is None

    def advance(self, stopping: bool) -> str:
        """See ``Outbox``."""
        return ""

    def peek(self) -> Columns | None:
        """See ``Outbox``."""
        return self._next

    def submitted(self, batch_id: int) -> None:
        """See ``Outbox``."""
        self._next = next(self._batches, None)

    def ended(self, completion: Completion) -> Arrived | None:
        """See ``Outbox``."""
        return None


@dataclass(eq=False)
class _Parcel:
    """A chunk in a send slot, on its way to a landing slot."""

    chunk: int
    slot: Slot
    grant: Grant
    ticket: PackTicket
    length_bytes: int

    def columns(self) -> Columns:
        numbers = np.array((self.slot.address, self.grant.address, self.length_bytes), dtype=np.int64)
        return numbers[:1], numbers[1:2], numbers[2:]


class SlotOutbox:
    """The packed path: chunks, packed into send slots as places to land are granted.

    Args:
        packer: made for the peer.
        supply: the chunks.
        grants: landing slots to begin with.
        pool: our send slots.
        with_digest: whether chunks are sent with a digest.
        holder: who is sent to, who may not take all of the send slots.
    """

    path = "packed"

    def __init__(
        self,
        packer: Packer,
        supply: Supply,
        grants: Sequence[Grant],
        pool: SlotPool,
        with_digest: bool,
        holder: str,
    ) -> None:
        self.copies = supply.count
        self._packer = packer
        self._supply = supply
        self._grants: deque[Grant] = deque()
        self._pool = pool
        self._holder = holder
        self._with_digest = with_digest
        self._kernels: deque[_Parcel] = deque()
        self._filled: deque[_Parcel] = deque()
        self._in_flight: dict[int, _Parcel] = {}
        self._lost: list[tuple[Slot, int]] = []
        self.unneeded = self.grant(grants)

    def grant(self, grants: Sequence[Grant]) -> Sequence[Grant]:
        """The peer lends more slots. Those for which no chunk can be packed yet are returned, not kept."""
        taken = self._supply.count - self._supply.left
        wanted = max(0, self._supply.due - taken - len(self._grants))
        self._grants.extend(grants[:wanted])
        return grants[wanted:]

    @property
    def due(self) -> int:
        """How many chunks, in all, can be packed by now."""
        return self._supply.due

    def take_lost(self) -> list[tuple[Slot, int]]:
        """Send slots that the engine may still read, each with the generation of the landing slot that it
        may still write. Each is given out once, to be kept unused.
        """
        lost, self._lost = self._lost, []
        return lost

    @property
    def exhausted(self) -> bool:
        """See ``Outbox``."""
        return self._supply.is_over and not self._kernels and not self._filled

    @property
    def busy(self) -> bool:
        """See ``Outbox``."""
        return bool(self._kernels or self._filled)

    @property
    def goes_on(self) -> bool:
        """See ``Outbox``."""
        if self._kernels or self._filled:
            return True
        # Without a grant it waits for the device, whose end wakes no thread, or for the peer's message.
        return self._supply.is_due and (bool(self._grants) or not self._supply.has_next)

    def advance(self, stopping: bool) -> str:
        """See ``Outbox``."""
        while self._kernels and self._kernels[0].ticket.done:
            self._filled.append(self._kernels.popleft())
        if stopping:
            for parcel in self._filled:
                self._pool.move(parcel.slot, SlotEvent.RETURN)
            self._filled.clear()
            return ""
        error = ""
        # A send slot is taken only together with a place to land: no sending waits while holding one.
        while not error and self._grants and self._supply.has_next and self._pool.room_for(self._holder) > 0:
            error = self._pack_next()
        return error

    def _pack_next(self) -> str:
        grant = self._grants.popleft()
        try:
            chunk, staged = self._supply.take()
        except Exception as error:
            return _cannot_pack(error)
        if grant.length_bytes < staged.total_bytes:
            return (
                f"chunk {chunk} has {staged.total_bytes} bytes, the slot that was granted "
                f"has {grant.length_bytes}"
            )
        slot = self._pool.take(SlotEvent.PACK, self._holder)
        try:
            ticket = self._packer.pack(slot.address, staged, grant.generation if self._with_digest else None)
        except Exception as error:
            self._pool.move(slot, SlotEvent.RETURN)
            return _cannot_pack(error)
        self._kernels.append(_Parcel(chunk, slot, grant, ticket, staged.total_bytes))
        return ""

    def peek(self) -> Columns | None:
        """See ``Outbox``."""
        return self._filled[0].columns() if self._filled else None

    def submitted(self, batch_id: int) -> None:
        """See ``Outbox``."""
        parcel = self._filled.popleft()
        self._pool.move(parcel.slot, SlotEvent.SUBMIT)
        self._in_flight[batch_id] = parcel

    def ended(self, completion: Completion) -> Arrived | None:
        """See ``Outbox``."""
        parcel = self._in_flight.pop(completion.batch_id)
        if not completion.quiet:
            self._pool.move(parcel.slot, SlotEvent.LOSE)
            self._lost.append((parcel.slot, parcel.grant.generation))
            return None
        self._pool.move(parcel.slot, SlotEvent.RETURN)
        if not completion.ok:
            return None
        return Arrived(parcel.chunk, parcel.grant.generation, parcel.length_bytes, parcel.ticket.digest)


def _cannot_pack(error: Exception) -> str:
    """Whatever it is, a device out of memory included, only this request is lost by it."""
    what = str(error) if isinstance(error, KVConnectError) else f"{type(error).__name__}: {error}"
    return f"a chunk cannot be packed: {what}"

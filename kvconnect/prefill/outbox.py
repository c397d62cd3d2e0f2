"""What a sending has to give to the engine: slots that it packs pages into, or scratch memory as it lies.

Two outboxes with one face. The sender above knows batches and bounds, and not which of the two it feeds.
Owned by the transfer thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.engine.base import Addresses, Completion
from kvconnect.errors import PeerError
from kvconnect.pack.batches import PackTicket
from kvconnect.pack.packer import Packer
from kvconnect.pack.shared_memory import MappedMemory
from kvconnect.peer.messages import Grant
from kvconnect.prefill.supply import ChunkSupply
from kvconnect.timeline import Moment
from kvconnect.transfer.slots import Slot, SlotEvent, SlotPool

_MOST_IN_TURN = 4
"""Chunks that this thread packs into landing slots before it looks at anything else: some milliseconds."""

Columns = tuple[Addresses, Addresses, Addresses]
"""Of a batch: source, target and length."""


class BatchOutbox:
    """Batches that are ready as they are: of scratch memory, to see how fast a link is."""

    is_alone = False
    is_packing = False
    goes_on = True

    def __init__(self, batches: Iterator[Columns], copies: int) -> None:
        self.copies = copies
        self._batches = batches
        self._next = next(batches, None)

    @property
    def exhausted(self) -> bool:
        """Every batch was submitted."""
        return self._next is None

    def advance(self, stopping: bool) -> Iterator[Parcel]:
        """Batches are ready as they are."""
        return iter(())

    def peek(self) -> Columns | None:
        """The batch that can be submitted next, None if none can now."""
        return self._next

    def submitted(self, batch_id: int) -> None:
        """That batch was given to the engine."""
        self._next = next(self._batches, None)

    def ended(self, completion: Completion) -> Parcel | None:
        """The engine is done with a batch, which was no parcel."""
        return None


@dataclass(eq=False)
class Parcel:
    """A chunk in a send slot, on its way to a landing slot; or packed into that in ``seconds``."""

    chunk: int
    slot: Slot | None
    grant: Grant
    ticket: PackTicket
    length_bytes: int
    seconds: float = 0.0

    def columns(self) -> Columns:
        """Its batch."""
        assert self.slot is not None, "what is packed into a landing slot is no batch"
        numbers = np.array((self.slot.address, self.grant.address, self.length_bytes), dtype=np.int64)
        return numbers[:1], numbers[1:2], numbers[2:]


class SlotOutbox:
    """Chunks, packed into send slots as landing slots are granted, or into these themselves.

    Args:
        pool: our send slots.
        mapped: the peer's landing slots, where they can be written as memory of this process.
        with_digest: whether chunks are sent with a digest.
        holder: the peer that is sent to, which may not take all of the send slots.
        note: called with what happens to a chunk, and its number.
    """

    is_alone = False

    def __init__(
        self,
        packer: Packer,
        supply: ChunkSupply,
        pool: SlotPool,
        with_digest: bool,
        holder: str,
        note: Callable[[str, int], None],
        mapped: MappedMemory | None = None,
    ) -> None:
        self.copies = supply.count
        self._packer = packer
        self._supply = supply
        self._grants: list[Grant] = []
        self._pool = pool
        self._holder = holder
        self._with_digest = with_digest
        self._note = note
        self._kernels: deque[Parcel] = deque()
        self._filled: deque[Parcel] = deque()
        self._mapped = mapped
        self._in_flight: dict[int, Parcel] = {}

    def grant(self, grants: Sequence[Grant]) -> Sequence[Grant]:
        """The peer lends more slots. Those for which no chunk can be packed yet are returned, not kept."""
        wanted = max(0, self._supply.due - self._supply.taken - len(self._grants))
        self._grants.extend(grants[:wanted])
        return grants[wanted:]

    @property
    def due(self) -> int:
        """How many chunks, in all, can be packed by now."""
        return self._supply.due

    @property
    def exhausted(self) -> bool:
        """Every chunk was taken to be packed."""
        return self._supply.is_over

    @property
    def is_packing(self) -> bool:
        """Kernels of ours read the blocks, or slots are filled that were not submitted."""
        return bool(self._kernels or self._filled)

    @property
    def goes_on(self) -> bool:
        """It can be advanced, or will be able to, without a message or a completion."""
        if self.is_packing:
            return True
        # Without a grant it waits for the device, whose end wakes no thread, or for the peer's message.
        return self._supply.is_due and (bool(self._grants) or not self._supply.has_next)

    def advance(self, stopping: bool) -> Iterator[Parcel]:
        """Pack what can be packed; if ``stopping``, give up what is not submitted.

        Yields the chunks that lie in their landing slots by that, each before the next one is packed.

        Raises:
            PeerError: a slot that was granted is too small for its chunk.
        """
        yield from self._take_packed()
        if stopping:
            for parcel in self._filled:
                self._move(parcel, SlotEvent.RETURN)
            self._filled.clear()
            return
        most = self._supply.taken + _MOST_IN_TURN
        # A send slot is taken only together with a landing slot: no sending waits while holding one.
        while self._grants and self._supply.has_next and self._has_room:
            if self._packer.is_blocking and (self._filled or self._supply.taken == most):
                # This thread packs: what it has packed is to be on its way before it packs more.
                break
            self._pack_next()
            if self._packer.is_blocking:
                yield from self._take_packed()

    def _take_packed(self) -> Iterator[Parcel]:
        while self._kernels and self._kernels[0].ticket.done:
            parcel = self._kernels.popleft()
            self._note(Moment.PACKED, parcel.chunk)
            if parcel.slot is None:
                self._note(Moment.WRITTEN, parcel.chunk)
                yield parcel
            else:
                self._filled.append(parcel)

    @property
    def _has_room(self) -> bool:
        return self._mapped is not None or self._pool.room_for(self._holder) > 0

    def _move(self, parcel: Parcel, event: SlotEvent) -> None:
        if parcel.slot is not None:
            self._pool.move(parcel.slot, event)

    def _pack_next(self) -> None:
        # The slot that the peer used last: on a CPU, its memory is still in the processor's cache.
        grant = self._grants.pop()
        chunk, staged = self._supply.take()
        length_bytes = staged.total_bytes
        if grant.length_bytes < length_bytes:
            raise PeerError(
                f"chunk {chunk} has {length_bytes} bytes, the slot that was granted has {grant.length_bytes}"
            )
        seed = grant.generation if self._with_digest else None
        self._note(Moment.PACKING, chunk)
        if self._mapped is not None:
            place, began = self._mapped.at(grant.address, length_bytes), time.perf_counter()
            ticket = self._packer.pack(place, staged, seed)
            seconds = time.perf_counter() - began
            self._kernels.append(Parcel(chunk, None, grant, ticket, length_bytes, seconds))
            return
        slot = self._pool.take(SlotEvent.PACK, self._holder)
        try:
            ticket = self._packer.pack(slot.address, staged, seed)
        except Exception:
            self._pool.move(slot, SlotEvent.RETURN)
            raise
        self._kernels.append(Parcel(chunk, slot, grant, ticket, length_bytes))

    def peek(self) -> Columns | None:
        """The batch that can be submitted next, None if none can now."""
        return self._filled[0].columns() if self._filled else None

    def submitted(self, batch_id: int) -> None:
        """That batch was given to the engine."""
        parcel = self._filled.popleft()
        self._move(parcel, SlotEvent.SUBMIT)
        self._in_flight[batch_id] = parcel
        self._note(Moment.SUBMITTED, parcel.chunk)

    def ended(self, completion: Completion) -> Parcel | None:
        """The engine is done with a batch. What it was; a slot that it may still read is in quarantine."""
        parcel = self._in_flight.pop(completion.batch_id)
        self._note(Moment.WRITTEN, parcel.chunk)
        self._move(parcel, SlotEvent.RETURN if completion.quiescent else SlotEvent.LOSE)
        return parcel


Outbox = BatchOutbox | SlotOutbox

"""D's landing slots: granted chunk by chunk, unpacked when a chunk has landed, and checked.

A peer that we fetch from over the packed path can write to the slots that it was granted, and to no page.
What is in a slot becomes KV only if its length, its generation and its digest are what they should be.
Owned by the transfer thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from kvconnect.metrics import Metrics
from kvconnect.orders import GroupBlocks
from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.packer import Packer, PackTicket
from kvconnect.peer.loss import Quarantine
from kvconnect.peer.messages import CreditRequest, Grant, Landed, Written
from kvconnect.plan.chunks import Chunk
from kvconnect.worker.slots import Slot, SlotEvent, SlotPool

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Unpacking:
    """A chunk that our kernel moves into pages."""

    chunk: int
    slot: Slot
    ticket: PackTicket
    expected: int | None


@dataclass(eq=False)
class Landing:
    """What lands of one fetch.

    ``holder`` is the node that sends. ``lent`` are its slots by generation; ``arrived`` are the chunks that
    a peer said it wrote, ``due`` how many of them it can send by now, as far as it said.
    """

    transfer_id: int
    packer: Packer
    chunks: Sequence[Chunk]
    staged: Sequence[StagedChunk]
    waiting_grants: int
    due: int
    holder: str = ""
    lent: dict[int, Slot] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    unpacking: deque[_Unpacking] = field(default_factory=deque)
    committed: int = 0
    error: str = ""
    closed: bool = False

    @property
    def complete(self) -> bool:
        """Every chunk is in its pages, and was what it should be."""
        return self.committed == len(self.chunks) and not self.error

    @property
    def idle(self) -> bool:
        """No kernel of ours works for it."""
        return not self.unpacking


@dataclass(eq=False)
class _Lost:
    """Slots of a fetch that ended while the peer behind ``link`` might still write."""

    slots: list[Slot]
    quarantine: Quarantine
    link: str


class LandingBay:
    """All landing slots of a worker, and all fetches that land in them.

    Args:
        pool: the slots.
        check_digest: whether what landed must have the digest that its sender names.
    """

    def __init__(self, pool: SlotPool, check_digest: bool, metrics: Metrics) -> None:
        self._pool = pool
        self._check_digest = check_digest
        self._metrics = metrics
        self._landings: dict[int, Landing] = {}
        self._hungry: deque[Landing] = deque()
        self._lost: dict[int, _Lost] = {}
        self._is_any_wrong = False

    @property
    def taken(self) -> int:
        """Slots that are granted, being unpacked, or in quarantine."""
        return self._pool.taken

    @property
    def busy(self) -> bool:
        """A kernel of ours is at work, whose end wakes no thread."""
        return any(landing.unpacking for landing in self._landings.values())

    def __len__(self) -> int:
        return len(self._landings) + len(self._lost)

    def open(
        self,
        transfer_id: int,
        packer: Packer,
        chunks: Sequence[Chunk],
        blocks: Sequence[GroupBlocks],
        num_tokens: int,
        holder: str = "",
    ) -> tuple[Grant, ...]:
        """Prepare for the chunks of a fetch. Returns the slots that it is granted at once, perhaps none.

        ``holder`` is the node that is asked: of more than two slots none is lent all.

        Raises:
            LayoutError: a chunk needs blocks that the request does not have.
        """
        staged = packer.stage(blocks, chunks, num_tokens)
        landing = Landing(transfer_id, packer, chunks, staged, len(chunks), len(chunks), holder)
        self._landings[transfer_id] = landing
        # Half of what is free, so that the next fetch need not wait for the first to end.
        first = min(len(chunks), (self._pool.free + 1) // 2, self._pool.room_for(holder))
        if any(self._may_lend(waiting) for waiting in self._hungry):
            first = 0
        grants = tuple(self._lend(landing) for _ in range(first))
        if landing.waiting_grants:
            self._hungry.append(landing)
        return grants

    def find(self, transfer_id: int) -> Landing | None:
        """The landing of a fetch that is under way."""
        return self._landings.get(transfer_id)

    def wanted(self, message: CreditRequest) -> None:
        """A peer says how many chunks it can send by now, and which slots it has no use for yet."""
        landing = self._landings.get(message.transfer_id)
        if landing is None or landing.closed:
            return
        for generation in landing.lent.keys() & set(message.spared):
            self._pool.move(landing.lent.pop(generation), SlotEvent.RETURN)
            landing.waiting_grants += 1
        landing.due = min(len(landing.chunks), message.chunks)
        if landing.waiting_grants and landing not in self._hungry:
            self._hungry.append(landing)

    def landed(self, message: Landed) -> str:
        """A peer says that a chunk lies in its slot: begin to unpack it. Why it is no use, or nothing.

        What is no use for its fetch changes nothing of any other.
        """
        landing = self._landings.get(message.transfer_id)
        if landing is None or landing.closed:
            return "nothing is fetched under this number"
        slot = landing.lent.get(message.generation)
        if slot is None:
            return f"generation {message.generation} was not granted to it, or was used already"
        if message.chunk >= len(landing.chunks) or message.chunk in landing.arrived:
            return f"chunk {message.chunk} of {len(landing.chunks)} is not awaited"
        staged = landing.staged[message.chunk]
        if message.length_bytes != staged.total_bytes:
            return f"chunk {message.chunk} has {message.length_bytes} of {staged.total_bytes} bytes"
        if self._check_digest and message.digest is None:
            return f"chunk {message.chunk} came without its digest"
        seed = slot.generation if self._check_digest else None
        del landing.lent[message.generation]
        landing.arrived.add(message.chunk)
        self._pool.move(slot, SlotEvent.LANDED)
        try:
            ticket = landing.packer.unpack(slot.address, staged, seed)
        except Exception as error:
            # Whatever it is, a device out of memory included, only this request is lost by it.
            logger.exception("a chunk could not be unpacked")
            self._pool.move(slot, SlotEvent.RETURN)
            return f"chunk {message.chunk} cannot be unpacked: {type(error).__name__}: {error}"
        landing.unpacking.append(
            _Unpacking(message.chunk, slot, ticket, message.digest if self._check_digest else None)
        )
        return ""

    def advance(self, now: float) -> Iterator[tuple[int, tuple[Grant, ...]]]:
        """Let time pass: take what is unpacked, and lend what became free.

        Yields the fetches that are granted more slots, with them. A chunk of the wrong digest sets its
        landing's ``error``.
        """
        for landing in self._landings.values():
            while landing.unpacking and landing.unpacking[0].ticket.done:
                self._take(landing, landing.unpacking.popleft())
        for landing in [landing for landing in self._landings.values() if landing.closed and landing.idle]:
            del self._landings[landing.transfer_id]
        for transfer_id in [number for number, lost in self._lost.items() if now >= lost.quarantine.until]:
            self.settle(transfer_id)
        yield from self._feed()
        self._metrics.slots_landing.set(self._pool.taken)

    def take_wrong(self) -> bool:
        """Whether a landing's ``error`` was set since the last call."""
        wrong, self._is_any_wrong = self._is_any_wrong, False
        return wrong

    def next_deadline(self) -> float | None:
        """The time by which ``advance`` has something to do even if nothing arrives."""
        return min((lost.quarantine.until for lost in self._lost.values()), default=None)

    def close(
        self,
        transfer_id: int,
        lost_until: float | None,
        link: str = "",
        unsettled: Container[int] | None = None,
    ) -> None:
        """A fetch is over. Slots that it was lent are free, or in quarantine until ``lost_until``.

        ``link`` is the connection over which the peer may still say that it stopped. ``unsettled`` are the
        generations that it may still write, as far as it said; None for all of them.
        """
        landing = self._landings.get(transfer_id)
        if landing is None or landing.closed:
            return
        landing.closed = True
        if landing in self._hungry:
            self._hungry.remove(landing)
        slots: list[Slot] = []
        for generation, slot in landing.lent.items():
            is_lost = lost_until is not None and (unsettled is None or generation in unsettled)
            self._pool.move(slot, SlotEvent.LOSE if is_lost else SlotEvent.RETURN)
            slots += [slot] if is_lost else []
        landing.lent.clear()
        if lost_until is not None:
            self._lost[transfer_id] = _Lost(slots, Quarantine(lost_until, is_unproven=True), link)
        if landing.idle:
            del self._landings[transfer_id]

    def answered(self, written: Written, link: str, until: float) -> None:
        """A peer answers a fetch that is over: slots that it will not write are free at once.

        Those that it may still write are kept until ``until``, or as long as they were to be kept before.
        """
        lost = self._lost.get(written.transfer_id)
        if lost is None or lost.link != link:
            return
        if written.quiescent:
            self.settle(written.transfer_id)
            return
        lost.quarantine.hasten(until, proven=False)
        if written.unsettled is not None:
            for slot in lost.slots:
                if slot.generation not in written.unsettled:
                    self._pool.move(slot, SlotEvent.RETURN)
            lost.slots = [slot for slot in lost.slots if slot.generation in written.unsettled]

    def hasten(self, links: Container[str], until: float, *, proven: bool) -> None:
        """Slots that peers behind these connections hold need not wait longer than until then."""
        for lost in self._lost.values():
            if lost.link in links:
                lost.quarantine.hasten(until, proven=proven)

    def has_unproven(self, now: float) -> bool:
        """Slots are to be lent again that a peer may still write."""
        return any(lost.slots and lost.quarantine.ends_unproven(now) for lost in self._lost.values())

    def settle_all(self) -> None:
        """No peer can write any more to what was lost so far."""
        for transfer_id in list(self._lost):
            self.settle(transfer_id)

    def settle(self, transfer_id: int) -> None:
        """The peer of a fetch that was lost says, or time proves, that it writes no more."""
        lost = self._lost.pop(transfer_id, None)
        for slot in lost.slots if lost is not None else ():
            self._pool.move(slot, SlotEvent.RETURN)

    def _take(self, landing: Landing, unpacked: _Unpacking) -> None:
        self._pool.move(unpacked.slot, SlotEvent.RETURN)
        if unpacked.ticket.digest != unpacked.expected:
            self._metrics.failures.labels("digest").inc()
            self._is_any_wrong = True
            landing.error = landing.error or (
                f"chunk {unpacked.chunk} landed with another digest than it was sent with"
            )
            return
        landing.committed += 1

    def _lend(self, landing: Landing) -> Grant:
        slot = self._pool.take(SlotEvent.LEND, landing.holder)
        landing.lent[slot.generation] = slot
        landing.waiting_grants -= 1
        return Grant(slot.address, slot.length_bytes, slot.generation)

    def _may_lend(self, landing: Landing) -> bool:
        """A slot is free for it, and of use now."""
        asked = len(landing.chunks) - landing.waiting_grants
        return asked < landing.due and self._pool.room_for(landing.holder) > 0

    def _feed(self) -> Iterator[tuple[int, tuple[Grant, ...]]]:
        """Lend what is free, in turn, first to those who have nothing."""
        granted: dict[int, list[Grant]] = {}
        while fed := [waiting for waiting in self._hungry if self._may_lend(waiting)]:
            landing = next((waiting for waiting in fed if not waiting.lent), fed[0])
            granted.setdefault(landing.transfer_id, []).append(self._lend(landing))
            self._hungry.remove(landing)
            if landing.waiting_grants:
                self._hungry.append(landing)
        for transfer_id, grants in granted.items():
            yield transfer_id, tuple(grants)

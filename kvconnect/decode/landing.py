"""D's landing slots: granted chunk by chunk, and unpacked and checked when a chunk has landed.

A peer can write only to the slots that it was granted, and to no page. A slot's bytes become KV only if their
length, generation and digest are correct. Owned by the transfer thread.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvconnect.outcome import Cause, Reason
from kvconnect.pack.batches import PackTicket, StagedChunk
from kvconnect.pack.exponent_code import coded_bytes
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import CreditGrant, CreditRequest, Grant, Landed, Message, Written
from kvconnect.timeline import Moment
from kvconnect.transfer.parts import Timer, TransferContext
from kvconnect.transfer.slots import Slot, SlotState

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from kvconnect.decode.loads import LoadRecord
    from kvconnect.decode.peers import RankLink


@dataclass(eq=False)
class Landing:
    """The landing of one fetch of ``load``, which was sent over connection ``link``.

    ``due``: chunks that the peer can send by now, as it reports. ``lent``: granted slots by generation.
    ``arrived``: chunks that the peer reported written; they wait in ``packed`` until the device has finished
    all earlier use of their blocks, and those of ``unpacking`` for D's kernels. ``committed``: chunks in
    their pages, each with its digest. A fetch that has ended is ``closed``; its landing stays while slots are
    being unpacked, or in ``quarantine``, as the peer may still write to them. The load is advanced when the
    landing is idle again.
    """

    transfer_id: int
    load: LoadRecord
    link: RankLink
    packer: Packer
    staged: Sequence[StagedChunk]
    due: int
    quarantine: Timer
    lent: dict[int, Slot] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    packed: deque[tuple[Slot, Landed]] = field(default_factory=deque)
    unpacking: deque[tuple[Slot, Landed, PackTicket]] = field(default_factory=deque)
    committed: dict[int, int] = field(default_factory=dict)
    closed: bool = False

    @functools.cached_property
    def total_bytes(self) -> int:
        """The bytes of all chunks."""
        return sum(staged.total_bytes for staged in self.staged)

    @property
    def missing(self) -> int:
        """The number of chunks that are not in their pages, verified."""
        return len(self.staged) - len(self.committed)

    def fail(self, reason: Reason) -> None:
        """Fail the load, unless its fetch has ended: then the load has failed, or the fetch is repeated."""
        if not self.closed:
            self.load.fail(reason)

    @property
    def is_quarantined(self) -> bool:
        """A peer may still write to slots of this ended fetch."""
        return self.quarantine.due_at < math.inf

    @property
    def wants_slots(self) -> bool:
        """The peer can send chunks now for which it has no slot."""
        return len(self.lent) + len(self.arrived) < self.due

    @property
    def idle(self) -> bool:
        """No chunk of it is being unpacked or waits for that."""
        return not self.unpacking and not self.packed


class LandingBay:
    """All landing slots of a worker, and the landings that use them. ``send`` takes a connection's name."""

    def __init__(self, context: TransferContext, send: Callable[[str, Message], None]) -> None:
        self._metrics, self._timers, self._pool = context.metrics, context.timers, context.local.landing
        self._coder = context.local.coder
        self._send = send
        self._landings: dict[int, Landing] = {}
        # Landings with chunks to unpack; and those that want slots, in turn.
        self._working: dict[Landing, None] = {}
        self._hungry: deque[Landing] = deque()
        self._quarantined = 0

    @property
    def busy(self) -> bool:
        """Chunks are being unpacked, or wait for the device. Neither end wakes a thread."""
        return bool(self._working)

    def __len__(self) -> int:
        return len(self._landings)

    def open(
        self,
        transfer_id: int,
        load: LoadRecord,
        staged: Sequence[StagedChunk],
        packer: Packer,
        link: RankLink,
    ) -> tuple[Landing, tuple[Grant, ...]]:
        """Prepare for the chunks of a fetch, and grant the first slots, perhaps none."""
        count, quarantine = len(staged), self._timers.timer(lambda now: self._free(landing, ()))
        landing = Landing(transfer_id, load, link, packer, staged, count, quarantine)
        self._landings[transfer_id] = landing
        # Half of the free slots, so that the next fetch need not wait for the first to end.
        first = min(count, (self._pool.free + 1) // 2, self._pool.room_for(link.peer.address))
        if any(self._may_lend(waiting) for waiting in self._hungry):
            first = 0
        grants = tuple(self._lend(landing) for _ in range(first))
        self._queue(landing)
        return landing, grants

    def _queue(self, landing: Landing) -> None:
        """Queue a landing for slots, behind the others, while it wants some."""
        if landing.wants_slots and landing not in self._hungry:
            self._hungry.append(landing)
        elif not landing.wants_slots and landing in self._hungry:
            self._hungry.remove(landing)

    def requested(self, landing: Landing | None, message: CreditRequest) -> None:
        """Take a credit request: how many chunks the peer can send by now, and which slots it returns."""
        if landing is None or landing.closed:
            return
        for generation in landing.lent.keys() & set(message.spared):
            self._pool.move(landing.lent.pop(generation), SlotState.FREE)
        landing.due = min(len(landing.staged), message.chunks)
        self._queue(landing)

    def landed(self, landing: Landing | None, message: Landed) -> str:
        """Take the report of a landed chunk, and begin to unpack it. Why the report is void, or nothing."""
        if landing is None or landing.closed:
            return "nothing is fetched under this number"
        slot = landing.lent.get(message.generation)
        if slot is None:
            return f"generation {message.generation} was not granted to it, or was used already"
        if message.chunk >= len(landing.staged) or message.chunk in landing.arrived:
            return f"chunk {message.chunk} of {len(landing.staged)} is not awaited"
        if message.coded and self._coder is None:
            return f"chunk {message.chunk} is coded, which this node has not offered to decode"
        length_bytes = landing.staged[message.chunk].total_bytes
        length_bytes = coded_bytes(length_bytes) if message.coded else length_bytes
        if length_bytes > slot.length_bytes:
            return f"the code of chunk {message.chunk} has {length_bytes} bytes, its slot {slot.length_bytes}"
        if message.length_bytes != length_bytes:
            return f"chunk {message.chunk} has {message.length_bytes} of {length_bytes} bytes"
        if message.digest is None:
            return f"chunk {message.chunk} came without its digest"
        del landing.lent[message.generation]
        landing.arrived.add(message.chunk)
        self._pool.move(slot, SlotState.OURS)
        landing.packed.append((slot, message))
        self._working[landing] = None
        self._note(landing, Moment.LANDED, message.chunk)
        self._unpack(landing)
        return ""

    def _unpack(self, landing: Landing) -> None:
        """Start to unpack landed chunks, once the device has finished all earlier use of their blocks."""
        while landing.packed and landing.load.is_unused():
            slot, message = landing.packed.popleft()
            staged, coder = landing.staged[message.chunk], self._coder if message.coded else None
            try:
                ticket = landing.packer.unpack(slot.address, staged, slot.generation, coder)
            except Exception as error:
                # Any error, a device out of memory included, fails only this request.
                logger.debug("a chunk could not be unpacked", exc_info=True)
                self._pool.move(slot, SlotState.FREE)
                text = f"chunk {message.chunk} cannot be unpacked: {type(error).__name__}: {error}"
                landing.fail(Cause.LANDING(text))
                continue
            landing.unpacking.append((slot, message, ticket))
            self._note(landing, Moment.UNPACKING, message.chunk)

    def advance(self) -> None:
        """Take unpacked chunks, and grant the slots that became free. A wrong digest fails its landing."""
        for landing in list(self._working):
            self._unpack(landing)
            while landing.unpacking and landing.unpacking[0][2].done:
                self._take(landing, *landing.unpacking.popleft())
            if landing.idle:
                del self._working[landing]
                landing.load.touch()
                self._forget_if_over(landing)
        self._feed()
        self._metrics.slots_landing.set(self._pool.taken)

    def hasten(self, link: RankLink, incarnation: str, until: float) -> None:
        """End the quarantine of slots granted before ``link``, but to ``incarnation``, by ``until``."""
        # At most greetings there is none, and landings at rest are not looked at.
        for landing in self._landings.values() if self._quarantined else ():
            if landing.is_quarantined and landing.link.is_before(link, incarnation):
                landing.quarantine.by(until)

    def close(
        self, landing: Landing | None, lost_until: float | None, unsettled: Container[int] | None = None
    ) -> None:
        """Close the landing of an ended fetch: free its slots, or quarantine them until ``lost_until``.

        ``unsettled``: the generations that the peer may still write, by its report; None: all of them.
        """
        if landing is None or landing.closed:
            return
        landing.closed = True
        for slot, _ in landing.packed:
            self._pool.move(slot, SlotState.FREE)
        landing.packed.clear()
        if landing in self._hungry:
            self._hungry.remove(landing)
        if lost_until is not None:
            landing.quarantine.at(lost_until)
        self._free(landing, () if lost_until is None else unsettled)
        for slot in landing.lent.values():
            self._pool.move(slot, SlotState.QUARANTINED)
        self._count_quarantined(len(landing.lent))

    def answered(self, written: Written, link: str, until: float) -> None:
        """Take the answer to a fetch that D has ended: free the slots that the peer will not write.

        The other slots stay in quarantine until ``until``, or until an earlier time set before.
        """
        landing = self._landings.get(written.transfer_id)
        if landing is None or not landing.is_quarantined or landing.link.name != link:
            return
        if not written.quiescent:
            landing.quarantine.by(until)
        self._free(landing, () if written.quiescent else written.unsettled)

    def _free(self, landing: Landing, unsettled: Container[int] | None) -> None:
        """Free a closed landing's slots, except those of the ``unsettled`` generations; None: free none."""
        for generation in list(landing.lent):
            if unsettled is not None and generation not in unsettled:
                slot = landing.lent.pop(generation)
                if slot.state is SlotState.QUARANTINED:
                    self._count_quarantined(-1)
                self._pool.move(slot, SlotState.FREE)
        if not landing.lent:
            landing.quarantine.cancel()
        self._forget_if_over(landing)

    def _count_quarantined(self, more: int) -> None:
        self._quarantined += more
        self._metrics.quarantined.set(self._quarantined)

    def _forget_if_over(self, landing: Landing) -> None:
        if landing.closed and landing.idle and not landing.lent:
            self._landings.pop(landing.transfer_id, None)

    def _take(self, landing: Landing, slot: Slot, message: Landed, ticket: PackTicket) -> None:
        assert message.digest is not None, "a chunk without one was refused"
        self._pool.move(slot, SlotState.FREE)
        self._note(landing, Moment.UNPACKED, message.chunk)
        if ticket.digest == message.digest:
            landing.committed[message.chunk] = message.digest
            return
        text = f"chunk {message.chunk} landed with another digest than it was sent with"
        landing.fail(Cause.DIGEST(text))

    def _lend(self, landing: Landing) -> Grant:
        slot = self._pool.take(SlotState.THEIRS, landing.link.peer.address)
        landing.lent[slot.generation] = slot
        return Grant(slot.address, slot.length_bytes, slot.generation)

    def _may_lend(self, landing: Landing) -> bool:
        """A slot is free for a landing, and of use now; while its blocks are in use, one slot is enough."""
        is_of_use = landing.wants_slots and self._pool.room_for(landing.link.peer.address) > 0
        return is_of_use and (not (landing.lent or landing.packed) or landing.load.is_unused())

    def _feed(self) -> None:
        """Grant the free slots in turn, first to landings without a slot."""
        if not self._hungry or not self._pool.free:
            return
        granted: dict[Landing, list[Grant]] = {}
        while fed := [waiting for waiting in self._hungry if self._may_lend(waiting)]:
            landing = next((waiting for waiting in fed if not waiting.lent), fed[0])
            granted.setdefault(landing, []).append(self._lend(landing))
            self._hungry.remove(landing)
            self._queue(landing)
        for landing, grants in granted.items():
            self._send(landing.link.name, CreditGrant(landing.transfer_id, tuple(grants)))
            self._note(landing, Moment.CREDITS_SENT, len(grants))

    def _note(self, landing: Landing, moment: str, number: int) -> None:
        handle = landing.load.order.handle
        self._metrics.timeline.note(moment, number, handle=handle, transfer_id=landing.transfer_id)

"""The outbox of a sending: its chunks, packed into send slots or directly into mapped landing slots.

The sender above submits the batches and knows the bounds. Owned by the transfer thread.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvconnect.engine.base import Completion
from kvconnect.errors import PeerError
from kvconnect.pack.batches import PackTicket, StagedChunk
from kvconnect.pack.exponent_code import ExponentCoder, coded_bytes
from kvconnect.peer.messages import Fetch, Grant
from kvconnect.plan.chunks import Chunk
from kvconnect.prefill.leases import Lease
from kvconnect.timeline import Moment
from kvconnect.transfer.local import Local
from kvconnect.transfer.slots import Slot, SlotState

if TYPE_CHECKING:
    from kvconnect.prefill.send_path import SendPath

_MOST_BYTES_IN_TURN = 16 << 20
"""This thread packs about so many bytes of one sending itself, then looks at others: some milliseconds."""

Columns = tuple[int, int, int]
"""One batch: source address, target address, length in bytes."""


@dataclass(eq=False)
class Parcel:
    """A chunk packed into a send slot for a landing slot, or in ``seconds`` directly into a landing slot.

    ``length_bytes`` travel. ``coded``: the chunk, if the slot gets its code: it may have to be packed again.
    """

    chunk: int
    slot: Slot | None
    grant: Grant
    ticket: PackTicket
    length_bytes: int
    seconds: float = 0.0
    coded: StagedChunk | None = None

    def columns(self) -> Columns:
        """The batch that copies the send slot to the landing slot."""
        assert self.slot is not None, "what is packed into a landing slot is no batch"
        return self.slot.address, self.grant.address, self.length_bytes


class SlotOutbox:
    """Packs a fetch's chunks into send slots as D grants landing slots, or directly into mapped ones.

    Where the request is held, chunks are packed in the fetch's order. Of a streaming prefill a chunk can be
    packed once its tokens are computed, and chunks are packed in that order; those with states come last.
    ``copies``: all chunks.

    Args:
        note: called with each event of a chunk, and the chunk's index.

    Raises:
        LayoutError: a chunk does not fit the packer's wire, or its tokens are not held.
        LocalError: a block is outside this cache.
        PeerError: a chunk does not fit the slots.
    """

    def __init__(
        self, lease: Lease, path: SendPath, local: Local, fetch: Fetch, note: Callable[[str, int], None]
    ) -> None:
        self._packer = packer = path.packer_of(lease.kept)
        self._chunks = chunks = fetch.chunks
        self.copies = len(chunks)
        self._lease, self._geometry, self._note = lease, local.table.groups, note
        self._pool, self._holder, self._mapped = local.send, path.name, path.mapped
        coding = path.coding
        self._coding = coding if coding is not None and coding.is_on(path.found.bytes_per_s) else None
        self._grants: list[Grant] = []
        self._kernels: deque[Parcel] = deque()
        self._filled: deque[Parcel] = deque()
        self._in_flight: dict[int, Parcel] = {}
        self._taken = 0
        # A packer assumes that D computes one token again.
        self._ahead = 1 - lease.replay
        self._staged: Sequence[StagedChunk] = ()
        self._order: Sequence[int] = range(len(chunks))
        # The tokens that must be computed for each chunk, ascending; empty once all can be packed.
        self._needs: Sequence[float] = ()
        streams = packer.chunker.wire.streams
        self._states = {stream.target_group for stream in streams if stream.is_state}
        if lease.order is not None:
            num_tokens = path.share.count(lease.num_tokens) + self._ahead
            self._staged = packer.stage(path.share.of(lease.order.groups), chunks, num_tokens)
            sizes = [staged.total_bytes for staged in self._staged]
        else:
            rows: dict[int, int] = {}
            for stream in streams:
                rows[stream.target_group] = math.lcm(rows.get(stream.target_group, 1), stream.row_tokens)
            needs = [self._tokens_of(chunk, rows) for chunk in chunks]
            self._order = sorted(range(len(chunks)), key=needs.__getitem__)
            self._needs = sorted(needs)
            sizes = [packer.chunker.place(chunk).total_bytes for chunk in chunks]
        if max(sizes, default=0) > path.slot_bytes:
            raise PeerError(f"a chunk has {max(sizes)} bytes, the slots have {path.slot_bytes}")

    def _tokens_of(self, chunk: Chunk, row_tokens: dict[int, int]) -> float:
        """The prompt tokens that a chunk needs computed. Rows are complete with their last token."""
        if any(span.group in self._states for span in chunk.spans):
            return math.inf
        ends = (-(-span.stop // row_tokens[span.group]) * row_tokens[span.group] for span in chunk.spans)
        return min(self._lease.num_tokens, max(ends, default=0))

    def grant(self, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Take landing slots that the peer grants. Returns those that no chunk can fill yet."""
        wanted = max(0, self.due - self._taken - len(self._grants))
        self._grants.extend(grants[:wanted])
        return grants[wanted:]

    @property
    def due(self) -> int:
        """How many chunks can be packed by now, those already taken included."""
        if self._needs:
            ready_tokens = self._lease.advance()
            if not self._lease.is_whole:
                return bisect.bisect_right(self._needs, ready_tokens)
            self._needs = ()
        return self.copies

    @property
    def exhausted(self) -> bool:
        """Every chunk was taken, and the request is held, so that no preemption can void them."""
        return self._taken == self.copies and self._lease.order is not None

    @property
    def is_packing(self) -> bool:
        """Pack kernels read the blocks, or filled send slots were not submitted yet."""
        return bool(self._kernels or self._filled)

    @property
    def goes_on(self) -> bool:
        """``advance`` has work, now or later, that no message and no completion will report."""
        if self.is_packing:
            return True
        if self.due > self._taken:
            # Without a grant, the peer's message is awaited.
            return bool(self._grants)
        # The device's end is awaited, which wakes no thread.
        return self._taken < self.copies and self._lease.order is not None

    def advance(self, stopping: bool) -> Iterator[Parcel]:
        """Pack all chunks that can be packed; if ``stopping``, return filled slots that were not submitted.

        Yields each chunk that now lies in its landing slot, before the next one is packed.

        Raises:
            PeerError: a granted slot is too small for its chunk.
        """
        yield from self._take_packed(stopping)
        if stopping:
            for parcel in self._filled:
                self._move(parcel, SlotState.FREE)
            self._filled.clear()
            return
        packed_bytes = 0
        # A send slot is taken only together with a landing slot: no sending waits while holding one.
        while self._grants and self.due > self._taken and self._has_room:
            if self._packer.is_blocking and (self._filled or packed_bytes >= _MOST_BYTES_IN_TURN):
                # This thread packs itself: it sends the chunks packed so far before it packs more.
                break
            packed_bytes += self._pack_next()
            if self._packer.is_blocking:
                yield from self._take_packed()

    def _take_packed(self, stopping: bool = False) -> Iterator[Parcel]:
        while self._kernels and self._kernels[0].ticket.done:
            parcel = self._kernels.popleft()
            if parcel.coded is not None and self._coding is not None and parcel.slot is not None:
                self._coding.ended(has_failed := parcel.ticket.has_failed)
                if has_failed and not stopping:
                    self._pack(parcel.slot, parcel.chunk, parcel.coded, parcel.grant)
                    continue
            self._note(Moment.PACKED, parcel.chunk)
            if parcel.slot is None:
                self._note(Moment.WRITTEN, parcel.chunk)
                yield parcel
            else:
                self._filled.append(parcel)

    @property
    def _has_room(self) -> bool:
        return self._mapped is not None or self._pool.room_for(self._holder) > 0

    def _move(self, parcel: Parcel, after: SlotState) -> None:
        if parcel.slot is not None:
            self._pool.move(parcel.slot, after)

    def _take(self) -> tuple[int, StagedChunk]:
        """The next chunk, staged, with its index in the fetch. Raises as the constructor does."""
        index = self._order[self._taken]
        self._taken += 1
        if self._staged:
            return index, self._staged[index]
        chunk = self._chunks[index]
        tokens = [span for span in chunk.spans if span.group not in self._states]
        first = min((span.start for span in tokens), default=0)
        stop = max((span.stop for span in tokens), default=0)
        blocks = self._lease.blocks_of(self._geometry, first, stop)
        (staged,) = self._packer.stage(blocks, [chunk], self._lease.num_tokens + self._ahead)
        return index, staged

    def _pack_next(self) -> int:
        """Begin to pack the next chunk. Returns its bytes."""
        # The slot that the peer used last: with a CPU, its memory may still be in the processor's cache.
        grant = self._grants.pop()
        chunk, staged = self._take()
        length_bytes = staged.total_bytes
        if grant.length_bytes < length_bytes:
            raise PeerError(
                f"chunk {chunk} has {length_bytes} bytes, the slot that was granted has {grant.length_bytes}"
            )
        self._note(Moment.PACKING, chunk)
        if self._mapped is not None:
            place, began = self._mapped.at(grant.address, length_bytes), time.perf_counter()
            ticket = self._packer.pack(place, staged, grant.generation)
            seconds = time.perf_counter() - began
            self._kernels.append(Parcel(chunk, None, grant, ticket, length_bytes, seconds))
            return length_bytes
        slot = self._pool.take(SlotState.OURS, self._holder)
        coder = None
        if self._coding is not None and not self._coding.has_given_up:
            coder = self._coding.coder if coded_bytes(length_bytes) < length_bytes else None
        self._pack(slot, chunk, staged, grant, coder)
        return length_bytes

    def _pack(
        self, slot: Slot, chunk: int, staged: StagedChunk, grant: Grant, coder: ExponentCoder | None = None
    ) -> None:
        try:
            ticket = self._packer.pack(slot.address, staged, grant.generation, coder)
        except Exception:
            self._pool.move(slot, SlotState.FREE)
            raise
        parcel = Parcel(chunk, slot, grant, ticket, staged.total_bytes)
        if coder is not None:
            parcel.length_bytes, parcel.coded = coded_bytes(staged.total_bytes), staged
        self._kernels.append(parcel)

    def peek(self) -> Columns | None:
        """The batch that can be submitted next; None while there is none."""
        return self._filled[0].columns() if self._filled else None

    def submitted(self, batch_id: int) -> None:
        """The batch from ``peek`` was submitted to the engine, as ``batch_id``."""
        parcel = self._filled.popleft()
        self._move(parcel, SlotState.THEIRS)
        self._in_flight[batch_id] = parcel
        self._note(Moment.SUBMITTED, parcel.chunk)

    def ended(self, completion: Completion) -> Parcel | None:
        """The engine has completed a batch. Returns its parcel; a slot not quiescent goes into quarantine."""
        parcel = self._in_flight.pop(completion.batch_id)
        self._note(Moment.WRITTEN, parcel.chunk)
        self._move(parcel, SlotState.FREE if completion.quiescent else SlotState.QUARANTINED)
        return parcel

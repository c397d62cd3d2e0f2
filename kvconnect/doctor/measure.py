"""How fast KV comes from a peer that serves, and whether that is what the hardware should give.

What the peer writes to us is measured, and what of it we unpack meanwhile. For that moment this process is a
decode node without a scheduler: it greets with the peer's own meaning, lends scratch memory, and asks for
nothing that is held.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import msgspec
import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.specs import div_ceil
from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, warning, warning_if
from kvconnect.engine.base import Engine, Span
from kvconnect.engine.lanes import LEAST_SHARE, expected_rate, lane_of
from kvconnect.engine.registry import create_engine
from kvconnect.errors import PeerError
from kvconnect.pack.arena import ALIGN_BYTES, Arena, auto_slot_bytes, copy_bytes_per_s
from kvconnect.pack.batches import PackTicket
from kvconnect.pack.packer import Packer
from kvconnect.peer.asking import TimedDescription, asking_channel
from kvconnect.peer.channel import LinkLost
from kvconnect.peer.messages import Introduction, Landed, Measure, Measured, Side
from kvconnect.peer.session import Ended, Misused, Ready, Received, Session
from kvconnect.plan.align import TableCard
from kvconnect.plan.chunks import TokenSpan
from kvconnect.plan.wire import align_wire
from kvconnect.prefill.measuring import LEAST_PAUSE_S, LONGEST_S, any_blocks

_LINK = "measured"
_WARM_UP_S, _MEASURED_S = 0.1, 1.0
_SCRATCH_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
_CACHE_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
_MOST_KERNELS = 4
_NAP_S = 1e-6
"""As a worker that waits for writes."""


@dataclass(frozen=True)
class Rates:
    """In bytes a second: the engine's with nothing beside it; of chunks that are packed and ``sent``; and of
    those that are unpacked too, ``packed``.

    ``copy`` is that of a plain copy within a process, and the most that shared memory gives.
    """

    contiguous: float
    sent: float
    packed: float
    copy: float


def check_rates(facts: Facts, rates: Rates) -> Iterator[Finding]:
    """Whether bytes come as fast as they should."""
    trial = facts.trials.get(facts.engine)
    lane = lane_of((trial.wire or trial.lane) if trial is not None else "")
    should, why = expected_rate(facts.machine, lane, rates.copy)
    share = rates.contiguous / should if should else 1.0
    beside = f"{share:.0%} of {should / 1e9:.3g} ({why})" if should else f"beside {why}"
    found, figures = f"{rates.contiguous / 1e9:.3g} GB/s, {beside}", {"bytes_per_s": rates.contiguous}
    advice = "look at the rows above, at other traffic, and at where the processes run (NUMA)"
    yield warning_if(share < LEAST_SHARE, "contiguous", found, advice, figures)
    found = f"{rates.packed / 1e9:.3g} GB/s unpacked here, of {rates.sent / 1e9:.3g} that the peer sends"
    if not rates.sent:
        yield warning("packed", "the peer has no slots, or only fetches", "ask a node that prefills")
        return
    slow = facts.machine.gpus and rates.packed < LEAST_SHARE * rates.contiguous
    advice = "larger slots (slot_bytes), or look at what else uses the GPUs"
    yield warning_if(slow, "packed", found, advice, {"bytes_per_s": rates.packed})


def measure(facts: Facts, peer: TimedDescription, address: tuple[str, int]) -> Rates:
    """Take a few seconds of a peer's rank 0. Raises ``PeerError``, ``EngineError`` or ``LayoutError``."""
    extra, theirs = facts.extra, peer.description.introduction
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    like = facts.own.description.introduction if facts.own is not None else theirs
    _memory, table = _cache_like(like.table, device)
    slot_bytes = theirs.slot_bytes or auto_slot_bytes(device)
    arena = Arena(device, slot_bytes, 1, max(slot_bytes, _SCRATCH_BYTES[device.type]))
    with ExitStack() as opened:
        engine = opened.enter_context(
            closing(
                create_engine(
                    theirs.engine, host=extra.host, protocol=extra.protocol, options=extra.all_engine_options
                )
            )
        )
        engine.register([Span(arena.address, arena.length_bytes, str(device))])
        ours = msgspec.structs.replace(
            theirs,
            engine_id=f"doctor-{uuid.uuid4()}",
            incarnation=uuid.uuid4().hex,
            engine_card=engine.card(),
            table=TableCard.of(table),
            scratch_address=arena.scratch_address,
            scratch_bytes=arena.scratch_bytes,
            memory=None,
        )
        asking = _Asking(facts, engine, ours, address)
        opened.callback(asking.close)
        asking.greet()
        contiguous, sent, packed = asking.rate(None), 0.0, 0.0
        if theirs.slot_bytes:
            unpacking = _Unpacked(table, theirs, facts, arena)
            sent = asking.rate(unpacking)
            packed = sent * unpacking.share
    return Rates(contiguous, sent, packed, copy_bytes_per_s(arena))


class _Asking:
    """One connection to the peer, and the engine that it writes to."""

    def __init__(self, facts: Facts, engine: Engine, ours: Introduction, address: tuple[str, int]) -> None:
        self._engine, self._address = engine, address
        self._session = Session(Side.DECODE, ours, facts.extra)
        self._channel = asking_channel(facts.extra, facts.keyring)
        self._pause_s = 0.0

    def close(self) -> None:
        """Disconnect."""
        self._channel.close()

    def greet(self) -> None:
        """Meet the peer. Raises ``PeerError``."""
        self._channel.connect(_LINK, *self._address)
        self._session.greet(time.monotonic())
        self._until(Ready)

    def rate(self, unpacking: _Unpacked | None) -> float:
        """Bytes a second that the peer writes, packed if we unpack, after a moment that does not count."""
        self._written(unpacking, _WARM_UP_S)
        measured = self._written(unpacking, _MEASURED_S)
        return measured.total_bytes / measured.seconds

    def _written(self, unpacking: _Unpacked | None, seconds: float) -> Measured:
        # The peer begins no sooner.
        time.sleep(self._pause_s)
        self._pause_s = max(seconds, LEAST_PAUSE_S)
        self._session.send(Measure(unpacking is not None, seconds))
        if unpacking is not None:
            unpacking.landed_bytes = unpacking.unpacked_bytes = 0
        event = self._until(Received, unpacking)
        assert isinstance(event, Received)
        assert isinstance(event.message, Measured)
        if event.message.error or event.message.seconds <= 0:
            raise PeerError(f"it cannot be measured: {event.message.error or 'no time passed'}")
        return event.message

    def _until(
        self, kind: type[Ready] | type[Received], unpacking: _Unpacked | None = None
    ) -> Ready | Received:
        """Take what comes, and let the engine work, until this comes. Raises ``PeerError``."""
        deadline = time.monotonic() + 2 * LONGEST_S
        while (now := time.monotonic()) < deadline:
            for frame in self._session.outgoing():
                self._channel.send(_LINK, frame)
            # What is under way to us advances only while we look.
            self._engine.poll()
            if unpacking is None or not unpacking.advance():
                time.sleep(_NAP_S)
            for arrival in self._channel.receive():
                if isinstance(arrival, LinkLost):
                    raise PeerError(f"the connection was lost: {arrival.reason or arrival.loss.value}")
                for event in self._session.receive(arrival.data, now):
                    match event:
                        case Ended() | Misused():
                            raise PeerError(event.reason.text)
                        case Received(message=Landed(length_bytes=length)) if unpacking is not None:
                            unpacking.landed_bytes += length
                        case Ready() | Received(message=Measured()) if isinstance(event, kind):
                            return event
        raise PeerError(f"it did not answer within {2 * LONGEST_S:g} s")


def _cache_like(card: TableCard, device: torch.device) -> tuple[torch.Tensor, RegionTable]:
    """Memory with regions like those of a card, of fewer blocks, and their table."""
    ratios = {number: group.blocks_per_kv_block for number, group in card.geometry().items()}
    whole = sum(region.num_blocks * region.block_stride for region in card.regions)
    share = min(1.0, _CACHE_BYTES[device.type] / max(whole, 1))
    regions, at = [], 0
    for region in card.regions:
        ratio = ratios[region.group]
        blocks = max(2 * ratio, int(region.num_blocks * share) // ratio * ratio)
        regions.append(msgspec.structs.replace(region, address=at, num_blocks=blocks))
        at += div_ceil(blocks * region.block_stride, ALIGN_BYTES) * ALIGN_BYTES
    memory = torch.zeros(at + ALIGN_BYTES, dtype=torch.uint8, device=device)
    base = div_ceil(memory.data_ptr(), ALIGN_BYTES) * ALIGN_BYTES
    placed = tuple(msgspec.structs.replace(one, address=base + one.address) for one in regions)
    return memory, RegionTable(placed, card.groups, ())


class _Unpacked:
    """Unpacks as much as has landed, out of scratch memory, into all blocks of a table."""

    def __init__(self, table: RegionTable, theirs: Introduction, facts: Facts, arena: Arena) -> None:
        wire = align_wire(theirs.table, TableCard.of(table), convert=facts.extra.convert_dtype)
        sample = 1 if arena.device.type == "cuda" else theirs.digest_sample
        self._packer = Packer(table, wire, side="target", device=arena.device, digest_sample=sample)
        blocks, tokens = any_blocks(table)
        spans = [TokenSpan(group.group, 0, 1 if group.is_state else tokens) for group in table.groups]
        chunks = self._packer.chunker.cut(spans, arena.slot_bytes)
        staged = self._packer.stage(blocks, chunks, tokens)
        # The first time memory is mapped, and kernels are compiled.
        for chunk in staged:
            self._packer.unpack(arena.scratch_address, chunk, 1).wait()
        self._staged = itertools.cycle(staged)
        starts = range(0, arena.scratch_bytes - arena.slot_bytes + 1, arena.slot_bytes)
        self._sources = itertools.cycle([arena.scratch_address + start for start in starts])
        self._kernels: list[PackTicket] = []
        self.landed_bytes = self.unpacked_bytes = 0

    @property
    def share(self) -> float:
        """Of what has landed."""
        return min(1.0, self.unpacked_bytes / max(1, self.landed_bytes))

    def advance(self) -> bool:
        """Unpack a chunk, if one is due; whether it was."""
        self._kernels = [ticket for ticket in self._kernels if not ticket.done]
        if self.unpacked_bytes >= self.landed_bytes or len(self._kernels) >= _MOST_KERNELS:
            return False
        staged = next(self._staged)
        self._kernels.append(self._packer.unpack(next(self._sources), staged, 1))
        self.unpacked_bytes += staged.total_bytes
        return True

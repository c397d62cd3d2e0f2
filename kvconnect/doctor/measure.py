"""How fast KV comes from a peer that serves: what it writes to us, and how fast we would unpack it.

For a moment this process is a decode node without a scheduler: it greets with the peer's own meaning, lends
scratch memory, and asks for nothing that is held.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable

import msgspec
import torch

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.region_table import RegionTable
from kvconnect.doctor.facts import Facts
from kvconnect.doctor.rates import Rates
from kvconnect.engine.base import Engine, Span
from kvconnect.engine.registry import create_engine
from kvconnect.errors import PeerError
from kvconnect.pack.arena import ALIGN_BYTES, Arena
from kvconnect.pack.packer import Packer
from kvconnect.peer.asking import TimedDescription, asking_channel
from kvconnect.peer.channel import LinkLost
from kvconnect.peer.messages import Introduction, Measure, Measured, Side
from kvconnect.peer.session import Ended, Misused, Ready, Received, Session
from kvconnect.plan.align import TableCard
from kvconnect.plan.chunks import TokenSpan
from kvconnect.plan.wire import align_wire
from kvconnect.worker.measuring import LEAST_PAUSE_S, LONGEST_S, any_blocks

_LINK = "measured"
_WARM_UP_S, _MEASURED_S = 0.1, 1.0
_SCRATCH_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
_CACHE_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
_MOST_TOKENS = 4096
_NAP_S = 1e-6
"""As a worker that waits for writes."""
_TURNS = 6


def measure(facts: Facts, peer: TimedDescription, address: tuple[str, int]) -> Rates:
    """Take a few seconds of a peer's rank 0. Raises ``PeerError``, ``EngineError`` or ``LayoutError``."""
    extra, theirs = facts.extra, peer.description.introduction
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    like = facts.own.description.introduction if facts.own is not None else theirs
    cache, table = _cache_like(like.table, device)
    slot_bytes = theirs.slot_bytes or ALIGN_BYTES
    arena = Arena(device, slot_bytes, 1, max(slot_bytes, _SCRATCH_BYTES[device.type]))
    engine = create_engine(
        theirs.engine, host=extra.host, protocol=extra.protocol, options=extra.all_engine_options
    )
    try:
        engine.register([Span(arena.address, arena.length_bytes, str(device))])
        ours = msgspec.structs.replace(
            theirs,
            engine_id=f"doctor-{uuid.uuid4()}",
            incarnation=uuid.uuid4().hex,
            engine_card=engine.card(),
            table=TableCard.of(table),
            scratch_address=arena.scratch_address,
            scratch_bytes=arena.scratch_bytes,
        )
        contiguous, sent = _Asking(facts, engine, ours, address).rates()
    finally:
        engine.close()
    unpacked = _unpack_rate(table, theirs, facts, arena) if sent else 0.0
    copied = torch.empty_like(cache)
    return Rates(contiguous, sent, unpacked, _rate(lambda: copied.copy_(cache), cache.nbytes, device))


class _Asking:
    """One connection to the peer, and the engine that it writes to."""

    def __init__(self, facts: Facts, engine: Engine, ours: Introduction, address: tuple[str, int]) -> None:
        extra = facts.extra
        self._engine, self._address, self._has_slots = engine, address, ours.slot_bytes > 0
        self._session = Session(Side.DECODE, ours, extra)
        self._channel = asking_channel(extra, facts.keyring)

    def rates(self) -> tuple[float, float]:
        """Contiguous and packed; 0 for packed where the peer has no slots."""
        try:
            self._channel.connect(_LINK, *self._address)
            self._session.greet(time.monotonic())
            self._until(Ready)
            self._written(packed=False, seconds=_WARM_UP_S)
            contiguous = self._written(packed=False, seconds=_MEASURED_S)
            if not self._has_slots:
                return contiguous, 0.0
            self._written(packed=True, seconds=_WARM_UP_S)
            return contiguous, self._written(packed=True, seconds=_MEASURED_S)
        finally:
            self._channel.close()

    def _written(self, *, packed: bool, seconds: float) -> float:
        self._session.send(Measure(packed, seconds))
        event = self._until(Received)
        # The peer begins the next one no sooner.
        time.sleep(max(seconds, LEAST_PAUSE_S))
        assert isinstance(event, Received)
        assert isinstance(event.message, Measured)
        if event.message.error or event.message.seconds <= 0:
            raise PeerError(f"it cannot be measured: {event.message.error or 'no time passed'}")
        return event.message.total_bytes / event.message.seconds

    def _until(self, kind: type[Ready] | type[Received]) -> Ready | Received:
        """Take what comes, and let the engine work, until this comes. Raises ``PeerError``."""
        deadline = time.monotonic() + 2 * LONGEST_S
        while (now := time.monotonic()) < deadline:
            for frame in self._session.outgoing():
                self._channel.send(_LINK, frame)
            # What is under way to us advances only while we look.
            self._engine.poll()
            time.sleep(_NAP_S)
            for arrival in self._channel.receive():
                if isinstance(arrival, LinkLost):
                    raise PeerError(f"the connection was lost: {arrival.reason or arrival.loss.value}")
                for event in self._session.receive(arrival.data, now):
                    if isinstance(event, Ended | Misused):
                        raise PeerError(event.reason)
                    if isinstance(event, Received) and not isinstance(event.message, Measured):
                        continue
                    if isinstance(event, kind):
                        return event
        raise PeerError(f"it did not answer within {2 * LONGEST_S:g} s")


def _cache_like(card: TableCard, device: torch.device) -> tuple[torch.Tensor, RegionTable]:
    """Memory with regions like those of a card, of fewer blocks, and their table."""
    groups = card.geometry()
    each = {
        number: 2 * group.blocks_per_kv_block
        if group.is_state
        else div_ceil(_MOST_TOKENS, group.block_tokens)
        for number, group in groups.items()
    }
    wanted = sum(each[region.group] * region.block_stride for region in card.regions)
    share = min(1.0, _CACHE_BYTES[device.type] / max(wanted, 1))
    regions, at = [], 0
    for region in card.regions:
        ratio = groups[region.group].blocks_per_kv_block
        blocks = max(2 * ratio, int(each[region.group] * share) // ratio * ratio)
        regions.append(msgspec.structs.replace(region, address=at, num_blocks=blocks))
        at += div_ceil(blocks * region.block_stride, ALIGN_BYTES) * ALIGN_BYTES
    memory = torch.zeros(at + ALIGN_BYTES, dtype=torch.uint8, device=device)
    base = div_ceil(memory.data_ptr(), ALIGN_BYTES) * ALIGN_BYTES
    placed = tuple(msgspec.structs.replace(one, address=base + one.address) for one in regions)
    return memory, RegionTable(placed, card.groups, ())


def _unpack_rate(table: RegionTable, theirs: Introduction, facts: Facts, arena: Arena) -> float:
    """Bytes a second of unpacking chunks of a request with all blocks of the table."""
    wire = align_wire(theirs.table, TableCard.of(table), convert=facts.extra.convert_dtype)
    sample = 1 if arena.device.type == "cuda" else theirs.digest_sample
    packer = Packer(table, wire, side="target", device=arena.device, digest_sample=sample)
    blocks, tokens = any_blocks(table)
    spans = [TokenSpan(group.group, 0, 1 if group.is_state else tokens) for group in table.groups]
    chunks = packer.chunker.cut(spans, arena.slot_bytes)
    staged = packer.stage(blocks, chunks, tokens)

    def unpack() -> None:
        for ticket in [packer.unpack(arena.addresses[0], chunk, 1) for chunk in staged]:
            ticket.wait()

    return _rate(unpack, sum(chunk.total_bytes for chunk in staged), arena.device)


def _rate(work: Callable[[], object], total_bytes: int, device: torch.device) -> float:
    """Bytes a second of the median of a few turns, after one that does not count."""
    seconds = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return total_bytes / statistics.median(seconds[1:])

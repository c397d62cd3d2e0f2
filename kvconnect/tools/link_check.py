"""Measures how fast KV arrives from a running peer: the peer's calibration of the link, and our own kernels.

Meanwhile this process acts as a decode node without a scheduler: it greets with the peer's own meaning, lends
scratch memory for the peer to write to, and asks for no KV that the peer holds.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from contextlib import closing

import msgspec
import torch

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.specs import div_ceil
from kvconnect.engine.base import Engine, Span
from kvconnect.engine.lanes import LEAST_SHARE, Transport
from kvconnect.engine.registry import create_engine
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.pack.arena import ALIGN_BYTES, Arena, auto_slot_bytes
from kvconnect.pack.packer import Packer
from kvconnect.peer.asking import TimedDescription, asking_channel
from kvconnect.peer.channel import Channel, LinkLost
from kvconnect.peer.messages import FindPrefix, Introduction, PrefixFound, Side
from kvconnect.peer.session import Ended, Event, Misused, Ready, Received, Session
from kvconnect.plan.align import TableCard
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import TokenSpan
from kvconnect.plan.wire import align_wire
from kvconnect.tools.facts import Facts
from kvconnect.tools.findings import Finding, warning, warning_if

_LINK = "calibrated"
_LONGEST_S = 10.0
_NAP_S = 1e-4
_SCRATCH_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
_CACHE_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
_TOKENS, _ROUNDS = 4096, 3


def check_link(facts: Facts, peer: TimedDescription, address: tuple[str, int]) -> Iterator[Finding]:
    """Whether bytes from a peer's rank 0 arrive at the expected rate, and pages are packed as fast.

    Raises ``PeerError``, ``EngineError`` or ``LayoutError`` if nothing arrived.
    """
    theirs = peer.description.introduction
    if peer.description.role == "kv_consumer":
        yield warning("rate", "the peer only fetches: its link is not measured", "ask a node that prefills")
        return
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    slot_bytes = theirs.slot_bytes or auto_slot_bytes(device)
    arena = Arena(device, slot_bytes, 2, max(slot_bytes, _SCRATCH_BYTES[device.type]))
    found = _calibrated(facts, theirs, address, arena)
    advice = "look at the rows above, at other traffic, and at where the processes run (NUMA)"
    figures = {"bytes_per_s": found.bytes_per_s}
    yield warning_if(found.share < LEAST_SHARE, "contiguous", str(found), advice, figures)
    like = facts.own.description.introduction if facts.own is not None else theirs
    pack, unpack = _page_rates(theirs.table, like.table, arena, convert=facts.extra.convert_dtype)
    slow = device.type == "cuda" and min(pack, unpack) < LEAST_SHARE * found.bytes_per_s
    shown = f"pages like those of the pair are packed here at {pack / 1e9:.3g} GB/s, unpacked at"
    advice = "larger slots (slot_bytes), or look at what else uses the GPUs"
    figures = {"pack_bytes_per_s": pack, "unpack_bytes_per_s": unpack}
    yield warning_if(slow, "packed", f"{shown} {unpack / 1e9:.3g}", advice, figures)


def _calibrated(facts: Facts, theirs: Introduction, address: tuple[str, int], arena: Arena) -> Transport:
    """The result of the peer's calibration of its link to our scratch memory."""
    extra = facts.extra
    options = extra.all_engine_options
    with closing(
        create_engine(theirs.engine, host=extra.host, protocol=extra.protocol, options=options)
    ) as engine:
        engine.register([Span(arena.address, arena.length_bytes, str(arena.device))])
        ours = msgspec.structs.replace(
            theirs,
            engine_id=f"doctor-{uuid.uuid4()}",
            incarnation=uuid.uuid4().hex,
            engine_card=engine.card(),
            scratch_address=arena.scratch_address,
            scratch_bytes=arena.scratch_bytes,
            # Without shared memory the engine must carry the bytes, even where landing slots could be mapped.
            memory=None,
        )
        session = Session(Side.DECODE, ours, extra)
        with closing(asking_channel(extra, facts.keyring)) as channel:
            channel.connect(_LINK, *address)
            session.greet(time.monotonic())
            for event in _events(session, channel, engine):
                match event:
                    case Ready():
                        # A lookup makes the peer measure the link, whether or not it finds names.
                        session.send(FindPrefix(1, Prefix(Naming("", 1), 0, ()), 1))
                    case Received(message=Transport() as found):
                        return found
                    case Received(message=PrefixFound(error=Reason() as reason)) if (
                        reason.cause is not Cause.NOT_HELD
                    ):
                        raise PeerError.of(reason)
                    case Ended() | Misused():
                        raise PeerError.of(event.reason)
    raise PeerError(f"it did not measure the link within {_LONGEST_S:g} s")


def _events(session: Session, channel: Channel, engine: Engine) -> Iterator[Event]:
    """The session's events, as long as a calibration may take. Raises ``PeerError`` if the link is lost."""
    deadline = time.monotonic() + _LONGEST_S
    while (now := time.monotonic()) < deadline:
        for frame in session.outgoing():
            channel.send(_LINK, frame)
        # Some engines receive only while they are polled.
        engine.poll()
        time.sleep(_NAP_S)
        for arrival in channel.receive():
            if isinstance(arrival, LinkLost):
                raise PeerError(f"the connection was lost: {arrival.reason or arrival.loss.value}")
            yield from session.receive(arrival.data, now)


def _page_rates(theirs: TableCard, like: TableCard, arena: Arena, *, convert: bool) -> tuple[float, float]:
    """Bytes a second at which scattered pages of a cache ``like`` ours are packed and unpacked."""
    _memory, table = _cache_like(like, arena.device)
    blocks, tokens = _some_blocks(table)
    rates = []
    for side in ("source", "target"):
        ends = (like, theirs) if side == "source" else (theirs, like)
        packer = Packer(table, align_wire(*ends, convert=convert), side=side, device=arena.device)
        spans = [TokenSpan(group.group, 0, 1 if group.is_state else tokens) for group in table.groups]
        chunks = packer.chunker.cut(spans, arena.slot_bytes)
        move, best = packer.pack if side == "source" else packer.unpack, 0.0
        # The first round also maps memory and compiles kernels.
        for _ in range(_ROUNDS):
            staged = packer.stage(blocks, chunks, tokens)
            began = time.perf_counter()
            for ticket in [move(arena.addresses[0], chunk, 1) for chunk in staged]:
                ticket.wait()
            best = max(best, sum(one.total_bytes for one in staged) / (time.perf_counter() - began))
        rates.append(best)
    return rates[0], rates[1]


def _cache_like(card: TableCard, device: torch.device) -> tuple[torch.Tensor, RegionTable]:
    """Memory with a card's regions, cut to fewer blocks, and its region table."""
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


def _some_blocks(table: RegionTable) -> tuple[list[GroupBlocks], int]:
    """Random blocks of one request in every cache group, and their number of tokens."""
    tokens, room, sizes = _TOKENS, {}, {}
    for group in table.groups:
        blocks = min(region.num_blocks for region in table.regions if region.group == group.group)
        room[group.group] = blocks // group.blocks_per_kv_block - 1
        sizes[group.group] = group.block_tokens * group.blocks_per_kv_block
        if not group.is_state:
            tokens = min(tokens, room[group.group] * sizes[group.group])
    rng, chosen = random.Random(0), []
    for group in table.groups:
        count = 1 if group.is_state else div_ceil(tokens, sizes[group.group])
        ids = rng.sample(range(1, room[group.group] + 1), count)
        chosen.append(GroupBlocks(group.group, 0, tuple(ids)))
    return chosen, tokens

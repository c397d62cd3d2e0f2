"""A worker's own side of every transfer: its introduction, pages, slots and engine."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.specs import div_ceil
from kvconnect.config import ExtraConfig, TransferConfig
from kvconnect.engine.base import Engine, Span
from kvconnect.engine.lanes import Fabric, Traffic, look_at_fabric, look_at_traffic
from kvconnect.errors import ConfigError, LayoutError
from kvconnect.metrics import Metrics
from kvconnect.pack.arena import ALIGN_BYTES, Arena, auto_slot_bytes, fitted_slots, spare_bytes
from kvconnect.pack.digest import CPU_DIGEST_SAMPLE
from kvconnect.pack.exponent_code import ExponentCoder
from kvconnect.pack.packer import Packer, make_coder
from kvconnect.pack.page_lanes import WireSide
from kvconnect.packages import has_triton
from kvconnect.peer.agreement import wanted_table
from kvconnect.peer.messages import Introduction
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import TokenSpan
from kvconnect.plan.wire import ORDERS, Wire, align_wire
from kvconnect.transfer.kept import KeptByName, ParkedRows
from kvconnect.transfer.slots import SlotPool

logger = logging.getLogger(__name__)

_CPU_SCRATCH_BYTES = 4 << 20


@dataclass(eq=False)
class Local:
    """The memory that a worker moves, and the engine that moves it.

    ``landing``: slots that peers write; ``send``: slots that the engine reads; a pool may be empty.
    ``stream``: where a GPU packs and unpacks pages, None elsewhere. ``arenas``: the memory of the
    slots. ``look_at_traffic`` counts the bytes that left this machine over the networks in ``fabric``.
    ``kept``: rows that peers may look up by name. ``parked``: rows that loads may fill in place of pages.
    ``maps_peers``: this process writes to mapped landing slots of peers on this machine. ``coder``: codes
    and decodes chunks; None if they travel as they are.
    """

    introduction: Introduction
    engine: Engine
    table: RegionTable
    device: torch.device
    landing: SlotPool
    send: SlotPool
    stream: torch.cuda.Stream | None = None
    arenas: tuple[Arena, ...] = ()
    fabric: Fabric = field(default_factory=Fabric)
    look_at_traffic: Callable[[], Traffic] = Traffic
    kept: KeptByName | None = None
    parked: ParkedRows | None = None
    maps_peers: bool = False
    coder: ExponentCoder | None = None

    def introduce(self) -> Introduction:
        """The introduction for one more peer, with the engine's current card, which may change."""
        return msgspec.structs.replace(self.introduction, engine_card=self.engine.card())

    def keep(self, kept: KeptByName) -> None:
        """Offer these rows to peers, if there are slots to send them from. Before any peer is met."""
        if not self.send.slots:
            return
        if self.stream is not None and kept.table is not None:
            self._warm_up(self.send, "source", kept.table)
        self.kept = kept
        self.introduction = msgspec.structs.replace(self.introduction, naming=kept.naming)

    def park(self, parked: ParkedRows) -> None:
        """Let loads fill these rows, if there are slots to land in. Before any peer is met."""
        if self.landing.slots and self.stream is not None:
            self._warm_up(self.landing, "target", parked.table)
        self.parked = parked

    def replace_weights(self, weights: Mapping[str, str]) -> None:
        """Set the weights that peers must have from now on."""
        meaning = self.introduction.meaning.with_weights(weights)
        self.introduction = msgspec.structs.replace(self.introduction, meaning=meaning)

    def packer(
        self,
        source: Introduction,
        target: Introduction,
        side: WireSide,
        convert: bool,
        table: RegionTable | None = None,
    ) -> Packer:
        """This worker's packer for one peer; ``side``: whether this worker is ``source`` or ``target``.

        ``convert``: convert values where the dtypes differ. ``table``: the memory to pack; by default the
        pages.

        Raises:
            LayoutError: the two caches cannot be matched.
        """
        wire = align_wire(source.table, wanted_table(source, target), convert=convert)
        return self._packer(table or self.table, wire, side, min(source.digest_sample, target.digest_sample))

    def _packer(self, table: RegionTable, wire: Wire, side: WireSide, digest_sample: int = 1) -> Packer:
        return Packer(
            table, wire, side=side, device=self.device, cuda_stream=self.stream, digest_sample=digest_sample
        )

    def warm_up(self) -> None:
        """Compile the kernels now, which takes seconds, rather than during the first request.

        Touches no request's page: block 0 belongs to none. Where a slot is too small for a token, compiles
        none.
        """
        self._warm_up(self.send, "source", self.table)
        self._warm_up(self.landing, "target", self.table)

    def _warm_up(self, pool: SlotPool, side: WireSide, table: RegionTable) -> None:
        last = dict.fromkeys((group.group for group in table.groups), 0)
        if table is not self.table or side == "source":
            # Block 0 of rows has no memory.
            ratios = {group.group: group.blocks_per_kv_block for group in table.groups}
            last |= {region.group: region.num_blocks // ratios[region.group] - 1 for region in table.regions}
        blocks = [GroupBlocks(group, 0, (block,)) for group, block in last.items()]
        for order in ORDERS if pool.slots else ():
            packer = self._packer(table, align_wire(table, table, order), side)
            token = [TokenSpan(group, 0, 1) for group in sorted(packer.chunker.groups)]
            try:
                chunks = packer.chunker.cut(token, pool.slot_bytes)
            except LayoutError:
                continue
            move = packer.pack if side == "source" else packer.unpack
            for chunk in chunks:
                (staged,) = packer.stage(blocks, [chunk], 1)
                move(pool.slots[0].address, staged, seed=1 << 60).wait()


def open_local(
    config: TransferConfig,
    engine: Engine,
    introduction: Introduction,
    table: RegionTable,
    device: torch.device,
    reserved_bytes: int,
    metrics: Metrics,
) -> Local:
    """Allocate the slots, and register them with the engine in one call.

    Args:
        introduction: the introduction, without slots and scratch memory.
        reserved_bytes: device memory that the serving stack will still allocate.

    Raises:
        ConfigError: the device has no room for the fewest slots.
        EngineError: the engine refuses the memory.
    """
    arenas = _make_arenas(config, engine, table, device, reserved_bytes, metrics)
    on_cuda, memory = device.type == "cuda", tuple(arenas.values())
    ours: dict[str, Any] = {"digest_sample": 1 if on_cuda else CPU_DIGEST_SAMPLE}
    for arena in memory[:1]:
        ours["slot_bytes"] = min(arena.slot_bytes, engine.capabilities.max_bytes)
        ours["scratch_address"], ours["scratch_bytes"] = arena.scratch_address, arena.scratch_bytes
    # High priority: pack kernels are short, and would each wait for the kernels of a prefill.
    stream = torch.cuda.Stream(device, priority=-1) if on_cuda else None  # type: ignore[no-untyped-call]
    coder = _measured_coder(memory[0], stream) if memory and _codes(config.extra, device) else None
    if "landing" in arenas:
        ours["memory"], ours["decodes"] = arenas["landing"].card, coder is not None
    local = Local(
        msgspec.structs.replace(introduction, **ours),
        engine,
        table,
        device,
        _slot_pool(arenas.get("landing")),
        _slot_pool(arenas.get("send")),
        stream,
        memory,
        look_at_fabric(with_gpus=on_cuda),
        look_at_traffic,
        maps_peers=not on_cuda and _shares(config.extra, engine),
        coder=coder,
    )
    if on_cuda and not has_triton():
        metrics.failures.labels("no_triton").inc()
        logger.warning(
            "Triton is not installed, so torch packs pages, which is slower, and exponent_coding is off: "
            "pip install triton"
        )
    if on_cuda:
        local.warm_up()
    # Last: an error before this leaves no freed memory registered. Only slots are registered, no page: peers
    # can write to registered memory.
    spans = [Span(arena.address, arena.length_bytes, str(device)) for arena in arenas.values()]
    engine.register(spans)
    logger.info(
        "%d regions; registered with the engine: %d bytes",
        len(table.regions),
        sum(span.length_bytes for span in spans),
    )
    return local


def without_slots(side: str) -> str:
    """Why nothing is transferred with a node that only offloads."""
    return f"the {side} node has no slots: its engine is 'none', set one in kv_connector_extra_config"


def largest_piece(table: RegionTable) -> tuple[int, str]:
    """The bytes that a slot must hold at least, and the layer that needs them.

    A peer with equal pages gets whole pages, and a layer's recurrent states are never divided.
    """
    states = {group.group for group in table.groups if group.is_state}
    pieces = Counter[str]()
    for region in table.regions:
        size = div_ceil(region.page_bytes, ALIGN_BYTES) * ALIGN_BYTES
        kept = pieces[region.layer] if region.group in states else 0
        pieces[region.layer] = max(pieces[region.layer], kept + size)
    layer, size = max(pieces.items(), key=lambda piece: piece[1])
    return size, layer


def _slot_pool(arena: Arena | None) -> SlotPool:
    # A random start: the next process at this address must not grant the same generations.
    first = random.SystemRandom().randrange(1, 1 << 61)
    return SlotPool(arena.addresses if arena else (), arena.slot_bytes if arena else 0, first)


def _shares(config: ExtraConfig, engine: Engine) -> bool:
    """Whether bytes between CPU caches of one machine travel through shared memory."""
    return engine.capabilities.may_be_bypassed and config.allows_lane("shared_memory")


def _codes(config: ExtraConfig, device: torch.device) -> bool:
    """Whether this worker codes exponents: by its settings, and where kernels for that exist."""
    return config.exponent_coding != "off" and (device.type != "cuda" or has_triton())


def _measured_coder(arena: Arena, stream: torch.cuda.Stream | None) -> ExponentCoder:
    """The coder of chunks for slots of this size, its rate measured."""
    try:
        coder = make_coder(arena.slot_bytes, arena.device, stream)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise ConfigError(
            f"exponent_coding takes {arena.slot_bytes} bytes more, which do not fit on {arena.device}; leave "
            "more of its memory free (under vLLM: a lower gpu_memory_utilization), or set it to off: "
            f"{error}"
        ) from error
    coder.measure(arena.addresses[0], arena.slot_bytes)
    logger.info("exponents are coded and decoded at %.1f GB/s", coder.bytes_per_s / 1e9)
    return coder


def _make_arenas(
    config: TransferConfig,
    engine: Engine,
    table: RegionTable,
    device: torch.device,
    reserved_bytes: int,
    metrics: Metrics,
) -> dict[str, Arena]:
    """The memory of this worker's slots, by use: ``landing`` and ``send``."""
    least, layer = largest_piece(table)
    wanted = config.extra.slot_bytes or max(auto_slot_bytes(device), least)
    # A chunk is one batch: slots larger than a batch would waste memory.
    most_bytes = engine.capabilities.max_bytes // ALIGN_BYTES * ALIGN_BYTES
    wanted = slot_bytes = min(wanted, max(most_bytes, ALIGN_BYTES))
    roles = {"landing": config.is_consumer, "send": config.is_producer}
    kinds = [kind for kind, is_used in roles.items() if is_used]
    count, spare = config.extra.num_slots, spare_bytes(device, reserved_bytes)
    # Scratch memory, and the memory in which chunks are packed before they are coded.
    scratch_slots = 1 + _codes(config.extra, device)
    if spare is not None:
        slot_bytes, count = fitted_slots(slot_bytes, count, len(kinds), spare, scratch_slots)
    if slot_bytes < least:
        raise ConfigError(
            f"a slot has {slot_bytes} bytes (slot_bytes {config.extra.slot_bytes}, {spare} bytes of {device} "
            f"to spare, at most {most_bytes} in one operation of the engine), but must hold a page of layer "
            f"{layer!r}: give slot_bytes at least {least}, or leave it out"
        )
    # Peers are calibrated with the scratch memory of one arena: enough for a fast link to show its rate.
    scratch_bytes = slot_bytes if device.type == "cuda" else min(slot_bytes, _CPU_SCRATCH_BYTES)
    arenas = {
        kind: Arena(
            device,
            slot_bytes,
            count,
            0 if number else scratch_bytes,
            shared=kind == "landing" and _shares(config.extra, engine),
        )
        for number, kind in enumerate(kinds)
    }
    logger.info(
        "%s slots: %d of %d bytes each way on %s; transfers take %d MiB there, beside what the serving stack "
        "counts as its own%s",
        " and ".join(kinds),
        count,
        slot_bytes,
        device,
        sum(arena.length_bytes for arena in arenas.values()) + (scratch_slots - 1) * slot_bytes >> 20,
        "" if spare is None else f" and out of {spare >> 20} MiB that it leaves",
    )
    if (slot_bytes, count) != (wanted, config.extra.num_slots):
        metrics.failures.labels("slots_reduced").inc()
        logger.warning(
            "%d slots of %d bytes each way do not fit into the %d bytes that are spare on %s, beside %d "
            "that the serving stack is still to take: there are %d of %d. Long prompts travel more "
            "slowly; leave more of the device free, under vLLM with a lower gpu_memory_utilization",
            config.extra.num_slots,
            wanted,
            spare,
            device,
            reserved_bytes,
            count,
            slot_bytes,
        )
    return arenas

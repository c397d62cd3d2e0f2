"""How an inbound peer's cache is reached: the paths that are open, and which of them is cheaper."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as replace_fields

from kvconnect.config import ExtraConfig
from kvconnect.engine.lanes import Lane, Traffic, lane_of
from kvconnect.errors import LayoutError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.orders import GroupBlocks
from kvconnect.pack.packer import Packer
from kvconnect.pack.shared_memory import MappedMemory, this_machine
from kvconnect.peer.agreement import source_share, wanted_card
from kvconnect.peer.messages import Fetch, Introduction
from kvconnect.peer.transport import Transport
from kvconnect.plan.align import TableAlignment, TableCard, align_tables
from kvconnect.plan.blocks import WHOLE, Share
from kvconnect.plan.cost import LinkCost, fit
from kvconnect.plan.transfer import plan_size
from kvconnect.worker.breaker import Breaker
from kvconnect.worker.calibration import ProbeOutbox, typical_page_bytes
from kvconnect.worker.local import Local
from kvconnect.worker.transport import LinkMeter, transport_over

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Way:
    """The paths to one peer, worked out when it first fetches. ``name`` is the engine's for the peer.

    ``direct`` and ``packer`` are None where that path is closed; ``refusals`` state why. Where both are
    open, ``cost`` chooses; fetches wait until the link was calibrated once and there is one. ``probe`` is a
    calibration under way, ``new_probe`` makes one, None where no scratch memory is, and ``calibrations``
    is open after one that was cut short. ``slot_bytes`` is the largest chunk that both sides' slots take.
    ``kept_packer`` makes, once, what packs rows of host memory, and raises ``LayoutError`` where these do not
    travel as blocks do. ``traffic`` is what had left this machine when the calibration began, ``found`` what
    that showed, or the engine's own words without one, and ``meter`` follows it from the first fetch on.
    Both sides keep ``share``. ``mapped`` are the peer's slots, where they are memory of this machine.
    """

    name: str
    direct: TableAlignment | None = None
    packer: Packer | None = None
    cost: LinkCost | None = None
    probe: ProbeOutbox | None = None
    new_probe: Callable[[], ProbeOutbox] | None = None
    calibrations: Breaker = field(default_factory=Breaker)
    refusals: dict[str, str] = field(default_factory=dict)
    slot_bytes: int = 0
    kept_packer: Callable[[], Packer] = field(init=False)
    traffic: Traffic = field(default_factory=Traffic)
    found: Transport = field(default_factory=lambda: Transport("unknown"))
    meter: LinkMeter | None = None
    share: Share = WHOLE
    mapped: MappedMemory | None = None

    @property
    def streams(self) -> bool:
        """A prefill can be sent while it is computed: its tokens are counted as here."""
        return self.packer is not None and self.share.is_whole

    @property
    def open(self) -> str:
        """The paths that are."""
        paths = {"direct": self.direct, "packed": self.packer}
        return " or ".join(path for path, means in paths.items() if means is not None)

    @property
    def closed(self) -> str:
        """Why each path that is closed is."""
        return "; ".join(f"{path}: {why}" for path, why in self.refusals.items())

    def prefers_packed(self, held: tuple[GroupBlocks, ...], fetch: Fetch, num_tokens: int) -> bool:
        """Whether a request is cheaper by slots than page by page, where both are open."""
        if self.direct is None or self.packer is None:
            return self.direct is None
        if self.mapped is not None:
            return True
        cost = self.cost or LinkCost()
        direct = plan_size(self.direct, held, fetch.groups, num_tokens)
        packed_bytes = sum(self.packer.chunker.place(chunk).total_bytes for chunk in fetch.chunks)
        return cost.choose(direct.copies, direct.total_bytes, packed_bytes, len(fetch.chunks)) == "packed"

    def is_calibration_due(self, now: float) -> bool:
        """Whether the link is to be measured, for the first time or again."""
        if self.probe is not None or self.new_probe is None:
            return False
        return self.cost is None or (self.calibrations.failures > 0 and self.calibrations.may_try(now))

    def begin_calibration(self, traffic: Traffic) -> ProbeOutbox:
        """A probe of the link, once so much had left this machine."""
        assert self.new_probe is not None
        self.traffic, self.probe = traffic, self.new_probe()
        self.calibrations.tried()
        return self.probe

    def calibrated(self, local: Local, error: str, found: Transport, metrics: Metrics) -> None:
        """The probe is over, with an error or without: what it showed, and ``found``, is what the link costs.

        One that showed less than the probe before it changes nothing.
        """
        assert self.probe is not None
        probe, self.probe = self.probe, None
        if error:
            metrics.failures.labels("calibration").inc()
        if error and not self.calibrations.failures:
            logger.warning("the link to %s could not be calibrated: %s", self.name, error)
        if self.cost is not None and found.bytes_per_s <= self.found.bytes_per_s:
            return
        self.found, self.meter = found, None
        pack = local.pack_bytes_per_s
        # Without a GPU our one thread packs, and most engines copy in it too.
        overlaps = local.stream is not None
        self.cost = LinkCost(fit(probe.samples) if probe.samples else None, pack, pack, overlaps=overlaps)
        if self.direct is None or self.packer is None:
            return
        logger.info("the link to %s: %s", self.name, self.cost.describe())
        believed = self.cost.as_metrics()
        for what, gauge in metrics.link.items():
            gauge.set(believed[what])


def _make_kept_packer(
    way: Way, config: ExtraConfig, local: Local, ours: Introduction, peer: Introduction
) -> Packer:
    assert local.kept is not None, "it was asked for what is kept"
    assert way.packer is not None, "the packed path is open"
    rows = replace_fields(ours, table=TableCard.of(local.kept.table))
    made = local.packer(rows, peer, "source", config.convert_dtype, local.kept.table)
    if made.chunker.wire != way.packer.chunker.wire:
        # The peer cuts its chunks of that one, which it makes from our introduction.
        raise LayoutError("what is kept in host memory does not travel as the blocks of this node do")
    return made


def owner_name(peer: Introduction) -> str:
    """One rank of one process."""
    return f"{peer.engine_id}/{peer.incarnation}/{peer.rank}"


def _map_slots(name: str, peer: Introduction, metrics: Metrics) -> MappedMemory | None:
    """The landing slots of a peer of this machine; None where the engine has to carry bytes."""
    if peer.memory is None or not peer.memory.machine or peer.memory.machine != this_machine():
        return None
    try:
        return MappedMemory(peer.memory)
    except PeerError as error:
        metrics.failures.labels("shared_memory").inc()
        logger.warning("the landing slots of %s are not mapped, the engine writes them: %s", name, error)
        return None


def make_way(
    config: ExtraConfig, local: Local, ours: Introduction, peer: Introduction, metrics: Metrics
) -> Way:
    """The paths to a peer that are open on both sides.

    The engine's name of it has the card in it, so that nothing to its memory as it was registered before goes
    on under another one.
    """
    way = Way(f"{owner_name(peer)}/{hashlib.blake2b(peer.engine_card, digest_size=6).hexdigest()}")
    way.slot_bytes = min(ours.slot_bytes, peer.slot_bytes)
    way.share = source_share(ours, peer)
    if not config.opens_direct:
        way.refusals["direct"] = "this node's path is 'packed'"
    else:
        try:
            way.direct = align_tables(ours.table, wanted_card(ours, peer))
        except LayoutError as error:
            way.refusals["direct"] = str(error)
    if not way.slot_bytes:
        way.refusals["packed"] = f"the {'decode' if ours.slot_bytes else 'prefill'} node has no slots"
    else:
        try:
            way.packer = local.packer(ours, peer, "source", config.convert_dtype)
        except LayoutError as error:
            way.refusals["packed"] = str(error)
    way.kept_packer = functools.cache(functools.partial(_make_kept_packer, way, config, local, ours, peer))
    scratch_bytes = min(ours.scratch_bytes, peer.scratch_bytes)
    if way.packer is not None and local.maps_peers:
        way.mapped = _map_slots(way.name, peer, metrics)
    if way.mapped is not None:
        rate = way.mapped.copy_bytes_per_s(ours.scratch_address, peer.scratch_address, scratch_bytes)
        way.cost = LinkCost()
        lane = Lane("shared_memory", known_by="its landing slots are mapped")
        way.found = transport_over(lane, rate, local)
        return way
    page_bytes = 0
    if way.direct is not None and way.packer is not None:
        page_bytes = typical_page_bytes(way.direct)
    # Where no page fits, the rate of bytes is all that can be measured.
    page_bytes *= page_bytes <= scratch_bytes
    lane = lane_of(local.engine.capabilities.lane)
    if scratch_bytes:
        source, target = ours.scratch_address, peer.scratch_address
        max_copies = local.engine.capabilities.max_copies
        way.new_probe = functools.partial(ProbeOutbox, source, target, scratch_bytes, page_bytes, max_copies)
    else:
        way.cost = LinkCost()
        lane = replace(lane, known_by=f"no page fits into scratch memory of {scratch_bytes} bytes")
    way.found = transport_over(lane, 0.0, local)
    return way

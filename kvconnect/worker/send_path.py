"""How chunks reach an inbound peer: what packs them, for slots of which size, and over which link."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvconnect.config import ExtraConfig
from kvconnect.engine.lanes import Lane, Traffic, lane_of
from kvconnect.errors import LayoutError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.pack.packer import Packer
from kvconnect.pack.shared_memory import MappedMemory, this_machine
from kvconnect.peer.agreement import source_share
from kvconnect.peer.messages import Introduction
from kvconnect.peer.transport import Transport
from kvconnect.plan.align import TableCard
from kvconnect.plan.blocks import Share
from kvconnect.worker.breaker import Breaker
from kvconnect.worker.calibration import ProbeOutbox
from kvconnect.worker.local import Local
from kvconnect.worker.transport import LinkMeter, transport_over

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SendPath:
    """The way to one peer, worked out when it first fetches. ``name`` is the engine's for the peer.

    ``slot_bytes`` is the largest chunk that both sides' slots take; both keep ``share``. ``kept_packer``
    makes, once, what packs rows of host memory, and raises ``LayoutError`` where these do not travel as
    blocks do. ``mapped`` are the peer's slots where they are memory of this machine; elsewhere the engine
    carries the bytes, and fetches wait until the link ``is_measured``. ``probe`` is a calibration under way,
    ``new_probe`` makes one, and ``calibrations`` counts those that were cut short. ``traffic`` is what had
    left this machine when the calibration began, ``found`` what that showed, or the engine's own words
    without one, and ``meter`` follows it from the first fetch on.
    """

    name: str
    packer: Packer
    slot_bytes: int
    share: Share
    kept_packer: Callable[[], Packer]
    found: Transport
    mapped: MappedMemory | None = None
    new_probe: Callable[[], ProbeOutbox] | None = None
    is_measured: bool = False
    probe: ProbeOutbox | None = None
    calibrations: Breaker = field(default_factory=Breaker)
    traffic: Traffic = field(default_factory=Traffic)
    meter: LinkMeter | None = None

    @property
    def streams(self) -> bool:
        """A prefill can be sent while it is computed: its tokens are counted as here."""
        return self.share.is_whole

    def is_calibration_due(self, now: float) -> bool:
        """Whether the link is to be measured, for the first time or again."""
        if self.probe is not None or self.new_probe is None:
            return False
        return not self.is_measured or (self.calibrations.failures > 0 and self.calibrations.may_try(now))

    def begin_calibration(self, traffic: Traffic) -> ProbeOutbox:
        """A probe of the link, once so much had left this machine."""
        assert self.new_probe is not None
        self.traffic, self.probe = traffic, self.new_probe()
        self.calibrations.tried()
        return self.probe

    def calibrated(self, error: str, found: Transport, metrics: Metrics) -> None:
        """The probe is over, with an error or without; ``found`` is what it showed of the link.

        One that showed less than the probe before it changes nothing.
        """
        self.probe = None
        if error:
            metrics.failures.labels("calibration").inc()
        if error and not self.calibrations.failures:
            logger.warning("the link to %s could not be calibrated: %s", self.name, error)
        if not self.is_measured or found.bytes_per_s > self.found.bytes_per_s:
            self.is_measured, self.found, self.meter = True, found, None


def owner_name(peer: Introduction) -> str:
    """One rank of one process."""
    return f"{peer.engine_id}/{peer.incarnation}/{peer.rank}"


def make_send_path(
    config: ExtraConfig, local: Local, ours: Introduction, peer: Introduction, metrics: Metrics
) -> SendPath:
    """The way to a peer.

    The engine's name of it has the card in it, so that nothing to its memory as it was registered before goes
    on under another one.

    Raises:
        LayoutError: one side has no slots, or the two caches do not fit.
    """
    slot_bytes = min(ours.slot_bytes, peer.slot_bytes)
    if not slot_bytes:
        raise LayoutError(f"the {'decode' if ours.slot_bytes else 'prefill'} node has no slots")
    packer = local.packer(ours, peer, "source", config.convert_dtype)

    def make_kept_packer() -> Packer:
        assert local.kept is not None, "it was asked for what is kept"
        rows = msgspec.structs.replace(ours, table=TableCard.of(local.kept.table))
        made = local.packer(rows, peer, "source", config.convert_dtype, local.kept.table)
        if made.chunker.wire != packer.chunker.wire:
            # The peer cuts its chunks of that one, which it makes from our introduction.
            raise LayoutError("what is kept in host memory does not travel as the blocks of this node do")
        return made

    path = SendPath(
        name=f"{owner_name(peer)}/{hashlib.blake2b(peer.engine_card, digest_size=6).hexdigest()}",
        packer=packer,
        slot_bytes=slot_bytes,
        share=source_share(ours, peer),
        kept_packer=functools.cache(make_kept_packer),
        found=transport_over(lane_of(local.engine.capabilities.lane), 0.0, local),
    )
    scratch_bytes = min(ours.scratch_bytes, peer.scratch_bytes)
    source, target = ours.scratch_address, peer.scratch_address
    if local.maps_peers and (mapped := _map_slots(path.name, peer, metrics)) is not None:
        rate = mapped.copy_bytes_per_s(source, target, scratch_bytes)
        lane = Lane("shared_memory", known_by="its landing slots are mapped")
        path.mapped, path.is_measured, path.found = mapped, True, transport_over(lane, rate, local)
    elif scratch_bytes:
        path.new_probe = functools.partial(ProbeOutbox, source, target, scratch_bytes)
    else:
        path.is_measured = True
    return path


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

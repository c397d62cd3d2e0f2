"""The path of chunks to each inbound peer: packer, slot size, and link.

Owned by the transfer thread.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import msgspec

from kvconnect.engine.adapter import card_host
from kvconnect.engine.lanes import Traffic, Transport
from kvconnect.errors import EngineError, LayoutError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.outcome import Cause
from kvconnect.pack.packer import Packer
from kvconnect.pack.shared_memory import MappedMemory, this_machine
from kvconnect.peer.agreement import source_share
from kvconnect.peer.allow_list import AllowList, same_host
from kvconnect.peer.messages import Introduction
from kvconnect.plan.blocks import Share
from kvconnect.prefill.calibration import LinkMeter, ProbeOutbox, transport_over
from kvconnect.prefill.exponent_coding import ExponentCoding
from kvconnect.transfer.breaker import Breaker
from kvconnect.transfer.inbound_peers import InboundPeer, rank_name
from kvconnect.transfer.kept import Kept
from kvconnect.transfer.local import without_slots
from kvconnect.transfer.parts import TransferContext

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SendPath:
    """The path to one peer, made at its first fetch or lookup.

    ``who`` is the peer for people, ``name`` the engine's name of it. ``slot_bytes``: the largest chunk that
    fits the slots of both sides. ``share``: the tokens that both ranks keep. ``kept_packer``: makes, once,
    the packer of what has names, on the device or in rows of host memory; raises ``LayoutError`` where rows
    do not travel as blocks do. ``mapped``: the peer's landing slots, where they are memory of this machine;
    elsewhere the engine writes, and fetches wait until the link ``is_measured``. ``new_probe`` makes a
    calibration, ``probe`` is the one under way, ``calibrations`` counts those cut short. ``calibrated_s``:
    the seconds that a batch of so many bytes took in the last whole one. ``found``: the result of the
    calibration, or the engine's own statement without one; ``meter`` measures the link after that.
    ``coding`` chooses whether chunks are coded; None where the peer or this worker does not code.
    """

    who: str
    name: str
    packer: Packer
    slot_bytes: int
    share: Share
    kept_packer: Callable[[bool], Packer]
    found: Transport
    mapped: MappedMemory | None = None
    new_probe: Callable[[Traffic], ProbeOutbox] | None = None
    is_measured: bool = False
    probe: ProbeOutbox | None = None
    calibrated_s: Callable[[int], float] | None = None
    calibrations: Breaker = field(default_factory=Breaker)
    meter: LinkMeter | None = None
    coding: ExponentCoding | None = None

    def packer_of(self, kept: Kept | None) -> Packer:
        """The packer of blocks, or of what has names."""
        return self.packer if kept is None else self.kept_packer(kept.on_device)

    def next_probe(self, look_at_traffic: Callable[[], Traffic], now: float) -> ProbeOutbox | None:
        """A probe, if the link is to be measured now, for the first time or again."""
        is_due = not self.is_measured or (self.calibrations.failures and self.calibrations.may_try(now))
        if self.probe is not None or self.new_probe is None or not is_due:
            return None
        self.calibrations.tried()
        self.probe = self.new_probe(look_at_traffic())
        return self.probe

    def calibrated(self, error: str, found: Transport, metrics: Metrics) -> None:
        """Take the end of the probe, with an error or without; ``found`` is what it showed of the link.

        A probe that showed a lower rate than the one before changes nothing.
        """
        probe, self.probe = self.probe, None
        if error:
            metrics.failures.labels("calibration").inc()
        if error and not self.calibrations.failures:
            logger.warning(
                "the link to %s could not be measured, which is tried again when it asks for KV: %s",
                self.who,
                error,
            )
        if not self.is_measured or found.bytes_per_s > self.found.bytes_per_s:
            self.is_measured, self.found, self.meter = True, found, None
            self.calibrated_s = probe.seconds_of if probe is not None and probe.is_whole else None


class SendPaths:
    """Makes the paths to peers that ask for KV, and bounds the engine's connected peers."""

    def __init__(self, context: TransferContext, in_use: Callable[[], set[str]]) -> None:
        """``in_use`` returns the engine's peers that must stay connected."""
        self._config, self._local, self._metrics = context.config, context.local, context.metrics
        self._in_use = in_use
        self._allowed = AllowList(context.config.allow_peers)
        self._connected: OrderedDict[str, None] = OrderedDict()

    def path_to(self, inbound: InboundPeer) -> SendPath:
        """The path to a peer, made at its first fetch or lookup: a peer may only ask for the directory.

        Raises:
            LayoutError: one side has no slots, or the two caches do not fit; the text has every reason.
            PeerError: the engine cannot use the peer's card, or the card names a host that is not trusted.
        """
        path: SendPath | None = inbound.path
        if path is None:
            path = inbound.path = self._make_path(inbound.session.ours, inbound.peer)
            over = "shared memory" if path.mapped else self._local.engine.capabilities
            logger.info("%s fetches: over %s", inbound, over)
        if path.mapped is None:
            self.connect(inbound, path)
        return path

    def _make_path(self, ours: Introduction, peer: Introduction) -> SendPath:
        """Make the path to a peer.

        The engine's name of the peer contains a digest of its card: memory registered anew has a new name.
        """
        local, convert = self._local, self._config.convert_dtype
        card = hashlib.blake2b(peer.engine_card, digest_size=6)
        slot_bytes = min(ours.slot_bytes, peer.slot_bytes)
        if not slot_bytes:
            raise LayoutError(without_slots("decode" if ours.slot_bytes else "prefill"))
        packer = local.packer(ours, peer, "source", convert)

        def make_kept_packer(on_device: bool) -> Packer:
            table = local.table if on_device or local.kept is None else local.kept.table
            assert table is not None, "it was asked for rows"
            kept = msgspec.structs.replace(ours, table=table)
            made = local.packer(kept, peer, "source", convert, table)
            if made.chunker.wire != packer.chunker.wire:
                # The peer cuts its chunks by the wire of the blocks, computed from P's introduction.
                raise LayoutError(
                    "rows in the prefill node's host memory do not travel to this decode node as its blocks "
                    "do: nothing is fetched by name"
                )
            return made

        path = SendPath(
            who=rank_name(peer.engine_id, peer.rank),
            name=f"{peer.engine_id}/{peer.incarnation}/{peer.rank}/{card.hexdigest()}",
            packer=packer,
            slot_bytes=slot_bytes,
            share=source_share(ours, peer),
            kept_packer=functools.cache(make_kept_packer),
            found=transport_over(local.engine.capabilities.carries, 0.0, local),
        )
        scratch_bytes = min(ours.scratch_bytes, peer.scratch_bytes)
        source, target = ours.scratch_address, peer.scratch_address
        if local.maps_peers and (mapped := self._map_slots(path.who, peer)) is not None:
            rate = mapped.copy_bytes_per_s(source, target, scratch_bytes)
            lane = Transport("shared_memory", known_by="its landing slots are mapped")
            path.mapped, path.is_measured, path.found = mapped, True, transport_over(lane, rate, local)
            return path
        if local.coder is not None and peer.decodes:
            always = self._config.exponent_coding == "on"
            path.coding = ExponentCoding(local.coder, always, path.who, self._metrics)
        if scratch_bytes:
            path.new_probe = functools.partial(ProbeOutbox, source, target, scratch_bytes)
        else:
            path.is_measured = True
        return path

    def _map_slots(self, who: str, peer: Introduction) -> MappedMemory | None:
        """Map the landing slots of a peer of this machine; None where the engine has to write."""
        if peer.memory is None or not peer.memory.machine or peer.memory.machine != this_machine():
            return None
        try:
            return MappedMemory(peer.memory)
        except PeerError as error:
            self._metrics.failures.labels("shared_memory").inc()
            logger.warning(
                "the landing slots of %s are not mapped, so the engine writes them, which is slower: %s. Run "
                "both servers as one user, in one PID namespace",
                who,
                error,
            )
            return None

    def connect(self, inbound: InboundPeer, path: SendPath) -> None:
        """Connect the engine to a peer. Raises as ``path_to``."""
        if path.name not in self._connected:
            card = inbound.peer.engine_card
            self._check_host(inbound, card)
            try:
                self._local.engine.connect(path.name, card)
            except EngineError as error:
                raise PeerError(f"the engine cannot reach {path.who}: {error}", Cause.ENGINE) from error
            self._connected[path.name] = None
        self._connected.move_to_end(path.name)
        if len(self._connected) > self._config.max_peers:
            self._disconnect_idle(self._in_use() | {path.name})

    def _check_host(self, inbound: InboundPeer, card: bytes) -> None:
        """Refuse a card that names another host than the peer's: that host would receive the peer's KV."""
        named = card_host(card)
        is_own = not named or not inbound.host or same_host(named, inbound.host)
        if is_own or self._allowed.allows(named, None):
            return
        self._metrics.failures.labels("peer_not_trusted").inc()
        raise PeerError(
            f"the engine of {inbound} is at host {named[:256]}; accepted: the address that the connection "
            "comes from, and hosts in kv_connector_extra_config.allow_peers of the prefill node",
            Cause.NOT_TRUSTED,
        )

    def _disconnect_idle(self, in_use: Container[str]) -> None:
        for name in [name for name in self._connected if name not in in_use]:
            if len(self._connected) <= self._config.max_peers:
                return
            del self._connected[name]
            self._local.engine.disconnect(name)

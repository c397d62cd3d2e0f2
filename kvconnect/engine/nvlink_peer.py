"""What the NVLink engine knows of its peers: what of their memory is mapped here, and whether they live.

Owns the mappings and the way from a peer's address to ours. It must not know batches or streams.
"""

from __future__ import annotations

import logging

import numpy as np

from kvconnect.engine.base import Addresses, Span, SpanSet
from kvconnect.engine.ipc import Allocation, DeviceMemory
from kvconnect.engine.nvlink_card import NvlinkCard
from kvconnect.engine.process import ProcessWatch, own_identity
from kvconnect.engine.span_table import SpanTable
from kvconnect.errors import EngineError

log = logging.getLogger("kvconnect.engine.nvlink")

_LOOK_EVERY_S = 0.1


class Mappings:
    """Other processes' allocations that are mapped for one GPU: each once, however many peers name it."""

    def __init__(self, memory: DeviceMemory, device: int) -> None:
        self.device = device
        self._memory = memory
        self._known: dict[bytes, tuple[int, int]] = {}

    def reach(self, gpu: str) -> None:
        """Have this process's own memory on another GPU within reach. Raises ``EngineError``."""
        self._memory.reach(gpu, self.device)

    def take(self, allocation: Allocation) -> int:
        """Where the allocation is mapped, until ``give_back``. Raises ``EngineError``."""
        address, users = self._known.get(allocation.handle, (0, 0))
        if not users:
            address = self._memory.open(allocation, self.device)
        self._known[allocation.handle] = (address, users + 1)
        return address

    def give_back(self, allocation: Allocation) -> None:
        """End one use; the last one unmaps the allocation."""
        address, users = self._known.pop(allocation.handle)
        if users > 1:
            self._known[allocation.handle] = (address, users - 1)
            return
        try:
            self._memory.close(address, self.device)
        except EngineError as error:
            # Nobody can do more about it, and there may be others to unmap.
            log.warning("memory of another process stays mapped: %s", error)


class Peer:
    """A connected peer, whose memory is mapped until ``leave``.

    Attributes:
        in_flight: how many kernels may still use its memory.
        gone: why nothing can be sent to it any more; empty while it lives.

    Raises:
        EngineError: its memory cannot be reached from here.
    """

    def __init__(self, name: str, card: NvlinkCard, mappings: Mappings) -> None:
        self.name = name
        self.card = card
        self.in_flight = 0
        self.gone = ""
        self._mappings = mappings
        self._process = ProcessWatch(card.process)
        self._taken: list[Allocation] = []
        self._mapped = np.empty(0, dtype=np.int64)
        SpanSet().add([Span(address, length_bytes) for address, length_bytes, _ in card.spans])
        try:
            shifts = self._map()
        except EngineError:
            self.leave()
            raise
        self._table = SpanTable((span[:2] for span in card.spans), [shifts[span[2]] for span in card.spans])

    def translate(self, addresses: Addresses, length: Addresses) -> Addresses | int:
        """Where the peer's stretches are mapped here, or the index of the first that is not on its card.

        The addresses are of use until the next call.
        """
        if len(self._mapped) < len(addresses):
            # Kept from batch to batch: fresh memory of this size would cost more than writing to it.
            self._mapped = np.empty(len(addresses), dtype=np.int64)
        mapped = self._mapped[: len(addresses)]
        stray = self._table.translate(addresses, length, mapped)
        return mapped if stray is None else stray

    def look(self) -> bool:
        """Find out whether the peer's process still runs; says whether it was found dead just now."""
        if self.gone or not self._process.gone:
            return False
        self.gone = f"the process of peer {self.name!r} is gone"
        return True

    def leave(self) -> None:
        """Let go of the peer's memory. Idempotent."""
        self._process.close()
        while self._taken:
            self._mappings.give_back(self._taken.pop())

    def _map(self) -> list[int]:
        """How far each allocation's addresses here are from the peer's."""
        if self.card.process == own_identity():
            for gpu in {allocation.gpu for allocation in self.card.allocations}:
                self._mappings.reach(gpu)
            return [0] * len(self.card.allocations)
        shifts = []
        for allocation in self.card.allocations:
            shifts.append(self._mappings.take(allocation) - allocation.address)
            self._taken.append(allocation)
        return shifts


class PeerSet:
    """The peers of one GPU by name, and those that left but that kernels may still write to."""

    def __init__(self) -> None:
        self._mappings: Mappings | None = None
        self._leaving: list[Peer] = []
        self._look_at = 0.0
        self.known: dict[str, Peer] = {}

    @property
    def device(self) -> int | None:
        """Number of the GPU that peers' memory is mapped for; None before ``map_for``."""
        return None if self._mappings is None else self._mappings.device

    @property
    def num_leaving(self) -> int:
        """How many peers that left have memory mapped still."""
        return len(self._leaving)

    def map_for(self, memory: DeviceMemory, device: int) -> None:
        """From now on map peers' memory for this GPU."""
        self._mappings = Mappings(memory, device)

    def meet(self, name: str, card: NvlinkCard) -> Peer | None:
        """Know a peer under a name; returns who had the name before, and left.

        Raises:
            EngineError: its memory cannot be reached, or it is not known from which GPU; then nothing has
                changed.
        """
        if self._mappings is None:
            raise EngineError(f"peer {name!r} cannot be met before memory of a GPU is registered here")
        # Mapped before the other one leaves: what both cards name stays mapped.
        fresh = Peer(name, card, self._mappings)
        known = self.forget(name)
        self.known[name] = fresh
        return known

    def forget(self, name: str) -> Peer | None:
        """Forget a peer, and return it if it was known."""
        known = self.known.pop(name, None)
        if known is not None:
            self._leaving.append(known)
        return known

    def look(self, now: float) -> list[Peer]:
        """Every now and then, find out whose process has died; returns those."""
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_EVERY_S
        return [peer for peer in self.known.values() if peer.look()]

    def let_go(self) -> None:
        """Unmap what no kernel uses any more of those that left or died."""
        for peer in [*self._leaving, *(peer for peer in self.known.values() if peer.gone)]:
            if not peer.in_flight:
                peer.leave()
        self._leaving = [peer for peer in self._leaving if peer.in_flight]

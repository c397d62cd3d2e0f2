"""A node that has a key and keeps to no rule: what it says, and what it writes into the slots of others.

The halves behind it are the real ones, so that what it does comes where it can hurt: to what peers asked of
it, and to what they asked of others at the same time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvconnect.engine.base import Batch
from tests.simulator.channel import SimChannel
from tests.simulator.content import noise
from tests.simulator.lies import Liar
from tests.simulator.scenario import FAULTS_S
from tests.simulator.world import START_S, World

if TYPE_CHECKING:
    from tests.simulator.network import Network
    from tests.simulator.worker import SimWorker

_STRAY = 0.3
_WAITS_S = (0.0, 0.0, 0.0005, 0.003, 0.05, 1.0)


def is_lying(world: World) -> bool:
    """It ends with all that goes wrong."""
    return world.now < START_S + FAULTS_S


class LyingChannel(SimChannel):
    """The channel of a stranger's worker: see ``Liar``."""

    def __init__(self, network: Network, host: str, port: int, wake: Callable[[], None], liar: Liar) -> None:
        super().__init__(network, host, port, wake)
        self._liar = liar
        network.listeners.append(self._overhear)

    def send(self, link: str, data: bytes) -> bool:
        """See ``Channel``."""
        world = self._network.world
        if not is_lying(world):
            return super().send(link, data)
        for after_s, frame in self._liar.instead_of(data, to_decode=link.startswith("in:")):
            if after_s:
                world.after(after_s, functools.partial(self._say, link, frame))
            else:
                super().send(link, frame)
        return True

    def _say(self, link: str, frame: bytes) -> None:
        if not self.closed and not self.stopped:
            super().send(link, frame)

    def _overhear(self, who: SimChannel, link: str, data: bytes) -> None:
        """Somebody says something to a decode node that may listen to us as well, or to a prefill node."""
        network = self._network
        if self.closed or who.host == self.host or not is_lying(network.world):
            return
        opener = network.opener_of(link)
        lies = self._liar.overhear(data, to_decode=opener is not None)
        for far in network.links_between(opener, self) if lies and opener is not None else ():
            for after_s, frame in lies:
                network.world.after(after_s, functools.partial(self._say, far, frame))


class Scribbler:
    """Writes into landing slots, soon after somebody else did: what it likes, or what another slot has."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.written = 0

    def saw(self, batch: Batch, target: SimWorker) -> None:
        """Something was written to a worker's memory."""
        rng, pool = self._rng, target.landing
        if not pool.slots or not is_lying(self._world) or rng.random() >= _STRAY:
            return
        touched = [slot.address for slot in pool.slots if slot.address == batch.target]
        if touched:
            address = rng.choice(touched)
            self._world.after(rng.choice(_WAITS_S), lambda: self._scribble(target, address))

    def _scribble(self, target: SimWorker, address: int) -> None:
        rng, memory = self._rng, target.memory
        length = target.slot_bytes
        content = noise(rng.randrange(1 << 16), length)
        if rng.random() < 0.3:
            content = memory.read(rng.choice(memory.landing), length)
        some = rng.randint(1, length)
        self.written += 1
        self._world.note("stranger", "writes", target.who, memory.landing.index(address), some)
        memory.write(address, content[:some])

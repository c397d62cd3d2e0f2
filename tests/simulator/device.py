"""The device of a simulated node: kernels run in order, later than they are launched.

What the serving stack computes is in memory once its kernel has run, and not before; packing and unpacking
are kernels too, on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvconnect.pack.batches import PackTicket, StagedChunk
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import Introduction
from kvconnect.transfer.local import Local
from tests.simulator.world import World
from tests.transfer.kernels import SlowTicket

_OF_BLOCKS = 2
"""The further arguments of a packer of held blocks."""


class Stream:
    """Kernels in order. ``wake`` is called after each.

    ``pending`` are the chunks that wait to be packed (``source``, or ``kept`` under names) or unpacked
    (``target``).
    """

    def __init__(self, world: World, kernel_s: float, wake: Callable[[], None]) -> None:
        self.is_dead = False
        self.pending: list[tuple[str, StagedChunk]] = []
        self._world = world
        self._kernel_s = kernel_s
        self._wake = wake
        self._ends = 0.0
        self._launched = 0
        self._ran = 0

    def launch(self, kernel: Callable[[], None], cost: float = 1.0) -> None:
        """Run something when all that was launched before has run."""
        world = self._world
        self._ends = max(self._ends, world.now) + cost * self._kernel_s * (0.5 + world.random.random())
        self._launched += 1

        def run() -> None:
            if not self.is_dead:
                kernel()
                self._ran += 1
                self._wake()

        world.at(self._ends, run)

    def mark(self) -> Callable[[], bool]:
        """What says whether all that was launched so far has run."""
        number = self._launched
        return lambda: self._ran >= number


class SimPacker:
    """A packer whose kernels run on a stream. The rest of it is the real one's.

    ``fills`` is told of every slot that is packed, ``takes`` of every one that is unpacked. ``sides`` are
    what is packed, held pages or what is ``kept`` under names, and what is filled.
    """

    is_blocking = False

    def __init__(
        self,
        packer: Packer,
        stream: Stream,
        fills: Callable[[int], None],
        takes: Callable[[int], None],
        sides: tuple[str, str],
    ) -> None:
        self._packer = packer
        self._source, self._target = sides
        self._stream = stream
        self._fills = fills
        self._takes = takes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packer, name)

    def pack(self, slot: int, staged: StagedChunk, seed: int, *coder: None) -> SlowTicket:
        self._fills(slot)
        return self._launch(self._source, staged, lambda: self._packer.pack(slot, staged, seed, *coder))

    def unpack(self, slot: int, staged: StagedChunk, seed: int, *coder: None) -> SlowTicket:
        self._takes(slot)
        return self._launch(self._target, staged, lambda: self._packer.unpack(slot, staged, seed, *coder))

    def _launch(self, side: str, staged: StagedChunk, kernel: Callable[[], PackTicket]) -> SlowTicket:
        ticket, what = SlowTicket(kernel, staged), (side, staged)
        self._stream.pending.append(what)

        def run() -> None:
            self._stream.pending.remove(what)
            ticket.run()

        self._stream.launch(run)
        return ticket


@dataclass(eq=False)
class SimLocal(Local):
    """A worker's memory, with packers that take their time."""

    packing: Stream = field(kw_only=True)
    fills: Callable[[int], None] = field(kw_only=True)
    takes: Callable[[int], None] = field(kw_only=True)

    def packer(self, source: Introduction, target: Introduction, *args: Any, **kwargs: Any) -> Packer:
        packer = super().packer(source, target, *args, **kwargs)
        # What is fetched by name, and rows that loads fill, have packers with a table of their own.
        sides = ("kept", "parked") if len(args) > _OF_BLOCKS else ("source", "target")
        return SimPacker(packer, self.packing, self.fills, self.takes, sides)  # type: ignore[return-value]

"""Packs and unpacks that take as long as a test wants, like kernels on a busy device."""

from __future__ import annotations

from unittest import mock

from kvconnect.errors import LocalError
from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.packer import Packer


class SlowTicket:
    """A kernel that was launched; its bytes move when it is told to run."""

    def __init__(self, launch, staged: StagedChunk) -> None:
        self.staged = staged
        self._launch = launch
        self._ticket = None

    def run(self) -> None:
        self._ticket = self._launch()

    @property
    def done(self) -> bool:
        return self._ticket is not None

    @property
    def digest(self) -> int:
        if self._ticket is None:
            raise LocalError("the digest of a kernel that has not run")
        return self._ticket.digest

    @property
    def has_failed(self) -> bool:
        return self._ticket.has_failed

    def wait(self) -> None:
        raise LocalError("nobody may wait for a kernel")


class SlowKernels:
    """While this is open, kernels of these sides (``source`` packs, ``target`` unpacks) wait for ``finish``.

    Unless ``slow`` is set to False: then they run when they are launched.
    """

    def __init__(self, *sides: str) -> None:
        self.pending: list[SlowTicket] = []
        self.slow = True
        self._sides = sides

    def _slowed(self, launch):
        def launch_later(packer: Packer, *given):
            if not self.slow or packer._side not in self._sides:
                return launch(packer, *given)
            ticket = SlowTicket(lambda: launch(packer, *given), given[1])
            self.pending.append(ticket)
            return ticket

        return launch_later

    def touched(self) -> set[int]:
        """The kernel blocks that kernels which have not run move from or to."""
        staged = [ticket.staged for ticket in self.pending]
        return {int(block) for one in staged for blocks in one.blocks.values() for block in blocks}

    def finish(self, count: int | None = None) -> int:
        """Let the oldest kernels run, all of them or some; how many there were."""
        done = self.pending[:count]
        del self.pending[: len(done)]
        for ticket in done:
            ticket.run()
        return len(done)

    def __enter__(self) -> SlowKernels:
        slowed = {name: self._slowed(getattr(Packer, name)) for name in ("pack", "unpack")}
        self._patch = mock.patch.multiple(Packer, **slowed)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

"""What the cases of the engine suite share: a driver that keeps the account, and the fixtures.

Owns the rule that every batch is answered exactly once. It must not know what a case checks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvconnect.engine.base import Batch, Completion, Engine
from tests.engine.engine_peer import MakeEngine, PeerProcess, random_bytes, span_of, wait_until

MIB = 1 << 20
HANG_S = 20.0
BUFFER_BYTES = 4 * MIB


class Driver:
    """An engine of this process with one registered buffer, and the account of its batches."""

    def __init__(self, engine: Engine, length_bytes: int = BUFFER_BYTES, seed: int = 1) -> None:
        self.engine = engine
        self.buffer = random_bytes(length_bytes, seed)
        self.span = span_of(self.buffer)
        self.address = self.span.address
        self.engine.register([self.span])
        self.answers: dict[int, Completion] = {}
        self.pending: set[int] = set()
        self._next_id = 1

    def submit(
        self,
        peer: str,
        local: int,
        remote: int,
        length: int,
        timeout_s: float = 10.0,
    ) -> int:
        """Submit a copy between absolute addresses; returns the batch id."""
        batch_id, self._next_id = self._next_id, self._next_id + 1
        self.engine.submit(Batch(batch_id, peer, local, remote, length, timeout_s))
        self.pending.add(batch_id)
        return batch_id

    def poll(self) -> None:
        """Poll once. Every answer must belong to a pending batch: none twice, none unasked."""
        for answer in self.engine.poll():
            assert answer.batch_id in self.pending, f"answered twice or never asked: {answer}"
            assert answer.quiescent or not answer.ok, f"ok but not quiescent: {answer}"
            assert answer.ok == (not answer.error), f"an error text on success, or none: {answer}"
            self.pending.remove(answer.batch_id)
            self.answers[answer.batch_id] = answer

    def in_flight(self) -> int:
        """Poll once; how many batches are still unanswered."""
        self.poll()
        return len(self.pending)

    def wait(self, batch_id: int, bound_s: float = HANG_S) -> Completion:
        """Poll until one batch is answered."""

        def answered() -> bool:
            self.poll()
            return batch_id in self.answers

        assert wait_until(answered, bound_s, 0.0005), f"batch {batch_id} hangs for {bound_s:g} s"
        return self.answers[batch_id]

    def copy(
        self, peer: str, remote: int, length: int = 4096, offset: int = 0, timeout_s: float = 10.0
    ) -> Completion:
        """One copy between the buffer at ``offset`` and ``remote``, waited for."""
        batch_id = self.submit(peer, self.address + offset, remote, length, timeout_s)
        return self.wait(batch_id, timeout_s + HANG_S)


@contextmanager
def met(make_engine: MakeEngine, length_bytes: int) -> Iterator[tuple[Driver, PeerProcess, int]]:
    """An engine, and ``peer`` that it is connected to, with a registered ``buffer`` and its address."""
    peer, driver = PeerProcess(make_engine), Driver(make_engine(), length_bytes)
    try:
        remote = peer.allocate("buffer", length_bytes)
        peer.register("buffer")
        driver.engine.connect("peer", peer.card())
        yield driver, peer, remote
    finally:
        peer.close()
        driver.engine.close()


class EngineCases:
    """What a suite of cases needs to know of the engine, and its fixtures.

    Attributes:
        make_engine: makes the engine under test; called here and in the peer's process.
        settle_s: how long after a batch's timeout the engine may take to answer it.
    """

    make_engine: MakeEngine
    settle_s: float = 6.0

    @classmethod
    def new_peer(cls) -> PeerProcess:
        """A fresh peer."""
        return PeerProcess(cls.make_engine)

    def silent_card(self, port: int) -> bytes | None:
        """A card that leads to ``127.0.0.1:port``, where no process answers; None if there is no such."""
        return None

    # ---- fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def shared_peer(cls) -> Iterator[PeerProcess]:
        """A peer for the cases that leave it unharmed."""
        peer = cls.new_peer()
        yield peer
        peer.close()

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = Driver(self.make_engine())
        yield driver
        driver.engine.close()

    @pytest.fixture
    def own_peer(self) -> Iterator[PeerProcess]:
        """A peer that the case may kill."""
        peer = self.new_peer()
        yield peer
        peer.close()

    def _meet(
        self, driver: Driver, peer: PeerProcess, name: str = "peer", length_bytes: int = BUFFER_BYTES
    ) -> int:
        """Give the peer a fresh registered buffer of zeros, and connect; returns its address."""
        buffer = f"{name}-{time.monotonic_ns()}"
        address: int = peer.allocate(buffer, length_bytes)
        peer.register(buffer)
        driver.engine.connect(name, peer.card())
        self._buffer = buffer
        return address

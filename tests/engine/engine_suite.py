"""The contract of ``kvconnect.engine.base.Engine`` as a suite that every engine must pass.

A new engine subclasses ``EngineSuite``, defines how to make an engine, and inherits all cases. The peer
is always another process, which is killed, stopped and restarted for real. Cases that need what an
engine does not announce are skipped by its own declaration. No case asserts a speed: bounds only
distinguish a slow engine from one that hangs.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvconnect.errors import EngineError, LocalError
from tests.engine.engine_driver import BUFFER_BYTES, HANG_S, Driver, met
from tests.engine.engine_faults import FaultCases
from tests.engine.engine_peer import PeerProcess, random_bytes, span_of, wait_until

__all__ = ["Driver", "EngineSuite", "met", "scattered_copies"]


class EngineSuite(FaultCases):
    """Subclass it as ``TestX`` and set ``make_engine`` to a module-level function."""

    # ---- bytes

    def test_scattered_copies_match_brute_force(self, driver: Driver, shared_peer: PeerProcess) -> None:
        """One after the other and several at a time, of odd lengths and of none."""
        far_address = shared_peer.allocate("scattered", BUFFER_BYTES, seed=2)
        shared_peer.register("scattered")
        driver.engine.connect("peer", shared_peer.card())
        near, far = driver.buffer.copy(), random_bytes(BUFFER_BYTES, 2)
        most = driver.engine.capabilities.max_batches_per_peer
        for source, target, length in zip(*scattered_copies(BUFFER_BYTES, 300, seed=3), strict=True):
            far[target : target + length] = near[source : source + length]
            assert wait_until(lambda: driver.in_flight() < most, HANG_S, 0.0005)
            driver.submit("peer", driver.address + source, far_address + target, length)
        assert wait_until(lambda: not driver.in_flight(), HANG_S)
        assert all(answer.ok for answer in driver.answers.values())
        assert np.array_equal(shared_peer.content("scattered"), far)
        assert np.array_equal(driver.buffer, near)

    # ---- registration

    def test_unregistered_local_memory_fails(self, driver: Driver, shared_peer: PeerProcess) -> None:
        remote = self._meet(driver, shared_peer)
        stranger = random_bytes(4096, 5)
        answer = driver.wait(driver.submit("peer", span_of(stranger).address, remote, 4096))
        assert not answer.ok
        assert answer.quiescent
        beyond = driver.copy("peer", remote, length=4096, offset=BUFFER_BYTES - 4095)
        assert not beyond.ok
        assert not shared_peer.content(self._buffer).any()
        assert driver.copy("peer", remote).ok

    def test_unregistered_remote_memory_fails_and_the_next_batch_works(
        self, driver: Driver, shared_peer: PeerProcess
    ) -> None:
        secret = f"secret-{time.monotonic_ns()}"
        hidden = shared_peer.allocate(secret, 65536)
        remote = self._meet(driver, shared_peer)
        assert not driver.copy("peer", hidden).ok
        assert not shared_peer.content(secret).any()
        good = driver.copy("peer", remote)
        assert good.ok, good
        assert np.array_equal(shared_peer.content(self._buffer)[:4096], driver.buffer[:4096])

    def test_overlapping_registration_is_refused_whole(
        self, driver: Driver, shared_peer: PeerProcess
    ) -> None:
        remote = self._meet(driver, shared_peer)
        fresh = random_bytes(8192, 6)
        good = span_of(fresh)
        for bad in (
            span_of(driver.buffer, 4096, 4096),
            span_of(driver.buffer, 0, 0),
            span_of(fresh, 8191, 2),
        ):
            with pytest.raises(EngineError):
                driver.engine.register([good, bad])
            sent = driver.submit("peer", good.address, remote, 8192)
            assert not driver.wait(sent).ok, "a span stayed registered after its batch was refused"
        driver.engine.register([good])
        sent = driver.submit("peer", good.address, remote, 8192)
        assert driver.wait(sent).ok

    def test_unregistered_again_and_registered_again(self, driver: Driver, shared_peer: PeerProcess) -> None:
        remote = self._meet(driver, shared_peer)
        assert driver.copy("peer", remote).ok
        stranger = span_of(driver.buffer, 1, 10)
        with pytest.raises(EngineError):
            driver.engine.unregister([driver.span, stranger])
        assert driver.copy("peer", remote).ok, "a refused unregister took something back"
        driver.engine.unregister([driver.span])
        assert not driver.copy("peer", remote).ok
        driver.engine.register([driver.span])
        assert driver.copy("peer", remote).ok

    # ---- the caller's bugs

    def test_misuse_is_refused(self, driver: Driver, shared_peer: PeerProcess) -> None:
        remote = self._meet(driver, shared_peer)
        bounds, here = driver.engine.capabilities, driver.address
        with pytest.raises(LocalError, match="no such peer"):
            driver.submit("nobody", here, remote, 1)
        for length in (-1, bounds.max_bytes + 1):
            with pytest.raises(LocalError, match="bytes"):
                driver.submit("peer", here, remote, length)
        for card in (b"", b"\x00\xff garbage", b"\x80"):
            with pytest.raises(EngineError):
                driver.engine.connect("other", card)
        driver.poll()
        assert not driver.answers
        assert driver.copy("peer", remote).ok

    # ---- the end of batches and of the engine

    def test_each_id_comes_back_exactly_once(self, driver: Driver, shared_peer: PeerProcess) -> None:
        remotes = {name: self._meet(driver, shared_peer, name) for name in ("one", "two")}
        # A card is current only until the peer registers more.
        for name in remotes:
            driver.engine.connect(name, shared_peer.card())
        limit = driver.engine.capabilities.max_batches_per_peer
        asked = 0
        for turn in range(60):
            name = "one" if turn % 2 else "two"
            bad = turn % 7 == 3
            if len(driver.pending) >= limit:
                driver.wait(min(driver.pending))
            address = driver.address if not bad else 1 << 45
            driver.submit(name, address, remotes[name], 16384)
            asked += 1
        assert wait_until(lambda: not driver.in_flight(), HANG_S)
        assert len(driver.answers) == asked
        assert sum(answer.ok for answer in driver.answers.values()) == asked - len(range(3, 60, 7))
        time.sleep(0.1)
        driver.poll()

    def test_disconnect_answers_what_is_in_flight(self, driver: Driver, shared_peer: PeerProcess) -> None:
        remote = self._meet(driver, shared_peer)
        assert driver.copy("peer", remote).ok
        batch_id = driver.submit("peer", driver.address, remote, BUFFER_BYTES)
        driver.engine.disconnect("peer")
        driver.engine.disconnect("peer")
        driver.wait(batch_id)
        with pytest.raises(LocalError):
            driver.submit("peer", driver.address, remote, 16)
        remote = self._meet(driver, shared_peer)
        assert driver.copy("peer", remote).ok

    def test_close_is_bounded_and_idempotent(self, own_peer: PeerProcess) -> None:
        driver = Driver(self.make_engine())
        remote = self._meet(driver, own_peer)
        assert driver.copy("peer", remote).ok
        own_peer.stop()
        try:
            driver.submit("peer", driver.address, remote, BUFFER_BYTES, 30.0)
            begun = time.monotonic()
            driver.engine.close()
            assert time.monotonic() - begun < 10.0
            driver.engine.close()
        finally:
            own_peer.resume()
        driver.poll()
        assert not driver.pending, "a batch was never answered"
        assert driver.engine.poll() == []

    def test_idle_costs_next_to_nothing(self, driver: Driver, shared_peer: PeerProcess) -> None:
        remote = self._meet(driver, shared_peer)
        assert driver.copy("peer", remote).ok
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.3, "an idle engine burns a core"
        before = time.process_time()
        for _ in range(1000):
            assert driver.engine.poll() == []
        assert time.process_time() - before < 1.0


def scattered_copies(length_bytes: int, count: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Source offsets, disjoint target offsets and lengths, odd ones and zeros among them."""
    rng = np.random.default_rng(seed)
    slot = length_bytes // count
    length = rng.integers(0, slot - 64, count)
    length[:3] = (0, 1, slot - 64)
    target = rng.permutation(count) * slot + rng.integers(0, 64, count)
    source = rng.integers(0, length_bytes - slot, count)
    return source.tolist(), target.tolist(), length.tolist()

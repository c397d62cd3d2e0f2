"""The cases of the engine suite in which a peer dies, stops, sends nothing, refuses or restarts."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from tests.engine.engine_driver import BUFFER_BYTES, HANG_S, MIB, Driver, EngineCases, met
from tests.engine.engine_peer import PeerProcess


class FaultCases(EngineCases):
    """A peer that does not behave fails its own batches, in time and once, and no others."""

    def test_a_killed_peer_fails_once_and_hurts_no_other(
        self, driver: Driver, own_peer: PeerProcess, shared_peer: PeerProcess
    ) -> None:
        doomed = self._meet(driver, own_peer, "doomed")
        healthy = self._meet(driver, shared_peer, "healthy")
        assert driver.copy("doomed", doomed, MIB).ok
        assert driver.copy("healthy", healthy).ok
        killer = threading.Timer(0.05, own_peer.kill)
        killer.start()
        begun = time.monotonic()
        while True:
            last = driver.copy("doomed", doomed, BUFFER_BYTES, timeout_s=5.0)
            if not last.ok:
                break
            assert time.monotonic() - begun < HANG_S, "transfers to a dead peer succeed"
        killer.join()
        assert time.monotonic() - begun < 5.0 + self.settle_s + HANG_S / 2
        for _ in range(3):
            answer = driver.copy("healthy", healthy, timeout_s=5.0)
            assert answer.ok, answer
        again = driver.copy("doomed", doomed, timeout_s=3.0)
        assert not again.ok
        assert not driver.pending

    def test_a_cancelled_batch_ends_quiescent_and_hurts_no_other_to_its_peer(
        self, driver: Driver, shared_peer: PeerProcess
    ) -> None:
        remote = self._meet(driver, shared_peer)
        assert driver.copy("peer", remote).ok
        most = min(6, driver.engine.capabilities.max_batches_per_peer - 1)
        for cancelled in range(most):
            # Each to a part of its own, so that one that was lost is seen.
            size = BUFFER_BYTES // most // 4096 * 4096
            batches = [
                driver.submit("peer", driver.address + part * size, remote + part * size, size)
                for part in range(most)
            ]
            # Once more, and for a batch that there is not: neither is answered.
            for batch_id in (batches[cancelled], batches[cancelled], 424242):
                driver.engine.cancel(batch_id)
            begun = time.monotonic()
            after = driver.copy("peer", remote)
            answers = [driver.wait(batch) for batch in batches]
            assert after.ok, after
            assert [answer.error for answer in answers if not answer.ok] in ([], [answers[cancelled].error])
            assert answers[cancelled].quiescent, answers[cancelled]
            driver.engine.cancel(batches[cancelled])
            driver.poll()
            assert time.monotonic() - begun < HANG_S
        assert np.array_equal(shared_peer.content(self._buffer)[:4096], driver.buffer[:4096])

    def test_a_stopped_peer_is_answered_and_delays_no_other(
        self, driver: Driver, own_peer: PeerProcess, shared_peer: PeerProcess
    ) -> None:
        frozen = self._meet(driver, own_peer, "frozen")
        name = self._buffer
        healthy = self._meet(driver, shared_peer, "healthy")
        assert driver.copy("frozen", frozen).ok
        assert driver.copy("healthy", healthy).ok
        own_peer.stop()
        try:
            begun = time.monotonic()
            stuck = driver.submit("frozen", driver.address, frozen, BUFFER_BYTES, timeout_s=2.0)
            rounds = self._healthy_rounds(driver, healthy, stuck, 2.0)
            assert rounds >= 3, "a stopped peer holds up a healthy one"
            assert time.monotonic() - begun < 2.0 + self.settle_s + 3.0
            answer, sent = driver.answers[stuck], driver.buffer.copy()
            # What is called quiescent takes no byte that the source gets from now on.
            driver.buffer[:] = ~sent
        finally:
            own_peer.resume()
        if answer.ok:
            # One-sided writes need no help of the peer's processor, but then they must be there.
            assert np.array_equal(own_peer.content(name), sent)
        elif answer.quiescent:
            time.sleep(0.7)
            assert not (own_peer.content(name) == driver.buffer)[4096:].any(), "a later source byte arrived"

    def test_a_silent_peer_is_answered_and_delays_no_other(
        self, driver: Driver, shared_peer: PeerProcess
    ) -> None:
        healthy = self._meet(driver, shared_peer, "healthy")
        assert driver.copy("healthy", healthy).ok
        with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
            held: list[socket.socket] = []
            thread = threading.Thread(target=_accept_all, args=(listener, held), daemon=True)
            thread.start()
            try:
                card = self.silent_card(listener.getsockname()[1])
                if card is None:
                    pytest.skip("this engine's card does not lead to a TCP listener")
                driver.engine.connect("silent", card)
                begun = time.monotonic()
                stuck = driver.submit("silent", driver.address, 1 << 20, 4096, timeout_s=2.0)
                rounds = self._healthy_rounds(driver, healthy, stuck, 2.0)
                assert rounds >= 3, "a silent peer holds up a healthy one"
                assert not driver.answers[stuck].ok
                # Nothing is in its memory's way, so nothing is to be waited for after the timeout.
                assert driver.answers[stuck].seconds < 2.0 + 1.5
                assert time.monotonic() - begun < 2.0 + self.settle_s + 3.0
            finally:
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                thread.join(timeout=2.0)
                for sock in held:
                    sock.close()

    def _healthy_rounds(self, driver: Driver, remote: int, stuck: int, timeout_s: float) -> int:
        """Transfers that a healthy peer completes until the stuck batch is answered (at least 5)."""
        rounds = 0
        until = time.monotonic() + timeout_s + self.settle_s + 5.0
        while stuck not in driver.answers or rounds < 5:
            assert time.monotonic() < until, "the batch to a peer that does not answer hangs"
            begun = time.monotonic()
            answer = driver.copy("healthy", remote, timeout_s=5.0)
            assert answer.ok, answer
            assert time.monotonic() - begun < 3.0
            rounds += 1
            time.sleep(0.05)
        return rounds

    def test_reconnect_after_a_restart(self, driver: Driver, own_peer: PeerProcess) -> None:
        remote = self._meet(driver, own_peer)
        assert driver.copy("peer", remote).ok
        own_peer.restart_engine()
        remote = self._meet(driver, own_peer)
        assert driver.copy("peer", remote).ok, "after a restart of the engine"
        own_peer.kill()
        assert not driver.copy("peer", remote, BUFFER_BYTES, timeout_s=3.0).ok
        successor = self.new_peer()
        try:
            remote = self._meet(driver, successor)
            answer = driver.copy("peer", remote, MIB)
            assert answer.ok, f"after a restart of the process: {answer}"
            assert np.array_equal(successor.content(self._buffer)[:MIB], driver.buffer[:MIB])
        finally:
            successor.close()


class QuietCases(EngineCases):
    """An engine over TCP knows when memory is quiescent after a peer that has read only a part of a batch."""

    def test_the_death_of_a_peer_is_proven_quiet(self) -> None:
        with met(self.make_engine, 32 * MIB) as (driver, peer, remote):
            assert driver.copy("peer", remote).ok
            peer.stop()
            batch_id = driver.submit("peer", driver.address, remote, 32 * MIB)
            driver.poll()
            time.sleep(0.1)
            peer.kill()
            answer = driver.wait(batch_id)
            assert (answer.ok, answer.quiescent) == (False, True), answer

    def test_a_timeout_is_not_called_quiet(self) -> None:
        """What the kernel holds for a stopped peer lands when it wakes; new batches do not wait for it."""
        with met(self.make_engine, 32 * MIB) as (driver, peer, remote):
            assert driver.copy("peer", remote).ok
            peer.stop()
            answer = driver.copy("peer", remote, 32 * MIB, timeout_s=0.5)
            assert (answer.ok, answer.quiescent) == (False, False)
            peer.resume()
            assert driver.copy("peer", remote).ok


def _accept_all(listener: socket.socket, held: list[socket.socket]) -> None:
    with suppress(OSError):
        while True:
            held.append(listener.accept()[0])

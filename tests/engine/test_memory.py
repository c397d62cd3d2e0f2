"""The memory engine against the contract of all engines, and its own controls."""

from __future__ import annotations

import os
import socket
import struct

import msgspec
import numpy as np
import pytest

from kvconnect.engine import memory_wire
from kvconnect.engine.base import Engine, Verb
from kvconnect.engine.memory import MemoryCard, MemoryEngine
from kvconnect.errors import EngineError
from kvconnect.testing.engine_peer import PeerProcess
from kvconnect.testing.engine_suite import Driver, EngineSuite


def make_engine() -> Engine:
    return MemoryEngine()


class TestMemoryEngine(EngineSuite):
    make_engine = staticmethod(make_engine)
    settle_s = 1.0

    def silent_card(self, port: int) -> bytes | None:
        # The pid of another process, or the engine would look for it within this one.
        return msgspec.msgpack.encode(MemoryCard(os.getpid() + 1, b"x" * 16, "127.0.0.1", port))


PAGE = 4096


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestControlsWithinOneProcess:
    """Two engines of this process on a virtual clock: no thread, no socket, no waiting."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def sender(self, clock: Clock):
        driver = Driver(MemoryEngine(listen=False, clock=clock), 16 * PAGE, seed=1)
        yield driver
        driver.engine.close()

    @pytest.fixture
    def target(self, clock: Clock, sender: Driver):
        driver = Driver(MemoryEngine(listen=False, clock=clock), 16 * PAGE, seed=2)
        driver.buffer[:] = 0
        sender.engine.connect("target", driver.engine.card())
        yield driver
        driver.engine.close()

    def send(self, sender: Driver, target: Driver, pages: int = 2, timeout_s: float = 10.0) -> int:
        offsets = np.arange(pages) * PAGE
        # Sources reversed, so that nothing can be joined into one copy.
        return sender.submit(
            "target",
            Verb.WRITE,
            sender.address + offsets[::-1],
            target.address + offsets,
            np.full(pages, PAGE),
            timeout_s,
        )

    def expected(self, sender: Driver, pages: int = 2) -> np.ndarray:
        return sender.buffer[: pages * PAGE].reshape(pages, PAGE)[::-1].reshape(-1)

    def test_bytes_move_only_in_poll(self, sender: Driver, target: Driver) -> None:
        batch_id = self.send(sender, target)
        assert not target.buffer.any()
        sender.poll()
        assert sender.answers[batch_id].ok
        assert np.array_equal(target.buffer[: 2 * PAGE], self.expected(sender))
        assert not target.buffer[2 * PAGE :].any()

    def test_hold_keeps_bytes_and_answers_until_release(
        self, sender: Driver, target: Driver, clock: Clock
    ) -> None:
        sender.engine.hold()
        batch_id = self.send(sender, target)
        clock.now += 5
        sender.poll()
        assert sender.pending == {batch_id}
        assert not target.buffer.any()
        sender.engine.release()
        sender.poll()
        assert sender.answers[batch_id].ok
        assert sender.answers[batch_id].seconds == pytest.approx(5.0)

    def test_a_held_batch_times_out_by_the_clock(self, sender: Driver, target: Driver, clock: Clock) -> None:
        sender.engine.hold()
        batch_id = self.send(sender, target, timeout_s=3.0)
        clock.now += 2.9
        sender.poll()
        assert sender.pending
        clock.now += 0.2
        sender.poll()
        assert not sender.answers[batch_id].ok
        assert sender.answers[batch_id].quiet
        sender.engine.release()
        sender.poll()
        assert not target.buffer.any(), "a batch that timed out moved bytes later"

    def test_fail_next_takes_one_batch_only(self, sender: Driver, target: Driver) -> None:
        sender.engine.fail_next(quiet=True, error="as asked")
        bad, good = self.send(sender, target), self.send(sender, target)
        sender.poll()
        assert (sender.answers[bad].ok, sender.answers[bad].quiet) == (False, True)
        assert sender.answers[bad].error == "as asked"
        assert sender.answers[good].ok
        assert sender.engine.land_late() == 0

    def test_a_failure_that_is_not_quiet_can_land_late(self, sender: Driver, target: Driver) -> None:
        sender.engine.fail_next(quiet=False)
        bad = self.send(sender, target)
        sender.poll()
        assert (sender.answers[bad].ok, sender.answers[bad].quiet) == (False, False)
        assert not target.buffer.any()
        sender.buffer[:] = 77
        assert sender.engine.land_late() == 1
        assert (target.buffer[: 2 * PAGE] == 77).all(), "late writes take what the source holds then"

    def test_delay_next_waits_by_the_clock(self, sender: Driver, target: Driver, clock: Clock) -> None:
        sender.engine.delay_next(1.5)
        slow, fast = self.send(sender, target), self.send(sender, target)
        sender.poll()
        assert sender.pending == {slow}
        assert sender.answers[fast].ok
        clock.now += 1.6
        sender.poll()
        assert sender.answers[slow].ok

    def test_cut_next_moves_so_much_and_fails(self, sender: Driver, target: Driver) -> None:
        sender.engine.cut_next(PAGE + 100, quiet=False)
        batch_id = self.send(sender, target)
        sender.poll()
        answer = sender.answers[batch_id]
        assert (answer.ok, answer.quiet) == (False, False)
        expected = self.expected(sender)
        assert np.array_equal(target.buffer[: PAGE + 100], expected[: PAGE + 100])
        assert not target.buffer[PAGE + 100 :].any()

    def test_corrupt_next_flips_one_byte_and_says_ok(self, sender: Driver, target: Driver) -> None:
        sender.engine.corrupt_next(PAGE + 5)
        batch_id = self.send(sender, target)
        sender.poll()
        assert sender.answers[batch_id].ok
        expected = self.expected(sender)
        different = np.flatnonzero(target.buffer[: 2 * PAGE] != expected)
        assert different.tolist() == [PAGE + 5]

    def test_a_closed_peer_fails_and_memory_is_checked_at_the_target(
        self, sender: Driver, target: Driver
    ) -> None:
        target.engine.unregister([target.span])
        refused = self.send(sender, target)
        sender.poll()
        assert "not registered" in sender.answers[refused].error
        target.engine.close()
        gone = self.send(sender, target)
        sender.poll()
        assert not sender.answers[gone].ok

    def test_close_answers_what_was_held(self, sender: Driver, target: Driver) -> None:
        sender.engine.hold()
        batch_id = self.send(sender, target)
        sender.engine.close()
        sender.poll()
        assert not sender.answers[batch_id].ok
        with pytest.raises(EngineError):
            sender.engine.register([])


class TestControlsBetweenProcesses:
    """The same controls where the bytes go through a socket."""

    @pytest.fixture(scope="class")
    @classmethod
    def peer(cls):
        peer = PeerProcess(make_engine)
        yield peer
        peer.close()

    @pytest.fixture
    def driver(self):
        driver = Driver(MemoryEngine(), 16 * PAGE)
        yield driver
        driver.engine.close()

    def meet(self, driver: Driver, peer: PeerProcess, name: str) -> int:
        address = peer.allocate(name, 16 * PAGE)
        peer.register([(name, 0, 16 * PAGE)])
        driver.engine.connect("peer", peer.card())
        return address

    def test_hold_and_release(self, driver: Driver, peer: PeerProcess) -> None:
        remote = self.meet(driver, peer, "hold")
        driver.engine.hold()
        batch_id = driver.submit("peer", Verb.WRITE, [driver.address], [remote], [PAGE])
        for _ in range(20):
            driver.poll()
        assert driver.pending
        assert not peer.content("hold").any()
        driver.engine.release()
        assert driver.wait(batch_id).ok
        assert np.array_equal(peer.content("hold")[:PAGE], driver.buffer[:PAGE])

    def test_cut(self, driver: Driver, peer: PeerProcess) -> None:
        remote = self.meet(driver, peer, "cut")
        driver.engine.cut_next(1000)
        answer = driver.copy("peer", remote)
        assert (answer.ok, answer.quiet) == (False, True)
        content = peer.content("cut")
        assert np.array_equal(content[:1000], driver.buffer[:1000])
        assert not content[1000:].any()

    @pytest.mark.parametrize("verb", list(Verb))
    def test_corrupt(self, driver: Driver, peer: PeerProcess, verb: Verb) -> None:
        name = f"corrupt-{verb.value}"
        remote = self.meet(driver, peer, name)
        sent = driver.buffer.copy()
        driver.engine.corrupt_next(9)
        assert driver.copy("peer", remote, verb=verb).ok
        landed = peer.content(name) if verb is Verb.WRITE else driver.buffer
        given = sent if verb is Verb.WRITE else peer.content(name)
        assert np.flatnonzero(landed[:PAGE] != given[:PAGE]).tolist() == [9]

    def test_fail_and_delay(self, driver: Driver, peer: PeerProcess) -> None:
        remote = self.meet(driver, peer, "fail")
        driver.engine.fail_next(quiet=False)
        driver.engine.delay_next(0.2)
        answer = driver.copy("peer", remote)
        assert (answer.ok, answer.quiet) == (False, False)
        assert answer.seconds >= 0.2
        assert not peer.content("fail").any()
        assert driver.copy("peer", remote).ok

    def test_forged_requests_are_refused_and_the_server_lives(
        self, driver: Driver, peer: PeerProcess
    ) -> None:
        remote = self.meet(driver, peer, "forged")
        card = msgspec.msgpack.decode(peer.card(), type=MemoryCard)
        for garbage in (b"\xff" * 64, b"", struct.pack("!IQ", 5, 0) + b"hello"):
            with socket.create_connection((card.host, card.port), timeout=5.0) as sock:
                sock.sendall(garbage)
        for address, length in ((1, 64), (-1, 64), (remote, -1), ((1 << 63) - 10, 64)):
            assert _write_answer(card, card.token, address, length) != ""
        assert _write_answer(card, b"y" * 16, remote, 64) != ""
        assert not peer.content("forged").any()
        assert _write_answer(card, card.token, remote, 64) == ""
        assert (peer.content("forged")[:64] == 1).all()
        assert driver.copy("peer", remote).ok


def _write_answer(card: MemoryCard, token: bytes, address: int, length: int) -> str:
    """Send one hand-made write of ones; returns the error that came back."""
    request = memory_wire.WriteRequest(token, np.array([address]).tobytes(), np.array([length]).tobytes())
    header = msgspec.msgpack.encode(request)
    with socket.create_connection((card.host, card.port), timeout=5.0) as sock:
        sock.sendall(struct.pack("!IQ", len(header), max(length, 0)) + header + b"\x01" * max(length, 0))
        size, _ = struct.unpack("!IQ", sock.recv(12, socket.MSG_WAITALL))
        return msgspec.msgpack.decode(sock.recv(size, socket.MSG_WAITALL), type=memory_wire.Reply).error

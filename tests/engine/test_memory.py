"""The memory engine against the contract of all engines, and its own controls."""

from __future__ import annotations

import numpy as np
import pytest

from kvconnect.engine.memory import MemoryEngine
from kvconnect.errors import ConfigError, EngineError
from tests.engine.engine_peer import PeerCommands, PeerProcess
from tests.engine.engine_suite import Driver, EngineSuite
from tests.engine.faulty_engine import FaultyEngine


class PeerHere(PeerProcess):
    """A peer of this process. It cannot be killed or stopped, so cases that do so are skipped."""

    def __init__(self) -> None:
        self._commands = PeerCommands(MemoryEngine)

    def _ask(self, command, *arguments, **named):
        return getattr(self._commands, command)(*arguments, **named)

    @property
    def pid(self) -> int:
        pytest.skip("the peer is of this process")

    def resume(self) -> None:
        pass

    def close(self) -> None:
        self._commands.engine.close()


class TestMemoryEngine(EngineSuite):
    make_engine = staticmethod(MemoryEngine)
    settle_s = 1.0
    # From a thread of its own, which cannot skip a test.
    test_a_killed_peer_fails_once_and_hurts_no_other = None

    @classmethod
    def new_peer(cls) -> PeerProcess:
        return PeerHere()


def test_a_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="'rdma': the memory engine has none"):
        MemoryEngine("127.0.0.1", "rdma")


PAGE = 4096


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestControls:
    """Two engines on a virtual clock: no thread, no socket, no waiting."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def sender(self, clock: Clock):
        driver = Driver(FaultyEngine(clock=clock), 16 * PAGE, seed=1)
        yield driver
        driver.engine.close()

    @pytest.fixture
    def target(self, clock: Clock, sender: Driver):
        driver = Driver(FaultyEngine(clock=clock), 16 * PAGE, seed=2)
        driver.buffer[:] = 0
        sender.engine.connect("target", driver.engine.card())
        yield driver
        driver.engine.close()

    def send(self, sender: Driver, target: Driver, pages: int = 2, timeout_s: float = 10.0) -> int:
        offsets = np.arange(pages) * PAGE
        # Sources reversed, so that nothing can be joined into one copy.
        return sender.submit(
            "target",
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
        assert sender.answers[batch_id].quiescent
        sender.engine.release()
        sender.poll()
        assert not target.buffer.any(), "a batch that timed out moved bytes later"

    def test_fail_next_takes_one_batch_only(self, sender: Driver, target: Driver) -> None:
        sender.engine.fail_next(quiescent=True, error="as asked")
        bad, good = self.send(sender, target), self.send(sender, target)
        sender.poll()
        assert (sender.answers[bad].ok, sender.answers[bad].quiescent) == (False, True)
        assert sender.answers[bad].error == "as asked"
        assert sender.answers[good].ok
        assert sender.engine.land_late() == 0

    def test_a_failure_that_is_not_quiet_can_land_late(self, sender: Driver, target: Driver) -> None:
        sender.engine.fail_next(quiescent=False)
        bad = self.send(sender, target)
        sender.poll()
        assert (sender.answers[bad].ok, sender.answers[bad].quiescent) == (False, False)
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
        sender.engine.cut_next(PAGE + 100, quiescent=False)
        batch_id = self.send(sender, target)
        sender.poll()
        answer = sender.answers[batch_id]
        assert (answer.ok, answer.quiescent) == (False, False)
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

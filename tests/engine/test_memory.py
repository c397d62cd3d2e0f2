"""The memory engine against the contract of all engines, and its own controls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvconnect.engine.memory import MemoryEngine
from kvconnect.errors import ConfigError, EngineError
from tests.engine.engine_peer import PeerCommands, PeerProcess
from tests.engine.engine_suite import Driver, EngineSuite
from tests.engine.faulty_engine import FaultyEngine
from tests.transfer.pair import Clock


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


@pytest.fixture
def two() -> Iterator[tuple[Driver, Driver, Clock]]:
    """Two engines on a virtual clock, one connected to the other: no thread, no socket, no waiting."""
    clock = Clock()
    sender, target = (Driver(FaultyEngine(clock=clock), 16 * 4096, seed) for seed in (1, 2))
    target.buffer[:] = 0
    sender.engine.connect("target", target.engine.card())
    yield sender, target, clock
    sender.engine.close()
    target.engine.close()


def test_bytes_move_only_in_poll_and_a_late_batch_times_out_by_the_clock(two) -> None:
    sender, target, clock = two
    moved = sender.submit("target", sender.address, target.address, 4096)
    assert not target.buffer.any()
    sender.poll()
    assert sender.answers[moved].ok
    assert np.array_equal(target.buffer[:4096], sender.buffer[:4096])
    sender.engine.hold()
    late = sender.submit("target", sender.address, target.address + 4096, 4096, timeout_s=3.0)
    clock.now += 2.9
    sender.poll()
    assert sender.pending == {late}
    clock.now += 0.2
    sender.poll()
    assert (sender.answers[late].ok, sender.answers[late].quiescent) == (False, True)
    sender.engine.release()
    sender.poll()
    assert not target.buffer[4096:].any(), "a batch that timed out moved bytes later"


def test_a_closed_peer_fails_and_memory_is_checked_at_the_target(two) -> None:
    sender, target, _ = two
    target.engine.unregister([target.span])
    assert "not registered" in sender.copy("target", target.address).error
    target.engine.close()
    assert not sender.copy("target", target.address).ok


def test_close_answers_what_was_held(two) -> None:
    sender, target, _ = two
    sender.engine.hold()
    batch_id = sender.submit("target", sender.address, target.address, 4096)
    sender.engine.close()
    sender.poll()
    assert not sender.answers[batch_id].ok
    with pytest.raises(EngineError):
        sender.engine.register([])

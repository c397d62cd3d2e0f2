"""The NIXL engine against the contract of all engines, and what is special about it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from kvconnect.engine.base import Engine, Span
from kvconnect.engine.registry import available_engines
from kvconnect.errors import EngineError
from tests.engine.engine_peer import PeerProcess
from tests.engine.engine_suite import Driver, EngineSuite

_PROBLEM = available_engines()["nixl"]
pytestmark = pytest.mark.skipif(bool(_PROBLEM), reason=_PROBLEM or "usable")


def make_engine() -> Engine:
    from kvconnect.engine.nixl import NixlEngine

    return NixlEngine()


class TestNixlEngine(EngineSuite):
    make_engine = staticmethod(make_engine)
    settle_s = 1.0


def make_tcp_engine() -> Engine:
    from kvconnect.engine.nixl import NixlEngine

    return NixlEngine(backend_options={"engine_config": "TLS=tcp"})


class TestNixlEngineOverTcp(EngineSuite):
    """As between hosts: no shared memory, so a peer that does not poll receives nothing."""

    make_engine = staticmethod(make_tcp_engine)
    settle_s = 1.0


@pytest.fixture
def pair() -> Iterator[tuple[Driver, PeerProcess, int]]:
    peer = PeerProcess(make_tcp_engine)
    driver = Driver(make_tcp_engine(), 16 << 20)
    remote = peer.allocate("buffer", 16 << 20)
    peer.register([("buffer", 0, 16 << 20)])
    driver.engine.connect("peer", peer.card())
    yield driver, peer, remote
    peer.close()
    driver.engine.close()


def test_a_lost_link_between_living_peers_heals_by_itself(
    pair: tuple[Driver, PeerProcess, int],
) -> None:
    driver, peer, remote = pair
    assert driver.copy("peer", remote).ok
    assert _cut_tcp_connections() > 0
    answers = [driver.copy("peer", remote, timeout_s=3.0) for _ in range(3)]
    assert not answers[0].ok, "the link was not cut, so nothing was shown"
    assert answers[-1].ok, answers
    assert np.array_equal(peer.content("buffer")[:4096], driver.buffer[:4096])


def test_one_copy_again_and_again_brings_the_bytes_of_its_time(
    pair: tuple[Driver, PeerProcess, int],
) -> None:
    """The transfer behind it is made once, and posted each time."""
    driver, peer, remote = pair
    kept = driver.engine._cache
    for turn in range(4):
        driver.buffer[:4096] = turn + 1
        assert driver.copy("peer", remote).ok
        assert (peer.content("buffer")[:4096] == turn + 1).all()
        assert len(kept) == 1
    driver.engine.unregister([driver.span])
    assert len(kept) == 0, "it names memory that is not registered any more"


def test_a_timeout_is_not_called_quiet(pair: tuple[Driver, PeerProcess, int]) -> None:
    """What the kernel holds for a stopped peer lands when it wakes."""
    driver, peer, remote = pair
    assert driver.copy("peer", remote).ok
    peer.stop()
    answer = driver.copy("peer", remote, 16 << 20, timeout_s=0.5)
    assert (answer.ok, answer.quiescent) == (False, False)
    peer.resume()
    assert driver.copy("peer", remote).ok


def test_batches_to_a_peer_that_stood_still_outlive_one_that_was_given_up(
    pair: tuple[Driver, PeerProcess, int],
) -> None:
    """The link is renewed after a batch was given up, and not before the others to it have ended."""
    driver, peer, remote = pair
    assert driver.copy("peer", remote).ok
    peer.stop()
    quarter = 4 << 20
    given_up, *others = (
        driver.submit(
            "peer",
            [driver.address + part * quarter],
            [remote + part * quarter],
            [quarter],
            timeout_s=0.5 if part == 0 else 30.0,
        )
        for part in range(4)
    )
    answer = driver.wait(given_up)
    assert (answer.ok, answer.quiescent) == (False, False)
    peer.resume()
    after = driver.copy("peer", remote)
    assert after.ok, after
    for batch_id in others:
        assert driver.wait(batch_id).ok, driver.answers[batch_id]
    assert np.array_equal(peer.content("buffer")[quarter:], driver.buffer[quarter:])


def test_the_death_of_a_peer_on_this_host_is_proven_quiet(
    pair: tuple[Driver, PeerProcess, int],
) -> None:
    driver, peer, remote = pair
    assert driver.copy("peer", remote).ok
    peer.stop()
    batch_id = driver.submit("peer", [driver.address], [remote], [16 << 20], timeout_s=10.0)
    driver.poll()
    peer.kill()
    answer = driver.wait(batch_id)
    assert (answer.ok, answer.quiescent) == (False, True), answer


def test_the_process_ends_cleanly() -> None:
    """UCX agents made processes die with SIGSEGV at their exit."""
    # Nothing else may be imported: another library could load first what keeps the process alive.
    code = "from kvconnect.engine.nixl import NixlEngine\nkept = NixlEngine(); NixlEngine().close()"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_unknown_devices_and_backends_are_refused() -> None:
    from kvconnect.engine.nixl import NixlEngine

    with pytest.raises(EngineError, match="NO_SUCH_BACKEND"):
        NixlEngine(protocol="NO_SUCH_BACKEND")
    engine = make_engine()
    try:
        with pytest.raises(EngineError, match="tpu:0"):
            engine.register([Span(4096, 4096, "tpu:0")])
    finally:
        engine.close()


def _cut_tcp_connections() -> int:
    """Shut every TCP connection of this process; returns how many there were."""
    cut = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                with suppress(OSError):
                    sock.getpeername()
                    sock.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def test_a_device_that_is_not_here_is_named_with_its_key_and_those_that_are() -> None:
    from kvconnect.engine.nixl import NixlEngine

    with pytest.raises(
        EngineError, match=r"protocol is 'UCX', and UCX gets NET_DEVICES=nope0 by device_name.* lo"
    ):
        NixlEngine(device_name="nope0")

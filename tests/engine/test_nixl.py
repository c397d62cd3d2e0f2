"""The NIXL engine against the contract of all engines, and what is special about it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.addresses import interface_of
from kvconnect.engine import nixl_library
from kvconnect.engine.base import Engine, Span
from kvconnect.engine.nixl_library import Copy, TransferCache, ucx_options
from kvconnect.engine.registry import available_engines
from kvconnect.errors import ConfigError, EngineError
from tests.engine.engine_faults import QuietCases
from tests.engine.engine_peer import PeerProcess
from tests.engine.engine_suite import Driver, EngineSuite, met

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


class TestNixlEngineOverTcp(EngineSuite, QuietCases):
    """As between hosts: no shared memory, so a peer that does not poll receives nothing."""

    make_engine = staticmethod(make_tcp_engine)
    settle_s = 1.0


@pytest.fixture
def pair() -> Iterator[tuple[Driver, PeerProcess, int]]:
    with met(make_tcp_engine, 16 << 20) as made:
        yield made


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
            driver.address + part * quarter,
            remote + part * quarter,
            quarter,
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


def test_a_device_without_carrier_is_named_with_its_state(tmp_path, monkeypatch) -> None:
    for name, state in (("eth0", "up\n"), ("lo", "unknown\n"), ("rail0", "lowerlayerdown\n"), ("mlx5_0", "")):
        (tmp_path / name).mkdir()
        if state:
            (tmp_path / name / "operstate").write_text(state)
    monkeypatch.setattr(nixl_library, "_DEVICE_FOLDERS", (tmp_path,))
    with pytest.raises(EngineError, match=r"devices here are eth0, lo, mlx5_0, rail0 \(lowerlayerdown\)$"):
        nixl_library.start_agent("UCX", {"engine_config": "NET_DEVICES=nope0"})


STEPS = st.sampled_from(["put", "take", "drop", "drop all"])


@given(st.lists(st.tuples(STEPS, st.integers(0, 3), st.sampled_from("ab")), max_size=40))
def test_a_transfer_that_is_kept_is_taken_by_one_batch_or_released_once(steps):
    """The one that was put first goes where too many are kept; those to one agent go with it."""
    kept: dict[Copy, int] = {}
    released: list[int] = []
    cache = TransferCache(released.append)
    with mock.patch.object(nixl_library, "_MAX_IDLE", 3):
        for handle, (step, number, agent) in enumerate(steps):
            copy, gone = Copy(agent, number, number, 8), []
            if step == "put":
                gone += [kept.pop(copy)] if copy in kept else []
                kept[copy] = handle
                gone += [kept.pop(next(iter(kept)))] if len(kept) > 3 else []
                cache.put(copy, handle)
            elif step == "take":
                assert cache.take(copy) == kept.pop(copy, None)
            else:
                ends = [one for one in kept if step == "drop all" or one.agent == agent]
                gone = [kept.pop(one) for one in ends]
                cache.drop(None if step == "drop all" else agent)
            assert released == gone
            assert len(cache) == len(kept)
            released.clear()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "192.0.2.77", "2001:db8::7", "a.n"]
)
def test_an_address_of_this_machine_has_an_interface_and_no_other_has(host):
    is_here = host.startswith(("127.", "::", "localhost"))
    assert interface_of(host) in ({name for _, name in socket.if_nameindex()} if is_here else {""})
    assert interface_of(host)[:2] == "lo" * is_here


def test_what_is_configured_is_not_overruled():
    named = {"engine_config": "X=1,NET_DEVICES=eth7"}
    assert ucx_options("127.0.0.1", "", named, {}) == named
    assert ucx_options("127.0.0.1", "", {"a": "b"}, {"UCX_NET_DEVICES": "eth7"}) == {"a": "b"}
    assert ucx_options("10.0.0.1", "mlx5_0:1", {}, {"UCX_NET_DEVICES": "eth7"}) == {
        "engine_config": "NET_DEVICES=mlx5_0:1"
    }
    with pytest.raises(ConfigError, match="takes one device; for several set UCX_NET_DEVICES"):
        ucx_options("10.0.0.1", "a,b", {}, {})


def test_with_an_rdma_card_ucx_chooses_except_on_loopback(monkeypatch, tmp_path, caplog):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl_library, "_RDMA_CARDS", tmp_path)
    monkeypatch.setattr(nixl_library, "interface_of", lambda host: "if0")
    assert ucx_options("10.0.0.1", "", {}, {}) == {}
    assert "listens on all interfaces" in caplog.text
    assert ucx_options("127.0.0.1", "", {}, {}) == {"engine_config": "NET_DEVICES=if0"}
    other = {"engine_config": "TLS=tcp"}
    assert ucx_options("127.0.0.1", "", other, {}) == {"engine_config": "NET_DEVICES=if0,TLS=tcp"}
    monkeypatch.setattr(nixl_library, "_RDMA_CARDS", tmp_path / "none")
    assert ucx_options("10.0.0.1", "", {}, {}) == {"engine_config": "NET_DEVICES=if0"}


def test_nixl_listens_on_the_interface_of_its_host_alone():
    before, engine = _listening(), make_engine()
    memory = np.zeros(1 << 16, dtype=np.uint8)
    engine.register([Span(memory.ctypes.data, 1 << 16)])
    assert {address for _, address in _listening() - before} == {"0100007F"}
    engine.close()


def _listening() -> set[tuple[str, str]]:
    """The sockets at which this process listens, each with its address as the system has it."""
    sockets = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
    return {(row[9], row[1][:8]) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}

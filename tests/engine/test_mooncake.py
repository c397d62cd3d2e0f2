"""The Mooncake engine against the contract of all engines, and what is special about it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
import torch

from kvconnect.engine import mooncake_library
from kvconnect.engine.base import Engine, Span
from kvconnect.engine.mooncake import MooncakeCard
from kvconnect.engine.registry import available_engines
from kvconnect.errors import EngineError
from tests.engine.engine_faults import QuietCases
from tests.engine.engine_peer import PeerProcess
from tests.engine.engine_suite import EngineSuite, met

_PROBLEM = available_engines()["mooncake"]
pytestmark = pytest.mark.skipif(bool(_PROBLEM), reason=_PROBLEM or "usable")


def make_engine() -> Engine:
    from kvconnect.engine.mooncake import MooncakeEngine

    return MooncakeEngine("127.0.0.1", settle_s=3.0)


class TestMooncakeEngine(EngineSuite, QuietCases):
    make_engine = staticmethod(make_engine)
    settle_s = 3.0

    def silent_card(self, port: int) -> bytes | None:
        return msgspec.msgpack.encode(MooncakeCard(f"127.0.0.1:{port}", "tcp"))


def test_batches_take_turns_with_two_threads(monkeypatch) -> None:
    """As over NVLink, where a call returns only when its copy is done."""
    from kvconnect.engine import mooncake_lanes

    used: list[int] = []
    run = mooncake_lanes.NativeSender._run

    def noted(self, job):
        used.append(threading.get_ident())
        time.sleep(0.05)
        return run(self, job)

    monkeypatch.setattr(mooncake_lanes.NativeSender, "_run", noted)
    with met(make_engine, 1 << 20) as (driver, peer, remote):
        driver.engine._senders_per_peer = 2
        ids = [driver.submit("peer", driver.address + at, remote + at, 64) for at in (0, 64)]
        assert all(driver.wait(number).ok for number in ids)
        assert len(used) == len(set(used)) == 2
        assert np.array_equal(peer.content("buffer")[:128], driver.buffer[:128])


def test_another_protocol_than_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvconnect.engine.mooncake import MooncakeEngine

    with pytest.raises(EngineError, match="'tcp', 'rdma' and 'nvlink'"):
        MooncakeEngine("127.0.0.1", "carrier-pigeon")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(EngineError, match="MC_FORCE_TCP"):
        MooncakeEngine("127.0.0.1", "rdma")
    monkeypatch.delenv("MC_FORCE_TCP")
    with pytest.raises(EngineError, match=r"no-such-adapter, and .* has none: set .*protocol to 'tcp'"):
        MooncakeEngine("127.0.0.1", "rdma", "no-such-adapter")
    monkeypatch.setenv("MC_FORCE_HCA", "1")
    with pytest.raises(EngineError, match="MC_FORCE_HCA"):
        MooncakeEngine("127.0.0.1", "tcp")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two GPUs, and Mooncake built for them."""
    for name in ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_FORCE_MNNVL", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mooncake_library, "built_for_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: True)
    return monkeypatch


def test_auto_takes_nvlink_where_all_peers_are_on_this_host_and_says_so(gpus, caplog) -> None:
    caplog.set_level(logging.INFO, "kvconnect.engine")
    assert mooncake_library.choose_protocol("127.0.0.1", "") == "nvlink"
    assert "auto' takes 'nvlink'" in caplog.text
    assert mooncake_library.choose_protocol("10.0.0.1", "") == "tcp"
    assert "takes 'tcp', not 'nvlink': peers reach this node at 10.0.0.1" in caplog.text
    assert mooncake_library.choose_protocol("10.0.0.1", "mlx5_0") == "rdma"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda patch: patch.setattr(mooncake_library, "built_for_cuda", lambda: False), "has no CUDA"),
        (lambda patch: patch.setattr(torch.cuda, "is_initialized", lambda: False), "uses no GPU"),
        (lambda patch: patch.setenv("MC_FORCE_TCP", "1"), "MC_FORCE_TCP is set"),
        (lambda patch: patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), "expandable"),
        (lambda patch: patch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False), "no GPU here"),
    ],
)
def test_auto_does_without_nvlink_where_it_cannot_work(gpus, caplog, change, why) -> None:
    caplog.set_level(logging.INFO, "kvconnect.engine")
    change(gpus)
    assert mooncake_library.choose_protocol("127.0.0.1", "") == "tcp"
    assert why in caplog.text


def test_over_nvlink_whole_allocations_are_registered_once(gpus) -> None:
    """As the library shares them: what it is given it takes for their beginning."""
    gpus.setattr(mooncake_library, "allocation_around", lambda address, _: (address & ~0xFFFFF, 1 << 20))
    library = mooncake_library.Library.__new__(mooncake_library.Library)
    library.protocol = "nvlink"
    spans = [Span(0x100040, 64, "cuda:0"), Span(0x140000, 4096, "cuda:0"), Span(0x300000, 64, "cuda:1")]
    assert list(library.ranges(spans)) == [(0x100000, 1 << 20), (0x300000, 1 << 20)]
    with pytest.raises(EngineError, match="GPUs alone"):
        library.check_spans([Span(4096, 4096)])


def test_peers_of_another_protocol_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(EngineError, match="over nvlink, the prefill node over tcp: set the same"):
        engine.connect("peer", msgspec.msgpack.encode(MooncakeCard("127.0.0.1:15000", "nvlink")))
    engine.close()


def test_device_memory_is_refused_without_cuda() -> None:
    engine = make_engine()
    try:
        if mooncake_library.built_for_cuda():
            pytest.skip("this build of Mooncake has CUDA")
        with pytest.raises(EngineError, match="cuda:0"):
            engine.register([Span(4096, 4096, "cuda:0")])
    finally:
        engine.close()


_LEAVE = """
import os, signal, sys, time
from kvconnect.engine.mooncake import MooncakeEngine
from tests.engine.engine_driver import Driver

pid, remote, card = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
driver = Driver(MooncakeEngine("127.0.0.1"), 64 << 20)
driver.engine.connect("peer", card)
assert driver.copy("peer", remote, 64 << 20).ok
os.kill(pid, signal.SIGSTOP)
driver.submit("peer", driver.address, remote, 64 << 20, 1.0)
time.sleep(0.3)
os.kill(pid, signal.SIGKILL)
"""


def test_the_process_survives_its_end_with_a_transfer_in_the_library() -> None:
    """A thread that returns from the library while the interpreter ends would abort the process."""
    peer, environment = PeerProcess(make_engine), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    remote = peer.allocate("buffer", 64 << 20)
    peer.register("buffer")
    command = [sys.executable, "-c", _LEAVE, str(peer.pid), str(remote), peer.card().hex()]
    done = subprocess.run(command, env=environment, timeout=60, check=False, capture_output=True)
    peer.close()
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_peer_takes_the_lane_of_one_that_is_gone() -> None:
    with met(make_engine, 1 << 20) as (driver, peer, remote):
        engine, made = driver.engine, []
        make_lane = engine._pool._make_engine
        engine._pool._make_engine = lambda: (made.append(0), make_lane())[1]
        for number in range(5):
            name = f"peer {number}"
            engine.connect(name, peer.card())
            assert driver.copy(name, remote).ok
            (sender,) = engine._peers[name].senders
            engine.disconnect(name)
            sender.join(10)
        assert len(made) == 1

"""The NVLink engine: its kernel against plain copying, and the engine over a GPU that is only played."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvconnect.engine import nvlink_copy, registry
from kvconnect.engine.base import Engine, Span, Verb
from kvconnect.engine.ipc import Allocation, UnshareableError
from kvconnect.engine.nvlink import NvlinkEngine
from kvconnect.engine.nvlink_card import NvlinkCard
from kvconnect.engine.process import ProcessIdentity, own_identity
from kvconnect.errors import ConfigError, EngineError
from kvconnect.testing.engine_peer import PeerProcess, wait_until
from kvconnect.testing.engine_suite import Driver, EngineSuite
from tests.engine.fake_gpu import LEAD, FakeCopier, FakeDriver, on_fake_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARENA = 8192


# ---- the kernel


@st.composite
def copies(draw):
    """Offsets of sources, of disjoint targets, and lengths; many of them multiples of 16."""
    source, target, length = [], [], []
    at = 0
    while at < ARENA and len(length) < 12:
        unit = draw(st.sampled_from([1, 16]))
        at = -(-(at + draw(st.integers(0, 40))) // unit) * unit
        size = draw(st.one_of(st.integers(0, 80), st.integers(0, 2000))) // unit * unit
        if at + size > ARENA:
            break
        source.append(draw(st.integers(0, (ARENA - size) // unit)) * unit)
        target.append(at)
        length.append(size)
        at += size
    order = draw(st.permutations(range(len(length))))
    return tuple(np.array([column[i] for i in order], dtype=np.int64) for column in (source, target, length))


@given(copies(), st.sampled_from([32, 100, 512, 4096]), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_kernel_copies_what_plain_copying_does(columns, most_bytes, programs, seed):
    source, target, length = columns
    rng = np.random.default_rng(seed)
    giver, taker = (rng.integers(0, 256, ARENA, dtype=np.uint8) for _ in range(2))
    expected = taker.copy()
    for here, there, size in zip(*columns, strict=True):
        for byte in range(size):
            expected[there + byte] = giver[here + byte]
    given_bytes, taken_bytes = (torch.from_numpy(side.copy()).to(DEVICE) for side in (giver, taker))
    assert given_bytes.data_ptr() % 16 == taken_bytes.data_ptr() % 16 == 0
    pieces = np.empty((3, nvlink_copy.num_pieces(length, most_bytes)), dtype=np.int64)
    nvlink_copy.cut(
        source + given_bytes.data_ptr(), target + taken_bytes.data_ptr(), length, most_bytes, pieces
    )
    assert not pieces.shape[1] or pieces[2].max() <= most_bytes
    nvlink_copy.launch(torch.from_numpy(pieces).to(DEVICE), pieces.shape[1], programs, 512, 1)
    assert np.array_equal(taken_bytes.cpu().numpy(), expected)
    assert np.array_equal(given_bytes.cpu().numpy(), giver)


def test_pieces_are_short_where_there_is_little_to_do():
    for total_bytes in (1, 1 << 20, 128 << 20, 4 << 30):
        size = nvlink_copy.piece_bytes(total_bytes, 1056)
        assert size % 16 == 0
        assert nvlink_copy.LEAST_PIECE_BYTES <= size <= nvlink_copy.MOST_PIECE_BYTES
    assert nvlink_copy.piece_bytes(1 << 20, 1056) < nvlink_copy.piece_bytes(1 << 30, 1056)


# ---- the engine


def make_engine() -> Engine:
    return NvlinkEngine(settle_s=0.3, memory=FakeDriver(), make_copier=lambda device: FakeCopier())


class TestNvlinkEngine(EngineSuite):
    make_engine = staticmethod(make_engine)
    allocate = staticmethod(on_fake_gpu)
    allocate_peer = staticmethod(on_fake_gpu)
    settle_s = 1.0


class Rig:
    """An engine whose driver and copier a test holds in its hands, and a peer process."""

    def __init__(self, peer: PeerProcess) -> None:
        self.memory, self.copier = FakeDriver(), FakeCopier()
        engine = NvlinkEngine(settle_s=0.2, memory=self.memory, make_copier=lambda device: self.copier)
        self.driver = Driver(engine, allocate=on_fake_gpu)
        self.peer = peer
        self.name = f"buffer-{time.monotonic_ns()}"
        self.remote = peer.allocate(self.name, 65536)
        peer.register([(self.name, 0, 65536)])
        self.peer_card = self.peer.card()
        self.driver.engine.connect("peer", self.peer_card)

    def submit(self, length: int = 4096, timeout_s: float = 10.0) -> int:
        driver = self.driver
        return driver.submit("peer", Verb.WRITE, [driver.address], [self.remote], [length], timeout_s)

    def unanswered(self, batch_id: int, for_s: float = 0.05) -> bool:
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            self.driver.poll()
        return batch_id not in self.driver.answers

    def close(self) -> None:
        self.copier.held = False
        self.driver.engine.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    peer = PeerProcess(make_engine, on_fake_gpu)
    yield peer
    peer.close()


@pytest.fixture
def rig(peer: PeerProcess) -> Iterator[Rig]:
    peer.restart_engine()
    rig = Rig(peer)
    yield rig
    rig.close()


def test_a_cancelled_batch_is_answered_when_its_kernel_is_done(rig: Rig) -> None:
    rig.copier.held = True
    batch_id = rig.submit()
    rig.driver.engine.cancel(batch_id)
    assert rig.unanswered(batch_id)
    rig.copier.held = False
    answer = rig.driver.wait(batch_id)
    assert (answer.ok, answer.quiet, answer.error) == (False, True, "cancelled")


def test_a_disconnected_peer_stays_mapped_while_a_kernel_runs(rig: Rig) -> None:
    rig.copier.held = True
    batch_id = rig.submit()
    rig.driver.engine.disconnect("peer")
    assert rig.unanswered(batch_id)
    assert rig.memory.closed == []
    rig.copier.held = False
    answer = rig.driver.wait(batch_id)
    assert (answer.ok, answer.quiet) == (False, True)
    assert len(rig.memory.closed) == 1


def test_what_outlasts_its_time_is_not_called_quiet_and_stays_mapped(rig: Rig) -> None:
    rig.copier.held = True
    batch_id = rig.submit(timeout_s=0.1)
    answer = rig.driver.wait(batch_id)
    assert (answer.ok, answer.quiet) == (False, False)
    assert 0.2 < answer.seconds < 2.0
    rig.driver.engine.disconnect("peer")
    rig.driver.poll()
    assert rig.memory.closed == []
    rig.copier.held = False
    rig.driver.poll()
    assert len(rig.memory.closed) == 1


def test_what_ends_a_little_late_failed_but_is_quiet(rig: Rig) -> None:
    rig.copier.held = True
    batch_id = rig.submit(timeout_s=0.05)
    assert rig.unanswered(batch_id, 0.1)
    rig.copier.held = False
    answer = rig.driver.wait(batch_id)
    assert (answer.ok, answer.quiet) == (False, True)


def test_a_gpu_that_fails_leaves_nothing_unanswered_and_nothing_quiet(rig: Rig) -> None:
    batch_id = rig.submit()
    rig.copier.fails = True
    answer = rig.driver.wait(batch_id)
    assert (answer.ok, answer.quiet) == (False, False)
    assert "illegal memory access" in answer.error
    assert answer.seconds < 5.0, "it was waited for until its timeout"


def test_memory_of_a_dead_process_is_let_go_of_when_no_kernel_uses_it() -> None:
    rig = Rig(PeerProcess(make_engine, on_fake_gpu))
    rig.copier.held = True
    batch_id = rig.submit()
    rig.peer.kill()
    assert rig.unanswered(batch_id, 0.5)
    assert rig.memory.closed == []
    rig.copier.held = False
    answer = rig.driver.wait(batch_id)
    assert (answer.ok, answer.quiet) == (False, True), answer
    assert wait_until(lambda: rig.driver.in_flight() == 0 and len(rig.memory.closed) == 1, 5.0)
    late = rig.driver.wait(rig.submit())
    assert (late.ok, late.quiet) == (False, True)
    with pytest.raises(EngineError):
        rig.driver.engine.connect("peer", rig.peer_card)
    rig.close()
    rig.peer.close()


def test_an_allocation_is_mapped_once_whoever_names_it(rig: Rig) -> None:
    engine, memory = rig.driver.engine, rig.memory
    rig.peer.unregister([(rig.name, 0, 65536)])
    rig.peer.register([(rig.name, 0, 4096), (rig.name, 8192, 4096)])
    engine.connect("peer", rig.peer.card())
    engine.connect("again", rig.peer.card())
    engine.connect("again", rig.peer.card())
    driver = rig.driver
    for name, offset in (("peer", 0), ("again", 8192)):
        assert driver.copy(name, rig.remote + offset, 4096).ok
        assert not driver.copy(name, rig.remote + 4096, 4096).ok
        assert not driver.copy(name, rig.remote + offset, 4097).ok
    content = rig.peer.content(rig.name)
    assert np.array_equal(content[:4096], driver.buffer[:4096])
    assert np.array_equal(content[8192:12288], driver.buffer[:4096])
    assert not content[4096:8192].any()
    assert len(memory.opened) == 1
    engine.disconnect("peer")
    driver.poll()
    assert memory.closed == []
    engine.disconnect("again")
    driver.poll()
    assert memory.closed == memory.opened


def test_the_own_process_is_reached_without_mapping() -> None:
    memory = FakeDriver()
    near, far = (
        Driver(
            NvlinkEngine(memory=memory, make_copier=lambda device: FakeCopier()),
            seed=seed,
            allocate=on_fake_gpu,
        )
        for seed in (1, 2)
    )
    near.engine.connect("far", far.engine.card())
    assert near.copy("far", far.address, 5000, verb=Verb.READ).ok
    assert np.array_equal(near.buffer[:5000], far.buffer[:5000])
    assert memory.opened == []
    near.engine.close()
    far.engine.close()


# ---- registration and cards


def test_only_memory_of_one_gpu_is_taken() -> None:
    engine = make_engine()
    buffer = on_fake_gpu(np.zeros(8192, dtype=np.uint8))
    with pytest.raises(EngineError, match="not of cpu"):
        engine.register([Span(buffer.address, 4096, "cpu")])
    with pytest.raises(EngineError, match="cuda:1"):
        engine.register([Span(buffer.address, 4096, "cuda:0"), Span(buffer.address + 4096, 4096, "cuda:1")])
    engine.register([Span(buffer.address, 4096, "cuda:0")])
    with pytest.raises(EngineError, match="cuda:1"):
        engine.register([Span(buffer.address + 4096, 4096, "cuda:1")])
    with pytest.raises(EngineError, match="beyond"):
        engine.register([Span(buffer.address + 4096, 4096 + LEAD + 1, "cuda:0")])
    with pytest.raises(UnshareableError):
        engine.register([Span(buffer.address + 4096, 4096, "cuda:0"), Span(4096, 4096, "cuda:0")])
    engine.register([Span(buffer.address + 4096, 4096, "cuda:0")])
    assert len(msgspec.msgpack.decode(engine.card(), type=NvlinkCard).spans) == 2
    engine.close()


def test_without_registered_memory_no_peer_can_be_met() -> None:
    engine = make_engine()
    with pytest.raises(EngineError, match="before memory of a GPU is registered"):
        engine.connect("peer", msgspec.msgpack.encode(NvlinkCard(own_identity(), [], [])))
    engine.close()


def test_cards_that_contradict_themselves_or_come_from_elsewhere_are_refused(rig: Rig) -> None:
    engine = rig.driver.engine
    allocation = Allocation(f"/proc/{os.getpid()}/fd/0".encode(), 4096, 4096, "fake-0")
    here, elsewhere = own_identity(), ProcessIdentity("another boot", 1, "1")
    for process, spans, text in (
        (here, [(4096, 4096, 1)], "none of its allocations"),
        (here, [(4095, 4096, 0)], "none of its allocations"),
        (here, [(4096, 4097, 0)], "none of its allocations"),
        (here, [(4096, 100, 0), (4100, 100, 0)], "overlap"),
        (elsewhere, [(4096, 4096, 0)], "not on this host"),
        (ProcessIdentity("", 1, "1"), [], "not on this host"),
    ):
        with pytest.raises(EngineError, match=text):
            engine.connect("other", msgspec.msgpack.encode(NvlinkCard(process, [allocation], spans)))
    wild = msgspec.structs.replace(allocation, address=-1)
    for garbage in (b"", b"\x80", b"x" * 100, msgspec.msgpack.encode(NvlinkCard(here, [wild], []))):
        with pytest.raises(EngineError, match="not an NVLink engine's"):
            engine.connect("other", garbage)
    assert len(rig.memory.opened) == 1
    assert rig.driver.copy("peer", rig.remote).ok


def test_a_peer_that_cannot_be_mapped_leaves_the_old_one_in_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.peer.allocate("more", 4096)
    rig.peer.register([("more", 0, 4096)])
    card = rig.peer.card()
    calls = []

    def second_fails(allocation: Allocation, device: int) -> int:
        calls.append(allocation)
        raise EngineError("no way to that GPU")

    monkeypatch.setattr(rig.memory, "open", second_fails)
    with pytest.raises(EngineError, match="no way"):
        rig.driver.engine.connect("peer", card)
    assert len(calls) == 1, "what is mapped already was mapped again"
    assert rig.driver.copy("peer", rig.remote).ok
    monkeypatch.undo()
    rig.driver.engine.connect("peer", card)
    assert len(rig.memory.opened) == 2
    assert rig.driver.copy("peer", rig.remote).ok


def test_misconfiguration_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_programs"):
        NvlinkEngine(max_programs=-1, memory=FakeDriver())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_registry_says_so() -> None:
    assert "GPU" in registry.available_engines()["nvlink"]
    with pytest.raises(EngineError, match="nvlink.*GPU"):
        registry.create_engine("nvlink", host="127.0.0.1")
    assert own_identity().host, "this system does not say which boot it is"

"""The NVLink engine between two real GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from kvconnect.engine.base import Batch, Engine, Span, Verb
from kvconnect.testing.engine_buffers import OnGpu
from kvconnect.testing.engine_peer import PeerProcess, wait_until
from kvconnect.testing.engine_suite import Driver, EngineSuite

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}")]
GIB = 1 << 30


def make_engine() -> Engine:
    from kvconnect.engine.nvlink import NvlinkEngine

    return NvlinkEngine()


class TestNvlinkEngine(EngineSuite):
    make_engine = staticmethod(make_engine)
    allocate = OnGpu("cuda:0")
    allocate_peer = OnGpu("cuda:1")
    settle_s = 1.0


def make_bounded_engine() -> Engine:
    from kvconnect.engine.nvlink import NvlinkEngine

    return NvlinkEngine(max_programs=4)


@pytest.fixture(scope="module")
def peer():
    peer = PeerProcess(make_engine, OnGpu("cuda:1"))
    yield peer
    peer.close()


def submit_and_wait(engine: Engine, batch: Batch) -> None:
    engine.submit(batch)
    answers: list = []
    assert wait_until(lambda: bool(answers.extend(engine.poll())) or bool(answers), 20.0)
    assert answers[0].ok, answers


@pytest.mark.parametrize("make", [make_engine, make_bounded_engine])
def test_pages_of_many_tensors_land_where_they_belong(peer: PeerProcess, make) -> None:
    """Tensors of all sizes share segments; every page of every tensor goes to a page of the peer's."""
    engine, rng = make(), np.random.default_rng(1)
    sizes = [int(size) for size in rng.integers(1, 40, 60) * 16384]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda:0") for size in sizes]
    torch.cuda.synchronize()
    engine.register([Span(tensor.data_ptr(), tensor.numel(), "cuda:0") for tensor in tensors])
    name = f"pages-{time.monotonic_ns()}"
    remote = peer.allocate(name, sum(sizes))
    peer.register([(name, 0, sum(sizes))])
    engine.connect("peer", peer.card())
    source = np.concatenate([tensor.data_ptr() + np.arange(0, tensor.numel(), 16384) for tensor in tensors])
    order = rng.permutation(len(source))
    batch = Batch(1, "peer", Verb.WRITE, source, remote + order * 16384, np.full(len(source), 16384), 10.0)
    submit_and_wait(engine, batch)
    pages = torch.cat(tensors).cpu().numpy().reshape(-1, 16384)
    expected = np.empty_like(pages)
    expected[order] = pages
    assert np.array_equal(peer.content(name).reshape(-1, 16384), expected)
    engine.close()


@pytest.mark.parametrize("beside_a_short_one", [False, True])
@pytest.mark.parametrize("verb", list(Verb))
def test_a_huge_copy(peer: PeerProcess, verb: Verb, beside_a_short_one: bool) -> None:
    size = (256 << 20) + 48
    driver = Driver(make_engine(), size, allocate=OnGpu("cuda:0"))
    name = f"huge-{verb.value}-{beside_a_short_one}"
    remote = peer.allocate(name, size, seed=3)
    peer.register([(name, 0, size)])
    driver.engine.connect("peer", peer.card())
    # Long copies alone are for the copy engines, with a short one among them for the kernel.
    cuts = [0, 64] if beside_a_short_one else [0]
    length = np.diff([*cuts, size])
    batch_id = driver.submit("peer", verb, np.array(cuts) + driver.address, np.array(cuts) + remote, length)
    assert driver.wait(batch_id).ok
    assert np.array_equal(peer.content(name), driver.buffer)
    driver.engine.close()


def test_two_processes_on_one_gpu() -> None:
    peer = PeerProcess(make_engine, OnGpu("cuda:0"))
    driver = Driver(make_engine(), allocate=OnGpu("cuda:0"))
    remote = peer.allocate("buffer", 4 << 20)
    peer.register([("buffer", 0, 4 << 20)])
    driver.engine.connect("peer", peer.card())
    assert driver.copy("peer", remote, 4 << 20).ok
    assert np.array_equal(peer.content("buffer"), driver.buffer)
    driver.engine.close()
    peer.close()


def test_processes_that_see_one_gpu_each() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.hidden_pair", "1"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        timeout=100,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "ok", done.stderr[-3000:]


def test_memory_of_a_killed_peer_stays_valid_until_it_is_let_go_of() -> None:
    peer = PeerProcess(make_engine, OnGpu("cuda:1"))
    driver = Driver(make_engine(), GIB, allocate=OnGpu("cuda:0"))
    torch.zeros(1, device="cuda:1")
    remote = peer.allocate("buffer", 8 * GIB)
    peer.register([("buffer", 0, 8 * GIB)])
    driver.engine.connect("peer", peer.card())
    before = torch.cuda.mem_get_info(1)[0]
    ids = [
        driver.submit("peer", Verb.WRITE, [driver.address], [remote + GIB * number], [GIB])
        for number in range(8)
    ]
    peer.kill()
    while_mapped = torch.cuda.mem_get_info(1)[0]
    assert while_mapped - before < 4 * GIB, "the memory went with the process, mapped or not"
    answers = [driver.wait(batch_id) for batch_id in ids]
    assert all(answer.quiet for answer in answers)
    assert not answers[-1].ok
    assert wait_until(
        lambda: driver.in_flight() == 0 and torch.cuda.mem_get_info(1)[0] - before > 7 * GIB, 10.0, 0.05
    ), "the memory of a dead peer is not given back"
    # The GPU's context has come to no harm.
    assert int(torch.arange(10, device="cuda:0").sum()) == 45
    driver.engine.close()
    peer.close()


def test_segments_that_grow_cannot_be_shared_and_the_error_says_what_to_set() -> None:
    code = (
        "import torch\n"
        "from kvconnect.engine.base import Span\n"
        "from kvconnect.engine.ipc import UnshareableError\n"
        "from kvconnect.engine.nvlink import NvlinkEngine\n"
        "tensor = torch.zeros(1 << 20, dtype=torch.uint8, device='cuda:0')\n"
        "try:\n"
        "    NvlinkEngine().register([Span(tensor.data_ptr(), 1 << 20, 'cuda:0')])\n"
        "except UnshareableError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        timeout=100,
        check=False,
        capture_output=True,
        text=True,
    )
    assert "expandable_segments" in done.stdout, (done.stdout, done.stderr[-3000:])

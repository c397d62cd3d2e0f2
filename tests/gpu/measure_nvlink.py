"""How fast the NVLink engine moves scattered pages to another GPU, beside a contiguous copy.

    python -m tests.gpu.measure_nvlink [--tunings]

Figures are GB/s, medians. "kernel" is the time of the launch on its stream, "engine" runs from submit to the
answer, "stream" is a row of batches of at most 64 MiB that are kept in flight.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from kvconnect.engine.base import Batch, Engine, Span, Verb
from kvconnect.engine.ipc import CudaMemory
from kvconnect.engine.nvlink import NvlinkEngine
from kvconnect.engine.nvlink_stream import BOUNDED, UNBOUNDED, CopyStream, Tuning
from kvconnect.testing.engine_buffers import OnGpu
from kvconnect.testing.engine_peer import PeerProcess

REGIONS = 64
REGION_BYTES = 32 << 20
REPEATS = 7
CASES = [(4 << 10, 256), (4 << 10, 1024), (16 << 10, 256), (16 << 10, 1024)]
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def make_engine() -> Engine:
    return NvlinkEngine()


def scattered(sources: list[int], targets: list[int], page: int, blocks: int) -> Columns:
    """``blocks`` random pages of each region to random pages of the region across."""
    rng = np.random.default_rng(blocks)
    pages = REGION_BYTES // page
    here, there = (rng.permutation(pages)[:blocks] * page for _ in range(2))
    source = np.add.outer(np.array(sources), here).reshape(-1)
    target = np.add.outer(np.array(targets), there).reshape(-1)
    return source, target, np.full(len(source), page, dtype=np.int64)


def gigabytes(total_bytes: int, run: Callable[[], float]) -> float:
    run()
    return total_bytes / statistics.median(run() for _ in range(REPEATS)) / 1e9


def contiguous(total_bytes: int) -> float:
    """A copy from one tensor to another on the other GPU."""
    source = torch.randint(0, 256, (total_bytes,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty(total_bytes, dtype=torch.uint8, device="cuda:1")

    def run() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        with torch.cuda.device(0):
            begun.record()
            target.copy_(source, non_blocking=True)
            ended.record()
            ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    return gigabytes(total_bytes, run)


def kernel(stream: CopyStream, columns: Columns) -> float:
    """The launch alone, with its upload."""

    def run() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # So that the host is ahead, and what is measured is the device.
        with torch.cuda.stream(stream._streams[1 % len(stream._streams)]):
            torch.cuda._sleep(2_000_000)
            begun.record()
        done = stream.copy(*columns)
        ended.record(stream._streams[0])
        ended.synchronize()
        assert done()
        return begun.elapsed_time(ended) / 1e3

    return gigabytes(int(columns[2].sum()), run)


_ids = itertools.count(1)


def through_engine(engine: Engine, verb: Verb, columns: Columns, most_bytes: int = 4 << 30) -> float:
    """From submit to the answer, in batches that are kept in flight."""
    source, target, length = columns

    def batches() -> Iterator[Batch]:
        step = max(1, most_bytes // int(length[0]))
        for start in range(0, len(length), step):
            part = slice(start, start + step)
            yield Batch(next(_ids), "peer", verb, source[part], target[part], length[part], 10.0)

    def run() -> float:
        todo, in_flight = list(batches()), 0
        begun = time.perf_counter()
        while todo or in_flight:
            while todo and in_flight < engine.capabilities.max_batches_per_peer:
                engine.submit(todo.pop())
                in_flight += 1
            for answer in engine.poll():
                assert answer.ok, answer
                in_flight -= 1
        return time.perf_counter() - begun

    return gigabytes(int(length.sum()), run)


def host_microseconds(engine: Engine, columns: Columns) -> float:
    """How long ``submit`` takes of the owner's time, for one batch."""
    source, target, length = columns
    taken = []
    for _ in range(20):
        batch = Batch(next(_ids), "peer", Verb.WRITE, source, target, length, 10.0)
        begun = time.perf_counter()
        engine.submit(batch)
        taken.append(time.perf_counter() - begun)
        while not engine.poll():
            pass
    return statistics.median(taken) * 1e6


def main() -> None:
    near = [torch.empty(REGION_BYTES, dtype=torch.uint8, device="cuda:0").random_() for _ in range(REGIONS)]
    far = [torch.empty(REGION_BYTES, dtype=torch.uint8, device="cuda:1") for _ in range(REGIONS)]
    sources, targets = ([tensor.data_ptr() for tensor in side] for side in (near, far))
    memory = CudaMemory()
    memory.reach(memory.gpu_name(1), 0)
    whole = [scattered(sources, targets, page, blocks) for page, blocks in CASES]
    huge = torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0").random_()
    huge_far = torch.empty(256 << 20, dtype=torch.uint8, device="cuda:1")
    one = tuple(np.array([value]) for value in (huge.data_ptr(), huge_far.data_ptr(), 256 << 20))
    whole.append(one)
    limits = [contiguous(int(columns[2].sum())) for columns in whole]
    names = [f"{REGIONS} x {page >> 10} KiB x {blocks}" for page, blocks in CASES] + ["1 x 256 MiB"]
    print("contiguous", dict(zip(names, (round(limit) for limit in limits), strict=True)), flush=True)
    tunings = {"unbounded": (0, UNBOUNDED), **{f"bound {n}": (n, BOUNDED) for n in (8, 16, 32, 64)}}
    if "--tunings" in sys.argv:
        for per_sm, warps, tile in itertools.product((2, 4, 8, 16), (4, 8, 16), (4, 8, 16, 32)):
            if per_sm * warps <= 64 and tile << 10 <= warps * 32 * 16 * 8:
                tunings[f"{per_sm}/SM {warps} warps {tile} KiB"] = (0, Tuning(per_sm, warps, tile << 10))
    for name, (bound, tuning) in tunings.items():
        stream = CopyStream(0, memory, bound, tuning)
        rates = [kernel(stream, columns) for columns in whole]
        print(f"kernel, {name:22}", *(f"{rate:5.0f}" for rate in rates), flush=True)
    peer = PeerProcess(make_engine, OnGpu("cuda:1"))
    remote = [peer.allocate(f"region-{number}", REGION_BYTES) for number in range(REGIONS)]
    remote.append(peer.allocate("huge", 256 << 20))
    peer.register([(f"region-{number}", 0, REGION_BYTES) for number in range(REGIONS)])
    peer.register([("huge", 0, 256 << 20)])
    engine = NvlinkEngine()
    engine.register([Span(tensor.data_ptr(), tensor.numel(), "cuda:0") for tensor in [*near, huge]])
    card = peer.card()
    begun = time.perf_counter()
    engine.connect("peer", card)
    print(f"connect: {(time.perf_counter() - begun) * 1e3:.1f} ms, card: {len(card)} bytes")
    columns = [scattered(sources, remote[:REGIONS], page, blocks) for page, blocks in CASES]
    columns.append((one[0], np.array([remote[-1]]), one[2]))
    for name, limit, these in zip(names, limits, columns, strict=True):
        source, target, length = these
        write = through_engine(engine, Verb.WRITE, these)
        read = through_engine(engine, Verb.READ, (target, source, length))
        row = f"{name:18} contiguous {limit:4.0f}  write {write:4.0f} ({write / limit:.2f})  read {read:4.0f}"
        if len(length) > 1:
            row += f"  stream {through_engine(engine, Verb.WRITE, these, 64 << 20):4.0f}"
        print(f"{row}  submit {host_microseconds(engine, these):.0f} us", flush=True)
    begun = time.perf_counter()
    engine.close()
    print(f"close: {(time.perf_counter() - begun) * 1e3:.1f} ms")
    peer.close()


if __name__ == "__main__":
    main()

"""Pack and unpack against byte-by-byte copying that shares no code, over caches of every shape."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.shard import HeadInterval, Topology, partner_ranks
from kvconnect.errors import LayoutError, LocalError
from kvconnect.pack import numpy_mover
from kvconnect.pack.packer import Packer
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import Chunk, TokenSpan
from kvconnect.plan.wire import align_wire
from tests.pack.sides import (
    DEVICE,
    KERNELS,
    M64,
    NUM_BLOCKS,
    Layer,
    Model,
    Shape,
    Side,
    exchange,
    fill_values,
    held_blocks,
    interpreted_by,
    models,
    rank_heads,
    shapes,
    slot_for,
)
from tests.pack.values import PAIRS

layer_scales = st.one_of(
    st.sampled_from([1.0, 0.5, 0.013, 37.7]), st.floats(2.0**-20, 2.0**20, allow_nan=False)
)


@st.composite
def unlike_models(draw):
    """A model as both sides keep it, perhaps most layers in other types, and the scales of the quantised."""
    model = draw(models())
    if draw(st.booleans()):
        return model, model, {}
    ours, theirs, scales = [], [], {}
    for layer in model.layers:
        if layer.kind == "state" or layer.row_tokens > 1:
            ours.append(layer)
            theirs.append(layer)
            continue
        value_width = draw(st.sampled_from([None, None, 1, 2, 5])) if layer.has_heads else None
        width = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16]))
        source, target = draw(st.sampled_from([*PAIRS, ("float8_e4m3fn", "float8_e4m3fn")]))
        layer = replace(layer, width=width, value_width=value_width)
        ours.append(replace(layer, dtype=getattr(torch, source)))
        theirs.append(replace(layer, dtype=getattr(torch, target)))
        key = draw(layer_scales)
        scales[layer.name] = (key, draw(layer_scales) if layer.has_heads else key)
    return replace(model, layers=tuple(ours)), replace(model, layers=tuple(theirs)), scales


@st.composite
def exchanges(draw):
    """Both sides, and the rest for ``exchange``: of rows, or of whole pages where only pads differ."""
    as_pages = draw(st.sampled_from([False, False, False, True]))
    model, other, scales = draw(unlike_models())
    ours = draw(shapes(model))
    if as_pages:
        other, scales = model, {}
        theirs = replace(ours, pads={name: draw(st.integers(0, 3)) for name in ours.pads})
    else:
        theirs = draw(shapes(other))
    spans = []
    for group in model.groups:
        if any(layer.kind == "state" and layer.group == group for layer in model.layers):
            spans.append(TokenSpan(group, 0, 1))
            continue
        start = draw(st.integers(0, model.num_tokens - 1))
        spans.append(TokenSpan(group, start, draw(st.integers(start, model.num_tokens))))
    worlds = draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 5, 8, 16])] * 2))
    seed = draw(st.integers(0, M64 - 1))
    rank = seed % worlds[1]
    total_heads = model.total_heads if any(layer.has_heads for layer in model.layers) else None
    partners = partner_ranks(rank, *map(Topology, reversed(worlds)), total_heads)
    partner = draw(st.sampled_from(partners))
    if as_pages:
        worlds, rank, partner = (1, 1), 0, 0
    return (
        (model, ours, rank_heads(model, partner, worlds[0])),
        draw(held_blocks(model, ours, False)),
        (other, theirs, rank_heads(other, rank, worlds[1])),
        draw(held_blocks(other, theirs, True)),
        (spans, draw(st.sampled_from([64, 200, 1000, 1 << 20])), seed, scales),
        "pages" if as_pages else "rows",
        draw(st.sampled_from([1, 2, 3, 8])),
        draw(st.sampled_from([1, 7, 64, 1 << 15])),
        draw(st.sampled_from([1, 1, 3])),
    )


def copied_by(threads, **more):
    """A context in which numpy shares every chunk out to so many threads."""
    cores = range(threads * numpy_mover._CORES_PER_THREAD)
    return mock.patch.multiple(numpy_mover, _cores=lambda: cores, _LEAST_BYTES_EACH=1, **more)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.timeout(900)
def test_exactly_the_rows_are_moved(kernels, is_long):
    """Between any layouts, types and worlds. An example takes Triton's interpreter a third of a second."""
    examples = {"numpy": 300, "torch": 100, "triton": 50 if DEVICE == "cpu" else 300}[kernels]

    @settings(max_examples=10 * examples if is_long else examples)
    @given(exchanges())
    def every_row(case):
        source, held, target, wanted, given, order, programs, at_once, threads = case
        scales = given[-1]
        sides = [Side(*source, NUM_BLOCKS, 100, scales), Side(*target, NUM_BLOCKS, 7, scales)]
        for number, side in enumerate(sides):
            fill_values(side, number)
        with interpreted_by(programs), copied_by(threads, _VALUES_AT_ONCE=at_once):
            exchange(kernels, sides[0], held, sides[1], wanted, *given, order)

    every_row()


def simple_model(num_tokens=12, heads=4, width=8):
    return Model(
        (Layer("a", 0, "gqa", width, torch.float16), Layer("b", 0, "gqa", width, torch.float16)),
        heads,
        1,
        num_tokens,
    )


def simple_shape(layout="block token head", kernel=4):
    names = ("a", "b")
    return Shape(dict.fromkeys(names, layout), dict.fromkeys(names, 0), {0: kernel}, {0: 1})


def simple_blocks(model, shape):
    tokens = shape.kernel[0] * shape.ratio[0]
    return {0: GroupBlocks(0, 0, tuple(range(3, 3 + -(-model.num_tokens // tokens))))}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("sizes", [(16, 256), (256, 16), (64, 96)])
def test_block_sizes_in_any_ratio(kernels, sizes):
    model = simple_model(300, 2, 16)
    ours, theirs = (
        simple_shape("block token head", sizes[0]),
        simple_shape("plane block head token", sizes[1]),
    )
    source, target = (
        Side(model, shape, HeadInterval(0, 2), 24, seed) for shape, seed in ((ours, 1), (theirs, 2))
    )
    exchange(
        kernels,
        source,
        simple_blocks(model, ours),
        target,
        simple_blocks(model, theirs),
        [TokenSpan(0, 3, 299)],
        20_000,
        5,
    )


def one_way(kernels):
    """A side, a packer that reads its caches by address, and a chunk. The caches live as long as the side."""
    model, shape = simple_model(), simple_shape()
    side = Side(model, shape, HeadInterval(0, 4), NUM_BLOCKS, 1)
    wire = align_wire(side.table, side.table, "rows")
    packer = Packer(side.table, wire, side="source", device=DEVICE, kernels=kernels)
    chunk = Chunk(0, 2, (TokenSpan(0, 1, 11),))
    (staged,) = packer.stage(list(simple_blocks(model, shape).values()), [chunk], 12)
    return side, packer, staged


@settings(max_examples=60)
@given(data=st.data())
def test_a_digest_tells_any_damage(data):
    _side, packer, staged = one_way(KERNELS[0])
    slot = slot_for(staged)
    seed = data.draw(st.integers(0, M64 - 1))
    packed = packer.pack(slot.data_ptr(), staged, seed)
    packed.wait()
    raw = slot.cpu().numpy()[: staged.total_bytes].copy()
    damage = data.draw(st.sampled_from(["bit", "swap", "generation", "zeros", "shift", "high bits"]))
    other_seed = seed
    words = raw.view(np.uint64)
    a, b = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    if damage == "bit":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "swap":
        words[[a, b]] = words[[b, a]]
    elif damage == "generation":
        other_seed = data.draw(st.integers(0, M64 - 1).filter(lambda other: other != seed))
    elif damage == "zeros":
        words[min(a, b) : max(a, b)] = 0
    elif damage == "shift":
        words[:] = np.roll(words, 1)
    else:
        words[[a, b]] ^= np.uint64(1 << 63)
    slot[: staged.total_bytes] = torch.from_numpy(raw)
    landed = packer.unpack(slot.data_ptr(), staged, other_seed)
    landed.wait()
    assert landed.digest != packed.digest
    again = packer.pack(slot.data_ptr(), staged, other_seed)
    again.wait()
    assert again.digest == landed.digest, "what was written is what was digested"


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_digests_of_tickets_may_be_read_in_any_order(kernels):
    _side, packer, staged = one_way(kernels)
    slot = slot_for(staged)
    tickets = [packer.pack(slot.data_ptr(), staged, seed) for seed in (1, 2, 1)]
    for ticket in reversed(tickets):
        ticket.wait()
        assert ticket.done
    assert tickets[2].digest == tickets[0].digest != tickets[1].digest
    slot[0] ^= 1
    torn = packer.unpack(slot.data_ptr(), staged, 1)
    torn.wait()
    assert torn.digest != tickets[0].digest


@pytest.mark.skipif("numpy" not in KERNELS, reason="needs CPU memory")
def test_a_processor_packs_and_unpacks_in_no_thread_of_torch():
    """A serving stack may bind torch's threads to the cores where it computes, and refuse other numbers."""
    model, shape, heads = simple_model(1024, 4, 128), simple_shape(kernel=256), HeadInterval(0, 4)
    side = Side(model, shape, heads, NUM_BLOCKS, 1)
    wire = align_wire(side.table, side.table, "pages")
    blocks = list(simple_blocks(model, shape).values())
    threads = []

    def move() -> None:
        at_first = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            for way in ("source", "target"):
                packer = Packer(side.table, wire, side=way, device="cpu", kernels="numpy")
                (chunk,) = packer.chunker.cut([TokenSpan(0, 0, 1024)], 1 << 24)
                (staged,) = packer.stage(blocks, [chunk], 1024)
                slot = torch.from_numpy(np.ones(staged.total_bytes, np.uint8))
                threads.append(set(os.listdir("/proc/self/task")))
                with copied_by(1):
                    (packer.pack if way == "source" else packer.unpack)(slot.data_ptr(), staged, 1)
                threads.append(set(os.listdir("/proc/self/task")))
        finally:
            torch.set_num_threads(at_first)

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    assert len(threads) == 4
    assert not threads[1] - threads[0]
    assert not threads[3] - threads[2]


def test_a_chunk_without_lanes_here_is_one_share():
    with copied_by(4):
        assert numpy_mover._shares((), 4) == [()]


CORES_OF_A_HELPER = """
import os
from kvconnect.pack import numpy_mover
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(*numpy_mover._helpers().submit(os.sched_getaffinity, 0).result())
"""


@pytest.mark.parametrize("parent", ["this program", "a shell"])
def test_threads_that_copy_use_the_cores_of_a_parent_that_runs_the_same_program(parent):
    """A serving stack binds its child's first thread to one core; a user binds what a shell starts."""
    command = [sys.executable, "-c", CORES_OF_A_HELPER]
    if parent == "a shell":
        # The shell waits, rather than to become the program.
        command = ["sh", "-c", f"{shlex.join(command)}; true"]
    ended = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    cores = os.sched_getaffinity(0)
    assert set(map(int, ended.stdout.split())) == (cores if parent == "this program" else {min(cores)})


@pytest.mark.skipif("numpy" not in KERNELS, reason="needs CPU memory")
def test_a_share_whose_thread_cannot_be_started_is_not_copied_later(monkeypatch):
    """The library queues it before it starts a thread for it."""
    _side, packer, staged = one_way("numpy")
    slot, moved, started, start = slot_for(staged), [], [], threading.Thread.start

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def move_rows(*_arguments):
        time.sleep(0.1)
        moved.append(threading.current_thread())

    numpy_mover._helpers.cache_clear()
    with copied_by(3, _move_rows=move_rows, _shares=lambda moves, _most: [moves] * 3):
        monkeypatch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(RuntimeError, match="can't start"):
            packer.pack(slot.data_ptr(), staged, 1)
        before = len(moved)
        time.sleep(0.3)
        assert len(moved) == before
        monkeypatch.undo()
        packer.pack(slot.data_ptr(), staged, 1)
        assert len(set(moved[before:])) == 3


@pytest.mark.skipif("numpy" not in KERNELS, reason="needs CPU memory")
@pytest.mark.parametrize("failing", ["MainThread", "kvconnect-copy"])
def test_an_error_of_one_thread_that_copies_is_raised_once_all_have_ended(failing, monkeypatch):
    _side, packer, staged = one_way("numpy")
    ended = []

    def move_rows(*_arguments):
        fails = threading.current_thread().name.startswith(failing)
        time.sleep(0 if fails else 0.2)
        ended.append(fails)
        if fails:
            raise ValueError("no such page")

    monkeypatch.setattr(numpy_mover, "_move_rows", move_rows)
    with copied_by(2), pytest.raises(ValueError, match="no such page"):
        packer.pack(slot_for(staged).data_ptr(), staged, 1)
    assert ended == [True, False]


@pytest.mark.skipif("triton" not in KERNELS, reason="Triton is not installed")
def test_more_tickets_than_places_keep_their_digests(monkeypatch):
    monkeypatch.setattr("kvconnect.pack.triton_mover._PLACES", 8)
    _side, packer, staged = one_way("triton")
    slot = slot_for(staged)
    seeds = list(range(30))
    tickets = []
    for seed in seeds:
        tickets.append(packer.pack(slot.data_ptr(), staged, seed))
        if seed % 5 == 4:
            tickets[-1].wait()
    tickets[-1].wait()
    digests = [ticket.digest for ticket in tickets]
    assert len(set(digests)) == len(seeds)
    once = packer.pack(slot.data_ptr(), staged, 0)
    once.wait()
    assert once.digest == digests[0]


class Compiled:
    """What a launch by the language returns; started like that, it takes all arguments by position."""

    def __init__(self, parameters):
        self.starts, self._parameters = [], parameters

    def __getitem__(self, grid):
        return lambda *given: self.starts.append((grid, dict(zip(self._parameters, given, strict=True))))


class Language:
    """Compiles at each launch, and remembers with what."""

    def __init__(self, parameters):
        self.launches, self.made, self._parameters = [], [], parameters

    def __getitem__(self, grid):
        def launch(*given, num_warps, **named):
            self.launches.append((grid, {**dict(zip(self._parameters, given, strict=False)), **named}))
            self.made.append(Compiled(self._parameters))
            return self.made[-1]

        return launch


@pytest.mark.skipif("triton" not in KERNELS, reason="Triton is not installed")
def test_a_compiled_kernel_is_started_with_nothing_but_the_same_arguments(monkeypatch):
    from kvconnect.pack import launcher

    parameters = tuple(inspect.signature(launcher.move_kernel.fn).parameters)
    language = Language(parameters)
    monkeypatch.setattr(launcher, "CompiledKernel", Compiled)
    monkeypatch.setattr(launcher, "move_kernel", language)
    side, packer, _ = one_way("triton")
    chunks = [Chunk(0, 2, (TokenSpan(0, 0, stop),)) for stop in (4, 8)]
    slot = torch.zeros(1 << 14, dtype=torch.uint8, device=DEVICE)
    for staged in packer.stage(list(simple_blocks(side.model, side.shape).values()), chunks, 12):
        for move in (packer.pack, packer.unpack):
            move(slot.data_ptr(), staged, 7)
    assert len(language.launches) == 2, "one for each kind of kernel, whatever the chunk"
    varying = ("numbers", "batches_at", "num_items", "seed")
    for made, (grid, asked) in zip(language.made, language.launches, strict=True):
        ((started_on, started_with),) = made.starts
        assert started_on[0] >= grid[0]
        assert tuple(started_with) == parameters
        for name in set(parameters) - {*varying}:
            assert started_with[name] is asked[name] or started_with[name] == asked[name]
        assert started_with["numbers"].data_ptr() % 16 == 0


def test_slots_that_are_askew_are_refused():
    _side, packer, staged = one_way(KERNELS[0])
    slot = slot_for(staged)
    for move, offset in ((packer.pack, 8), (packer.unpack, 4)):
        with pytest.raises(LocalError, match="multiples of 16"):
            move(slot.data_ptr() + offset, staged, 1)
    packer.pack(slot.data_ptr(), staged, 1).wait()


def test_what_cannot_be_staged_is_refused():
    model, shape = simple_model(), simple_shape()
    side = Side(model, shape, HeadInterval(0, 4), NUM_BLOCKS, 1)
    wire = align_wire(side.table, side.table, "rows")
    packer = Packer(side.table, wire, side="source", device=DEVICE)
    chunk = Chunk(0, 2, (TokenSpan(0, 0, 12),))
    with pytest.raises(LocalError, match=rf"the\s+cache has 0..{NUM_BLOCKS - 1}"):
        packer.stage([GroupBlocks(0, 0, (3, NUM_BLOCKS, 4))], [chunk], 12)
    with pytest.raises(LayoutError, match="tokens 4 to 7 of the request"):
        packer.stage([GroupBlocks(0, 0, (3, 0, 4))], [chunk], 12)
    with pytest.raises(LayoutError, match="tokens 8 to 11 of the request"):
        packer.stage([GroupBlocks(0, 0, (3, 4))], [chunk], 12)
    with pytest.raises(LayoutError, match="group 0 of this side, the request has none"):
        packer.stage([], [chunk], 12)
    with pytest.raises(LayoutError, match="the cache 40"):
        packer.stage([GroupBlocks(0, 0, (3,))], [Chunk(0, 2, (TokenSpan(0, 0, 2**31 - 1),))], 12)
    for bad in (
        Chunk(0, 3, ()),
        Chunk(1, 1, ()),
        Chunk(0, 2, (TokenSpan(1, 0, 1),)),
        Chunk(0, 2, (TokenSpan(0, 4, 3),)),
        Chunk(0, 2, (TokenSpan(0, 0, 1), TokenSpan(0, 1, 2))),
    ):
        with pytest.raises(LayoutError, match="a chunk"):
            packer.stage([GroupBlocks(0, 0, (3, 4, 5))], [bad], 12)


def test_a_wire_of_other_tables_is_refused():
    model = simple_model()
    one = Side(model, simple_shape(), HeadInterval(0, 4), NUM_BLOCKS, 1)
    half = Side(model, simple_shape(), HeadInterval(0, 2), NUM_BLOCKS, 1)
    long = Side(model, simple_shape(kernel=8), HeadInterval(0, 4), NUM_BLOCKS, 1)
    for wire, table in (
        (align_wire(one.table, one.table, "rows"), half.table),
        (align_wire(one.table, one.table, "pages"), long.table),
    ):
        with pytest.raises(LayoutError, match="layer 'a'"):
            Packer(table, wire, side="target", device=DEVICE)

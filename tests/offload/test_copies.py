"""Copies between blocks and rows against plain slices: one contract for every copier."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.offload.copies.copier import Direction, Ring, StagedCopier, make_arena, make_copier
from kvconnect.offload.copies.rows import RowLayout, RowParts
from kvconnect.pack.launcher import Launcher
from kvconnect.transfer.orders import RowCopies
from tests.caches import overlaid_groups
from tests.offload.rows_by_hand import Image, copy_back, copy_out, plan_rows, rows_of
from tests.offload.slow_device import PlainLauncher, SlowDevice
from tests.pack.sides import DEVICE, KERNELS, Layer, Model, Shape, Side, models, shapes

NUM_BLOCKS = 12
NUM_ROWS = 9
COPIERS = ["cpu", "dma"] if "triton" in KERNELS else ["cpu"]
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="memory of a GPU: see tests/gpu")


class Bench:
    """A cache, rows, and a copier between them."""

    def __init__(self, table, tensors, kind, *, half_bytes=4096, seed=0, launcher=None):
        self.table, self.tensors = table, tensors
        self.layout = RowLayout.build(table)
        self.arena = make_arena(plan_rows(self.layout.row_bytes, NUM_ROWS), "cpu")
        for group in self.layout.lanes:
            rows_of(self.arena, group)[:] = 0xA5
        self.device = SlowDevice(seed)
        if kind == "cpu":
            self.copier = make_copier(self.layout, self.arena, "cpu")
            return
        self.staging = torch.zeros(2 * half_bytes + 64, dtype=torch.uint8)
        address = -(-self.staging.data_ptr() // 64) * 64
        parts = RowParts(self.layout, self.arena, half_bytes // 4)
        all_lanes = [lanes for kind in parts.lanes_of for lanes in kind]
        storing, restoring = (
            Direction(
                parts,
                (launcher or Launcher)(all_lanes, torch.device("cpu"), is_placed=True),
                Ring(address + at, half_bytes),
            )
            for at in (0, half_bytes)
        )
        self.copier = StagedCopier(parts, self.device, storing, restoring, keep=self.staging)

    def image(self):
        return Image(self.table, self.tensors)

    def rows(self):
        return {group: rows_of(self.arena, group).copy() for group in self.layout.lanes}

    def check(self, image, rows):
        """The cache and the rows hold this; of rows only what has a meaning."""
        assert self.image().same_as(image)
        for group, wanted in rows.items():
            content = len(image.row(group, 1))
            assert np.array_equal(rows_of(self.arena, group)[:, :content], wanted[:, :content])


@st.composite
def some_copies(draw, groups):
    """Orders for some of the groups: distinct blocks and distinct rows, in any order."""
    made = []
    for group in draw(st.lists(st.sampled_from(groups), max_size=3, unique=True)):
        count = draw(st.integers(0, 5))
        blocks = draw(st.permutations(range(1, NUM_BLOCKS)))[:count]
        rows = draw(st.permutations(range(NUM_ROWS)))[:count]
        made.append(RowCopies(group, tuple(blocks), tuple(rows)))
    return made


@st.composite
def caches(draw):
    model = draw(models())
    shape = draw(shapes(model))
    return Side(model, shape, HeadInterval(0, model.total_heads), NUM_BLOCKS, draw(st.integers(0, 99)))


# Fifteen examples in Triton's interpreter: a minute where the machine is busy.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", COPIERS)
@settings(max_examples=15)
@given(data=st.data())
def test_rows_hold_what_blocks_held_and_blocks_what_rows_held(kind, data):
    side = data.draw(caches())
    half_bytes = data.draw(st.sampled_from([256, 512, 1536, 8192]))
    bench = Bench(side.table, side.tensors, kind, half_bytes=half_bytes, seed=data.draw(st.integers(0, 99)))
    image, rows = bench.image(), bench.rows()
    snapshot = data.draw(some_copies(list(bench.layout.lanes)))
    ticket = bench.copier.snapshot(snapshot)
    ticket.wait()
    assert ticket.done
    assert ticket.error is None
    copy_out(image, rows, snapshot)
    bench.check(image, rows)

    restore = data.draw(some_copies(list(bench.layout.lanes)))
    ticket = bench.copier.restore(restore, bench.copier.mark())
    ticket.wait()
    assert ticket.done
    assert ticket.error is None
    copy_back(image, rows, restore)
    bench.check(image, rows)
    bench.copier.close()


def two_groups():
    layers = (
        Layer("a", 0, "gqa", 8, torch.float16),
        Layer("b", 0, "gqa", 8, torch.float16),
        Layer("c", 1, "window", 4, torch.float16),
    )
    model = Model(layers, 3, 8, 12)
    layouts = {"a": "block token head", "b": "plane head block token", "c": "head block token"}
    shape = Shape(layouts, {"a": 2, "b": 0, "c": 0}, {0: 4, 1: 2}, {0: 1, 1: 3})
    return Side(model, shape, HeadInterval(0, 3), NUM_BLOCKS, 5)


@settings(max_examples=200)
@given(
    half_bytes=st.sampled_from([512, 1024, 4096]),
    seed=st.integers(0, 10_000),
    rounds=st.integers(1, 8),
)
def test_nothing_overtakes_what_it_depends_on(half_bytes, seed, rounds):
    """The model writes to blocks right after they were asked for, before restores and after them."""
    side = two_groups()
    bench = Bench(side.table, side.tensors, "dma", half_bytes=half_bytes, seed=seed, launcher=PlainLauncher)
    random, device, copier = bench.device.random, bench.device, bench.copier
    image, rows = bench.image(), bench.rows()
    filling, restoring = {}, {}
    for _ in range(rounds):
        for group in (0, 1):
            free = [row for row in range(NUM_ROWS) if (group, row) not in filling]
            blocks = [block for block in range(1, NUM_BLOCKS) if (group, block) not in restoring]
            count = random.randrange(min(len(free), len(blocks), 6) + 1)
            blocks, free = random.sample(blocks, count), random.sample(free, count)
            copies = [RowCopies(group, tuple(blocks), tuple(free))]
            ticket = copier.snapshot(copies)
            copy_out(image, rows, copies)
            filling |= {(group, row): ticket for row in free}
            for block in blocks:
                values = np.frombuffer(random.randbytes(len(image.row(group, block))), dtype=np.uint8)
                image.write(group, block, values)
                device.of_model.run(partial(write_now, bench, group, block, values))
        for known in (filling, restoring):
            for key in [key for key, ticket in known.items() if ticket.done]:
                assert known.pop(key).error is None
        group = random.randrange(2)
        ready = [row for row in range(NUM_ROWS) if (group, row) not in filling]
        blocks = [block for block in range(1, NUM_BLOCKS) if (group, block) not in restoring]
        count = random.randrange(min(len(ready), len(blocks), 5) + 1)
        ready, blocks = random.sample(ready, count), random.sample(blocks, count)
        copies = [RowCopies(group, tuple(blocks), tuple(ready))]
        ticket = copier.restore(copies, copier.mark())
        copy_back(image, rows, copies)
        restoring |= {(group, block): ticket for block in blocks}
        # Nobody writes to a row that is being read.
        filling |= {(group, row): ticket for row in ready}
        device.work(random.randrange(30))
    device.finish()
    for ticket in (*filling.values(), *restoring.values()):
        assert ticket.done
        assert ticket.error is None
    bench.check(image, rows)


def write_now(bench, group, block, values):
    """What a kernel of the model does."""
    now = bench.image()
    now.write(group, block, values)
    for cache in bench.tensors.values():
        storage = cache.tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        raw.copy_(torch.from_numpy(now.storages[storage.data_ptr()]))


def test_a_wait_for_staging_memory_is_timed():
    side = two_groups()
    bench = Bench(side.table, side.tensors, "dma", half_bytes=1024, launcher=PlainLauncher)
    everything = RowCopies(0, tuple(range(1, 10)), tuple(range(9)))
    ticket = bench.copier.snapshot([everything])
    ticket.wait()
    assert ticket.waited_s > 0
    assert ticket.waited_s % 0.5 == 0, "by events half a second apart"
    small = bench.copier.snapshot([RowCopies(1, (1,), (0,))])
    small.wait()
    assert small.waited_s == 0


@pytest.mark.parametrize("kind", COPIERS)
@pytest.mark.parametrize(
    ("copies", "text"),
    [
        (RowCopies(0, (1, 0), (1, 2)), "blocks 1 to 11; asked for are 0 to 1"),
        (RowCopies(0, (1, 12), (1, 2)), "asked for are 1 to 12"),
        (RowCopies(0, (1, 2), (1, 9)), "rows 0 to 8; asked for are 1 to 9"),
        (RowCopies(0, (1, 2), (-1, 2)), "asked for are -1 to 2"),
        (RowCopies(0, (1, 2), (1,)), "2 blocks of cache group 0 came with 1 rows"),
        (RowCopies(7, (1,), (1,)), "cache group 7 has no rows; those that have: [0, 1]"),
    ],
)
def test_what_does_not_exist_is_not_copied_and_the_ticket_says_so(kind, copies, text):
    side = two_groups()
    bench = Bench(side.table, side.tensors, kind)
    image, rows = bench.image(), bench.rows()
    good = RowCopies(1, (4,), (4,))
    for ticket in (bench.copier.snapshot([good, copies]), bench.copier.restore([good, copies])):
        assert ticket.done
        assert text in ticket.error
    bench.device.finish()
    bench.check(image, rows)


def test_a_copy_that_fails_half_way_ends_once_all_is_quiet_and_those_after_it_are_right():
    side = two_groups()
    bench = Bench(side.table, side.tensors, "dma", half_bytes=1024, seed=3, launcher=PlainLauncher)
    everything = RowCopies(0, tuple(range(1, 10)), tuple(range(9)))
    for call in (bench.copier.snapshot, bench.copier.restore):
        bench.device.copies_left = 2
        ticket = call([everything])
        ticket.wait()
        assert ticket.done
        assert "no more copies" in ticket.error
        assert not any(what == "do" for queue in bench.device.queues for what, _ in queue.work)
    image, rows = bench.image(), bench.rows()
    bench.copier.snapshot([everything]).wait()
    copy_out(image, rows, [everything])
    bench.check(image, rows)


def test_groups_that_lie_over_each_other_have_rows_of_their_own():
    raw = torch.randint(0, 256, (NUM_BLOCKS * 512,), dtype=torch.uint8)
    tensors = {
        "attention": CacheTensor(
            raw.view(torch.float16).view(NUM_BLOCKS, 4, 4, 16), "block token head content"
        ),
        # A state is shorter than the page that it lies in.
        "state": CacheTensor(raw.view(torch.float16).view(NUM_BLOCKS, 256)[:, :100], "block content"),
    }
    groups = (
        KVCacheGroup(("attention",), AttentionSpec(4, 4, 8, torch.float16)),
        KVCacheGroup(("state",), StateSpec(64, ((100,),), (torch.float16,))),
    )
    table = RegionTable.build(KVCacheConfig(NUM_BLOCKS, groups), {0: 4, 1: 64}, tensors)
    assert overlaid_groups(table)
    for kind in COPIERS:
        bench = Bench(table, tensors, kind)
        assert bench.layout.row_bytes == {0: 512, 1: 256}
        image, rows = bench.image(), bench.rows()
        copies = [RowCopies(0, (1, 2), (3, 4)), RowCopies(1, (3, 4), (3, 4))]
        bench.copier.snapshot(copies).wait()
        copy_out(image, rows, copies)
        bench.check(image, rows)

"""What a row holds, how it is cut for a kernel, and where it lies in host memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.errors import ConfigError, EngineError, LayoutError, LocalError
from kvconnect.offload.copies.copier import Ring
from kvconnect.offload.copies.rows import RowArena, RowLayout, RowParts, row_table
from kvconnect.offload.index.budgets import ArenaPlan, RowClass, plan_arena
from kvconnect.transfer.orders import RowCopies
from tests.offload.rows_by_hand import plan_rows
from tests.offload.rows_by_hand import rows_of as rows_by_hand
from tests.pack.sides import NUM_BLOCKS, Side, models, shapes


def bytes_of_lanes(lanes, block):
    """Where the bytes of a block lie, by place in the row; lanes are (address, stride, length, offset)."""
    found = {}
    for address, stride, length, offset in lanes:
        for at in range(length):
            assert offset + at not in found
            found[offset + at] = address + block * stride + at
    return [found[at] for at in range(len(found))]


def bytes_of_pages(table, group, block):
    ratio = table.geometry()[group].blocks_per_kv_block
    return [
        region.address + page * region.block_stride + at
        for region in table.regions
        if region.group == group
        for page in range(block * ratio, (block + 1) * ratio)
        for at in range(region.page_bytes)
    ]


@st.composite
def tables(draw):
    model = draw(models())
    side = Side(model, draw(shapes(model)), HeadInterval(0, model.total_heads), NUM_BLOCKS, 0)
    return side.table, side


@settings(max_examples=50)
@given(made=tables(), block=st.integers(0, NUM_BLOCKS - 1), part_bytes=st.sampled_from([64, 128, 4096]))
def test_a_row_is_the_pages_of_a_block_one_after_the_other_whole_and_in_parts(made, block, part_bytes):
    table, _ = made
    layout = RowLayout.build(table)
    assert list(layout.lanes) == [geometry.group for geometry in table.groups]
    assert layout.num_blocks == NUM_BLOCKS
    for group, row_bytes in layout.row_bytes.items():
        wanted = bytes_of_pages(table, group, block)
        assert bytes_of_lanes(layout.lanes[group], block) == wanted
        assert row_bytes % 64 == 0
        assert 0 <= row_bytes - len(wanted) < 64
        lanes = []
        for first in range(0, row_bytes, part_bytes):
            for alike in layout.lanes_of(group, 5, first, first + part_bytes):
                walk, access = alike.walk, alike.access
                assert (alike.group, alike.num_blocks) == (5, NUM_BLOCKS)
                assert walk.tokens == walk.heads == walk.planes == 1
                assert access.unit in (1, 2, 4, 8, 16)
                for address, offset in zip(alike.address.tolist(), alike.wire_offset.tolist(), strict=True):
                    assert offset + walk.page_bytes <= part_bytes
                    numbers = (address, walk.block_stride, walk.run_bytes, offset)
                    assert not any(number % access.unit for number in numbers)
                    lanes.append((*numbers[:3], first + offset))
        assert bytes_of_lanes(lanes, block) == wanted


@settings(max_examples=50)
@given(made=tables(), row=st.integers(0, 3))
def test_rows_are_blocks_of_a_region_table(made, row):
    table, _ = made
    layout = RowLayout.build(table)
    plan = plan_arena(1 << 22, layout.row_bytes, dict.fromkeys(layout.row_bytes, 1))
    arena = RowArena(plan)
    ratios = {geometry.group: geometry.blocks_per_kv_block for geometry in table.groups}
    lengths = {group: {it.page_bytes for it in table.regions if it.group == group} for group in ratios}
    if any(ratio > 1 and len(lengths[group]) > 1 for group, ratio in ratios.items()):
        with pytest.raises(LayoutError, match="accepted: pages of one length"):
            row_table(table, arena)
        return
    rows, pages = row_table(table, arena)
    for group, ratio in ratios.items():
        at = arena.address + plan.offset_bytes(group, row)
        ids = pages[group].ids(np.array([row, plan.row_class(group).num_rows - 1]))
        assert ids.shape == (2, ratio)
        assert rows.geometry()[group].blocks_per_kv_block == 1
        for ours, theirs in zip(rows.regions, table.regions, strict=True):
            assert (ours.layer, ours.page_bytes, ours.axes) == (theirs.layer, theirs.page_bytes, theirs.axes)
            if ours.group != group:
                continue
            for page in ids[0].tolist():
                assert ours.address + page * ours.block_stride == at
                at += ours.page_bytes
            assert ids.min() > 0
            assert ids.max() == ours.num_blocks - 1
            end = arena.address + plan.row_class(group).offset_bytes
            assert ours.end <= end + plan.row_class(group).num_rows * plan.row_class(group).row_bytes


def test_layers_side_by_side_in_one_block_are_one_lane():
    raw = torch.zeros(6, 2, 512, dtype=torch.uint8)
    names = ("a", "b")
    tensors = {
        name: CacheTensor(raw[:, index].view(torch.float16).view(6, 4, 4, 16), "block token head content")
        for index, name in enumerate(names)
    }
    config = KVCacheConfig(6, (KVCacheGroup(names, AttentionSpec(4, 4, 8, torch.float16)),))
    layout = RowLayout.build(RegionTable.build(config, {0: 4}, tensors))
    assert [(lane.length, lane.stride, lane.offset) for lane in layout.lanes[0]] == [(1024, 1024, 0)]
    (alike,) = layout.lanes_of(0, 0, 0, 1024)
    assert alike.access.unit == 16


def test_a_group_without_layers_here_has_rows_without_content():
    spec = AttentionSpec(4, 1, 8, torch.float16)
    config = KVCacheConfig(
        6,
        (KVCacheGroup(("a",), spec), KVCacheGroup(("elsewhere",), StateSpec(64, ((3,),), (torch.float32,)))),
    )
    tensor = CacheTensor(torch.zeros(6, 4, 1, 16, dtype=torch.float16), "block token head content")
    layout = RowLayout.build(RegionTable.build(config, {0: 4, 1: 64}, {"a": tensor}))
    assert layout.row_bytes == {0: 128, 1: 64}
    assert layout.lanes[1] == []
    assert layout.num_blocks == 6


def rows_of(row_bytes, num_rows, border_bytes=1 << 20):
    """Rows of these lengths by group, without lanes, in memory that is pinned so many bytes at a time."""
    layout = RowLayout(100, dict.fromkeys(range(len(row_bytes)), ()), dict(enumerate(row_bytes)))
    return layout, RowArena(plan_rows(layout.row_bytes, num_rows), Pins(), piece_bytes=border_bytes)


@given(
    data=st.data(),
    row_bytes=st.lists(st.sampled_from([64, 128, 640]), min_size=1, max_size=3),
    part_bytes=st.sampled_from([64, 192, 1024]),
    most=st.sampled_from([64, 200, 256, 4096]),
)
def test_pieces_and_their_copies_are_all_bytes_once(data, row_bytes, part_bytes, most):
    """Rows side by side, apart, and the same one twice; those of several groups, whole and in parts."""
    layout, arena = rows_of(row_bytes, 20, data.draw(st.sampled_from([4096, 8192])))
    copies, wanted = [], []
    for group in data.draw(st.permutations(range(len(row_bytes)))):
        numbers = data.draw(st.lists(st.integers(0, 19), max_size=12))
        blocks = data.draw(st.lists(st.integers(1, 99), min_size=len(numbers), max_size=len(numbers)))
        copies.append(RowCopies(group, tuple(blocks), tuple(numbers)))
        for block, number in zip(blocks, numbers, strict=True):
            start = arena.address + arena.plan.offset_bytes(group, number)
            wanted += [(group, block, start + at) for at in range(row_bytes[group])]
    parts = RowParts(layout, arena, part_bytes)
    ends, group_of = {}, {}
    for group, length in enumerate(row_bytes):
        for first in range(0, length, part_bytes):
            group_of[len(ends)] = group
            ends[len(ends)] = min(part_bytes, length - first)
    seen = []
    for piece in parts.pieces(copies, most):
        parts_here = [
            (pages.group, *pair)
            for pages, column in piece.numbers.items()
            for pair in column.reshape(2, pages.count).T.tolist()
        ]
        assert piece.total_bytes == sum(ends[kind] for kind, _, _ in parts_here)
        assert piece.total_bytes <= most or len(parts_here) == 1
        found = {}
        for host, place, length in zip(*(column.tolist() for column in piece.copies), strict=True):
            assert length > 0
            assert not any(host < border < host + length for border in arena.borders)
            found |= {place + at: host + at for at in range(length)}
        assert sorted(found) == list(range(piece.total_bytes))
        assert sum(piece.copies[2].tolist()) == piece.total_bytes
        for kind, block, place in parts_here:
            seen += [(group_of[kind], block, found[place + at]) for at in range(ends[kind])]
    assert sorted(seen) == sorted(wanted)


def test_adjacent_rows_are_one_copy():
    layout, arena = rows_of([128], 8)
    parts = RowParts(layout, arena, 1024)
    copies = [RowCopies(0, tuple(range(1, 9)), tuple(range(7, -1, -1)))]
    (piece,) = parts.pieces(copies, 1 << 20)
    assert [column.tolist() for column in piece.copies] == [[arena.address], [0], [1024]]
    assert [len(column) for piece in parts.pieces(copies, 256) for column in piece.numbers.values()] == [
        4
    ] * 4


@given(lengths=st.lists(st.integers(1, 100), max_size=40), size=st.integers(100, 250))
def test_a_ring_gives_no_byte_twice_without_a_fence_between(lengths, size):
    ring, owner = Ring(1000, size), {}
    passed = -1
    for number, length in enumerate(lengths):
        address, fence = ring.take(length)
        if fence is not None:
            assert fence > passed
            passed = fence
        assert 1000 <= address <= 1000 + size - length
        for at in range(address, address + length):
            assert owner.get(at, -1) <= passed
            owner[at] = number
        ring.seal(number)


PLAN = ArenaPlan(
    (RowClass(128, 40, 0), RowClass(64, 100, 5120)), {0: 0, 2: 1, 5: 1}, {0: 40, 2: 50, 5: 50}, 11520
)


class Pins:
    def __init__(self, most=100):
        self.held, self.most = {}, most

    def pin(self, address, length_bytes):
        if len(self.held) == self.most:
            raise EngineError("no more")
        self.held[address] = length_bytes

    def unpin(self, address):
        del self.held[address]


def test_rows_of_all_classes_lie_apart_in_one_mapping():
    arena = RowArena(PLAN)
    for group, row in ((0, 0), (0, 39), (2, 0), (5, 99)):
        arena.row(group, row)[:] = bytes([group + 1]) * len(arena.row(group, row))
    assert rows_by_hand(arena, 0).shape == (40, 128)
    assert (rows_by_hand(arena, 0)[[0, 39]] == 1).all()
    # Groups of a class share its rows.
    assert (rows_by_hand(arena, 5)[0] == 3).all()
    assert (rows_by_hand(arena, 2)[99] == 6).all()
    assert sum(int((rows_by_hand(arena, group) != 0).sum()) for group in (0, 2)) == 2 * 128 + 2 * 64
    addresses = arena.addresses(2, np.array([3, 0]))
    assert (addresses - arena.address).tolist() == [5120 + 3 * 64, 5120]
    assert arena.address % 4096 == 0
    for call in (
        lambda: arena.row(2, 100),
        lambda: arena.addresses(2, np.array([100])),
        lambda: arena.row(1, 0),
    ):
        with pytest.raises(LocalError):
            call()


def test_memory_is_pinned_in_pieces_and_let_go_once():
    pins = Pins()
    arena = RowArena(PLAN, pins, piece_bytes=8192)
    assert sum(pins.held.values()) == arena.length_bytes == 12288
    assert sorted(pins.held) == [arena.address, *arena.borders]
    assert arena.borders == [arena.address + 8192]
    arena.close()
    assert not pins.held
    arena.close()


def test_memory_that_cannot_be_pinned_is_refused_and_none_of_it_stays_pinned():
    pins = Pins(most=1)
    with pytest.raises(ConfigError, match=r"offload\.cpu_bytes: .* 8192 of 12288 bytes .*\(no more\)"):
        RowArena(PLAN, pins, piece_bytes=8192)
    assert not pins.held


def test_more_memory_than_there_is_names_the_setting():
    plan = ArenaPlan((RowClass(1 << 40, 1 << 20, 0),), {0: 0}, {0: 1 << 20}, 1 << 60)
    with pytest.raises(ConfigError, match=r"offload\.cpu_bytes: the machine does not give \d+ bytes"):
        RowArena(plan)

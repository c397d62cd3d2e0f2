"""What a row holds, how it is cut for a kernel, and where it lies in host memory."""

from __future__ import annotations

import logging
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.errors import ConfigError, EngineError, LocalError
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.offload.copies.staging import Ring
from kvconnect.offload.copies.tiles import _MOST_TILE_BYTES as sizes
from kvconnect.offload.copies.tiles import Parts, TileTable, kinds_of
from kvconnect.offload.index.budgets import ArenaPlan, RowClass
from tests.pack.sides import NUM_BLOCKS, Side, models, shapes


def bytes_of_lanes(rows, block):
    """Where the bytes of a block lie, by their place in the row."""
    found = {}
    for address, stride, length, offset in zip(
        rows.address, rows.stride, rows.length, rows.offset, strict=True
    ):
        for at in range(length):
            assert offset + at not in found
            found[int(offset + at)] = int(address + block * stride + at)
    return [found[at] for at in range(len(found))]


def bytes_of_pages(table, group, block):
    ratio = table.geometry_of(group).blocks_per_kv_block
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
@given(made=tables(), block=st.integers(0, NUM_BLOCKS - 1))
def test_a_row_is_the_pages_of_a_block_one_after_the_other(made, block):
    table, _ = made
    layout = RowLayout.build(table)
    assert list(layout.groups) == [geometry.group for geometry in table.groups]
    for group, rows in layout.groups.items():
        wanted = bytes_of_pages(table, group, block)
        assert bytes_of_lanes(rows, block) == wanted
        assert rows.content_bytes == len(wanted)
        assert rows.row_bytes % 64 == 0
        assert 0 <= rows.row_bytes - rows.content_bytes < 64
        assert rows.num_blocks == NUM_BLOCKS
        for columns in zip(rows.address, rows.stride, rows.length, rows.offset, rows.unit, strict=True):
            assert columns[-1] in (1, 2, 4, 8, 16)
            assert not any(number % columns[-1] for number in columns[:-1])
    assert layout.row_bytes == {group: rows.row_bytes for group, rows in layout.groups.items()}


@settings(max_examples=50)
@given(
    made=tables(),
    block=st.integers(0, NUM_BLOCKS - 1),
    part_bytes=st.sampled_from([64, 128, 4096]),
    tile_units=st.sampled_from([1, 3, 4, 1024]),
)
def test_tiles_of_all_parts_are_the_row(made, block, part_bytes, tile_units):
    with patch.dict(sizes, {unit: unit * tile_units for unit in sizes}):
        check_tiles(made, block, part_bytes)


def check_tiles(made, block, part_bytes):
    table, _ = made
    for group, rows in RowLayout.build(table).groups.items():
        kinds = kinds_of(rows, part_bytes)
        assert [kind.length_bytes for kind in kinds[:-1]] == [part_bytes] * (len(kinds) - 1)
        assert sum(kind.length_bytes for kind in kinds) == rows.row_bytes
        tiles = TileTable(kinds)
        # One row at address 0, in parts.
        starts = np.arange(len(kinds)) * part_bytes
        order = np.random.default_rng(block).permutation(len(kinds))
        numbers, launches = tiles.launches(order, np.full(len(kinds), block), starts[order])
        found = {}
        for launch in launches:
            for page, row, length in tiles_of(tiles, numbers, launch):
                assert 0 < length <= tiles.tile_bytes[launch.unit]
                assert not (page | row | length) % launch.unit
                for at in range(length):
                    assert row + at not in found
                    found[row + at] = page + at
        assert [found[at] for at in range(len(found))] == bytes_of_pages(table, group, block)


def tiles_of(tiles, numbers, launch):
    """Page address, row address and length of every item of a launch, found one by one."""
    batches = [numbers[launch.batches_at + 4 * index :][:4].tolist() for index in range(launch.num_batches)]
    for item in range(launch.num_items):
        first, each, tiles_at, pairs_at = [batch for batch in batches if batch[0] <= item][-1]
        row, tile = divmod(item - first, each)
        block, in_row = numbers[pairs_at + 2 * row :][:2].tolist()
        address, stride, offset, length = tiles.numbers[4 * (tiles_at + tile) :][:4].tolist()
        yield address + block * stride, in_row + offset, length


def test_layers_side_by_side_in_one_block_are_one_lane():
    raw = torch.zeros(6, 2, 512, dtype=torch.uint8)
    names = ("a", "b")
    tensors = {
        name: CacheTensor(raw[:, index].view(torch.float16).view(6, 4, 4, 16), "block token head content")
        for index, name in enumerate(names)
    }
    config = KVCacheConfig(6, (KVCacheGroup(names, FullAttentionSpec(4, 4, 8, torch.float16)),))
    rows = RowLayout.build(RegionTable.build(config, {0: 4}, tensors)).of(0)
    assert rows.length.tolist() == [1024]
    assert rows.stride.tolist() == [1024]
    assert rows.unit.tolist() == [16]


def test_a_group_without_layers_here_has_rows_without_content():
    spec = FullAttentionSpec(4, 1, 8, torch.float16)
    config = KVCacheConfig(
        6,
        (KVCacheGroup(("a",), spec), KVCacheGroup(("elsewhere",), StateSpec(64, ((3,),), (torch.float32,)))),
    )
    tensor = CacheTensor(torch.zeros(6, 4, 1, 16, dtype=torch.float16), "block token head content")
    layout = RowLayout.build(RegionTable.build(config, {0: 4, 1: 64}, {"a": tensor}))
    assert layout.row_bytes == {0: 128, 1: 64}
    assert layout.of(1).content_bytes == 0
    assert layout.of(1).num_blocks == 6
    with pytest.raises(LocalError, match=r"there is no cache group 2; accepted: \[0, 1\]"):
        layout.of(2)


@given(
    data=st.data(),
    lengths=st.lists(st.sampled_from([64, 128, 640]), min_size=1, max_size=12),
    most=st.sampled_from([64, 200, 256, 4096]),
)
def test_pieces_and_their_copies_are_all_bytes_once(data, lengths, most):
    """Parts side by side, apart, and the same one twice."""
    gaps = [data.draw(st.sampled_from([0, 0, 64])) for _ in lengths]
    address = 4096 + np.cumsum(np.array(gaps) + np.array([0, *lengths[:-1]]))
    again = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=3))
    address = np.concatenate([address, address[again]]).astype(np.int64)
    lengths = lengths + [lengths[index] for index in again]
    order = np.array(data.draw(st.permutations(range(len(lengths)))))
    columns = np.arange(len(lengths)), np.arange(len(lengths)) + 100, address, np.array(lengths)
    parts = Parts.sorted(*(column[order] for column in columns))
    borders = sorted(64 * border for border in data.draw(st.sets(st.integers(64, 150), max_size=3)))
    seen = []
    for piece in parts.pieces(most, borders):
        assert piece.total_bytes == piece.length.sum()
        assert piece.total_bytes <= most or len(piece.length) == 1
        wanted = {}
        for index, block, start in zip(piece.kind, piece.block, piece.place.tolist(), strict=True):
            assert block == index + 100
            seen.append(int(index))
            wanted |= {start + at: int(address[index]) + at for at in range(lengths[index])}
        assert sorted(wanted) == list(range(piece.total_bytes))
        found = {}
        for host, place, length in zip(*(column.tolist() for column in piece.copies), strict=True):
            assert length > 0
            assert not any(host < border < host + length for border in borders)
            found |= {place + at: host + at for at in range(length)}
        assert found == wanted
    assert sorted(seen) == list(range(len(lengths)))


def test_adjacent_rows_are_one_copy():
    rows = np.arange(8, dtype=np.int64)
    parts = Parts.sorted(rows * 0, rows, 4096 + rows[::-1] * 128, np.full(8, 128))
    (piece,) = parts.pieces(1 << 20, [])
    assert [column.tolist() for column in piece.copies] == [[4096], [0], [1024]]
    assert [len(piece.length) for piece in parts.pieces(256, [])] == [2, 2, 2, 2]


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


def test_a_ring_refuses_what_it_cannot_give():
    ring = Ring(0, 100)
    with pytest.raises(LocalError, match="a span has 101 bytes; accepted: up to 100"):
        ring.take(101)
    ring.take(10)
    with pytest.raises(LocalError, match="before the last one was sealed"):
        ring.take(10)


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
    assert arena.rows_of(0).shape == (40, 128)
    assert (arena.rows_of(0)[[0, 39]] == 1).all()
    # Groups of a class share its rows.
    assert (arena.rows_of(5)[0] == 3).all()
    assert (arena.rows_of(2)[99] == 6).all()
    assert sum(int((arena.rows_of(group) != 0).sum()) for group in (0, 2)) == 2 * 128 + 2 * 64
    addresses = arena.addresses(2, np.array([3, 0]))
    assert (addresses - arena.address).tolist() == [5120 + 3 * 64, 5120]
    assert arena.address % 4096 == 0
    assert not arena.pinned
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
    assert arena.pinned
    assert sum(pins.held.values()) == arena.length_bytes == 12288
    assert sorted(pins.held) == [arena.address, *arena.borders]
    assert arena.borders == [arena.address + 8192]
    arena.close()
    assert not pins.held
    arena.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_that_is_said_once(caplog):
    caplog.set_level(logging.WARNING)
    pins = Pins(most=1)
    arena = RowArena(PLAN, pins, piece_bytes=8192)
    assert not arena.pinned
    assert not pins.held
    assert arena.borders == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not pinned: no more, after 8192 of 12288 bytes" in caplog.text
    arena.row(0, 1)[:] = bytes(128)


def test_more_memory_than_there_is_names_the_setting():
    plan = ArenaPlan((RowClass(1 << 40, 1 << 20, 0),), {0: 0}, {0: 1 << 20}, 1 << 60)
    with pytest.raises(ConfigError, match=r"offload\.cpu_bytes: the machine does not give \d+ bytes"):
        RowArena(plan)

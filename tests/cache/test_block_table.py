"""Block tables against ten lines of plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.block_table import BlockTables
from kvconnect.errors import LocalError


def tables(max_blocks=4, ratio=2, requests=3):
    return BlockTables(
        max_requests=requests,
        max_blocks={0: max_blocks, 1: max_blocks},
        block_sizes={0: 16 * ratio, 1: 16},
        kernel_block_sizes={0: 16, 1: 16},
    )


@st.composite
def operations(draw):
    step = st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(0, 99), max_size=4),
        st.lists(st.integers(0, 99), max_size=4),
        st.booleans(),
    )
    return draw(st.integers(1, 4)), draw(st.lists(step, max_size=12))


@given(operations())
def test_appends_and_overwrites_match_plain_lists(case):
    ratio, steps = case
    made = tables(max_blocks=6, ratio=ratio)
    plain = {(group, row): [] for group in (0, 1) for row in range(3)}
    for row, first, second, overwrite in steps:
        grown = {}
        for group, ids in ((0, first), (1, second)):
            factor = ratio if group == 0 else 1
            kernel = [block * factor + k for block in ids for k in range(factor)]
            grown[group] = ([] if overwrite else plain[group, row]) + kernel
        if any(len(ids) > made.capacity(group) for group, ids in grown.items()):
            with pytest.raises(LocalError):
                made.append_block_ids(row, (first, second), overwrite=overwrite)
        else:
            made.append_block_ids(row, (first, second), overwrite=overwrite)
            for group, ids in grown.items():
                plain[group, row] = ids
    for (group, row), ids in plain.items():
        assert made.row(group, row).tolist() == ids


def test_capacity_is_in_kernel_blocks_and_an_overflow_writes_nothing():
    made = tables(max_blocks=4, ratio=2)
    assert made.capacity(0) == 8
    made.append_block_ids(0, ([1, 2, 3], [1, 2, 3]))
    with pytest.raises(LocalError, match="10 kernel blocks in cache group 0, whose rows hold 8"):
        made.append_block_ids(0, ([4, 5], [4]))
    assert made.row(0, 0).tolist() == [2, 3, 4, 5, 6, 7]
    assert made.row(1, 0).tolist() == [1, 2, 3]


def test_tensors_never_move_and_rows_can_be_cleared():
    made = tables()
    before = made.table(0).data_ptr()
    made.append_block_ids(1, ([3], [7]))
    made.apply()
    made.clear_row(1)
    made.append_block_ids(1, ([5], [6]))
    made.apply()
    assert made.table(0).data_ptr() == before
    assert made.table(0)[1].tolist() == [10, 11, 0, 0, 0, 0, 0, 0]
    assert made.table(0).dtype == torch.int32


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_out_of_range_is_an_error(row):
    with pytest.raises(LocalError, match="request index"):
        tables().append_block_ids(row, ([1], [1]))

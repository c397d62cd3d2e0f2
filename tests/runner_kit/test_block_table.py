"""Block tables against a few lines of plain Python, with the torch and the Triton operations alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, LocalError
from kvconnect.runner_kit.block_table import PAD_SLOT, BlockTables
from tests.pack.sides import DEVICE, KERNELS

ROWS = 3
KERNELS = [name for name in KERNELS if name != "numpy"]
EXAMPLES = {"torch": 200, "triton": 500 if DEVICE == "cuda" else 60}
"""In Triton's interpreter one takes a tenth of a second."""


def tables(max_blocks=6, ratio=2, kernels="torch", max_tokens=40):
    return BlockTables(
        max_requests=ROWS,
        max_blocks={0: max_blocks, 2: max_blocks + 1},
        block_sizes={0: 4 * ratio, 2: 4},
        kernel_block_sizes={0: 4, 2: 4},
        max_tokens=max_tokens,
        device=DEVICE,
        kernels=kernels,
    )


class Plain:
    """The same tables as lists: group 1 has none, group 2 has no kernel split."""

    def __init__(self, ratio, capacities):
        self.ratio, self.capacities = {0: ratio, 2: 1}, capacities
        self.rows = {(group, row): [] for group in (0, 2) for row in range(ROWS)}

    def append(self, row, ids, overwrite):
        grown = {}
        for group in (0, 2):
            factor = self.ratio[group]
            kernel = [block * factor + k for block in ids[group] for k in range(factor)]
            grown[group] = ([] if overwrite else self.rows[group, row]) + kernel
            if len(grown[group]) > self.capacities[group]:
                return False
        for group, new in grown.items():
            self.rows[group, row] = new
        return True

    def table(self, group):
        width = self.capacities[group]
        return [self.rows[group, row] + [0] * (width - len(self.rows[group, row])) for row in range(ROWS)]


ids = st.lists(st.integers(0, 99), max_size=3)
operation = st.one_of(
    st.tuples(st.just("append"), st.integers(0, ROWS - 1), ids, ids, st.booleans()),
    st.tuples(st.just("apply")),
)


def check_operations(kernels, ratio, steps):
    made = tables(ratio=ratio, kernels=kernels)
    plain = Plain(ratio, {0: made.capacity(0), 2: made.capacity(2)})
    addresses = [made.table(group).data_ptr() for group in (0, 2)]
    shown = [plain.table(group) for group in (0, 2)]
    for step in [*steps, ("apply",)]:
        match step:
            case ("append", row, first, second, overwrite):
                if plain.append(row, {0: first, 2: second}, overwrite):
                    made.append_block_ids(row, (first, [], second), overwrite)
                else:
                    with pytest.raises(LocalError):
                        made.append_block_ids(row, (first, [], second), overwrite)
            case ("apply",):
                made.apply()
                shown = [plain.table(group) for group in (0, 2)]
        assert [made.table(group).tolist() for group in (0, 2)] == shown, "nothing shows before it is applied"
    for (group, row), expected in plain.rows.items():
        assert made.row(group, row).tolist() == expected
        assert made.num_blocks(group, row) == len(expected)
    assert addresses == [made.table(group).data_ptr() for group in (0, 2)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_tables_match_plain_lists(kernels):
    @settings(max_examples=EXAMPLES[kernels])
    @given(st.integers(1, 4), st.lists(operation, max_size=10))
    def any_steps(ratio, steps):
        check_operations(kernels, ratio, steps)

    any_steps()


def plain_slots(made, group, requests, starts, positions, num_tokens):
    size = made.kernel_block_sizes[group]
    slots = [PAD_SLOT] * num_tokens
    for index, request in enumerate(requests):
        row = made.table(group)[request].tolist()
        for token in range(starts[index], starts[index + 1]):
            block, offset = divmod(positions[token], size)
            if block < len(row):
                slots[token] = row[block] * size + offset
    return slots


def check_batch(kernels, data):
    made = tables(ratio=data.draw(st.integers(1, 3)), kernels=kernels)
    for row in range(ROWS):
        made.append_block_ids(row, (data.draw(ids), [], data.draw(ids)))
    made.apply()
    requests = data.draw(st.lists(st.integers(0, ROWS - 1), max_size=ROWS))
    num_rows = data.draw(st.integers(len(requests), ROWS))
    for group in (0, 2):
        made.batch_table(group).fill_(77)
    made.gather(requests, num_rows)
    for group in (0, 2):
        table, batch = made.table(group).tolist(), made.batch_table(group).tolist()
        assert batch[: len(requests)] == [table[request] for request in requests]
        assert all(not any(row) for row in batch[len(requests) : num_rows])
        assert all(set(row) == {77} for row in batch[num_rows:])
    lengths = [data.draw(st.integers(0, 5)) for _ in requests]
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(int).tolist()
    positions = [data.draw(st.integers(0, 60)) for _ in range(starts[-1])]
    num_tokens = data.draw(st.integers(starts[-1], made.max_tokens))
    made.compute_slots(requests, starts, positions, num_tokens)
    for group in (0, 2):
        expected = plain_slots(made, group, requests, starts, positions, num_tokens)
        assert made.slots(group).tolist()[:num_tokens] == expected


@pytest.mark.parametrize("kernels", KERNELS)
def test_batches_match_plain_lists(kernels):
    @settings(max_examples=EXAMPLES[kernels])
    @given(st.data())
    def any_batch(data):
        check_batch(kernels, data)

    any_batch()


def test_capacity_is_in_kernel_blocks_and_an_overflow_stages_nothing():
    made = tables(max_blocks=4, ratio=2)
    assert made.capacity(0) == 8
    made.append_block_ids(0, ([1, 2, 3], [], [1, 2, 3]))
    with pytest.raises(LocalError, match="10 kernel blocks in cache group 0, whose rows hold 8"):
        made.append_block_ids(0, ([4, 5], [], [4]))
    made.apply()
    assert made.row(0, 0).tolist() == [2, 3, 4, 5, 6, 7]
    assert made.row(2, 0).tolist() == [1, 2, 3]


def test_what_cannot_be_is_an_error_and_changes_nothing():
    made = tables(max_tokens=4)
    for match, call in (
        ("request index -1", lambda: made.append_block_ids(-1, ([1], [], [1]))),
        ("request index 3", lambda: made.append_block_ids(3, ([1], [], [1]))),
        ("cache group 1 has no block table", lambda: made.append_block_ids(0, ([1], [2], [1]))),
        ("block id -5", lambda: made.append_block_ids(0, ([-5], [], []))),
        ("request index 9", lambda: made.gather([9], 1)),
        ("request index -1", lambda: made.compute_slots([-1], [0, 1], [0], 1)),
        ("num_rows is 1, accepted: 2", lambda: made.gather([0, 1], 1)),
        ("num_rows is 4, accepted: 0", lambda: made.gather([], 4)),
        ("num_tokens is 5, accepted: 0 .* to 4", lambda: made.compute_slots([], [0], [], 5)),
        ("num_tokens is 1, accepted: 2", lambda: made.compute_slots([0], [0, 2], [0, 1], 1)),
        ("query_start has 1 entries for 1", lambda: made.compute_slots([0], [0], [], 1)),
    ):
        with pytest.raises(LocalError, match=match):
            call()
    made.apply()
    assert not made.table(0).any()
    with pytest.raises(ConfigError, match="'cuda'; accepted: auto, torch, triton"):
        tables(kernels="cuda")


def test_writes_that_may_meet_keep_their_order_and_others_need_none():
    """On a GPU the records of one launch run at once: only those of one row have an order to keep."""
    asked = []

    class Spy:
        def apply(self, records, ids, keep_order):
            asked.append(keep_order)

    for conflicting, steps in (
        (False, lambda t: (t.append_block_ids(0, ([1], [], [])), t.append_block_ids(1, ([2], [], [])))),
        (True, lambda t: (t.append_block_ids(0, ([1], [], [])), t.append_block_ids(0, ([2], [], []), True))),
        (True, lambda t: (t.append_block_ids(2, (), True), t.append_block_ids(2, ([2], [], [])))),
        (False, lambda t: t.append_block_ids(0, ([3], [], []))),
    ):
        made = tables()
        made.append_block_ids(2, ([7], [], []))
        made.apply()
        made._ops = Spy()
        steps(made)
        made.apply()
        assert asked.pop() is conflicting


@pytest.mark.skipif("triton" not in KERNELS, reason="Triton is not installed")
def test_numbers_on_the_device_that_are_wrong_reach_no_foreign_memory():
    """They cannot be read without waiting, so the kernels clamp them."""
    made = tables(kernels="triton", max_tokens=6)
    made.append_block_ids(0, ([1, 2], [], [3]))
    made.apply()
    made.gather(torch.tensor([9, -1, 0], device=DEVICE), 3)
    assert not made.batch_table(0)[:2].any()
    assert made.batch_table(0)[2].tolist() == made.table(0)[0].tolist()
    for slots in (0, 2):
        made.slots(slots).fill_(77)
    numbers = {"device": DEVICE, "dtype": torch.int64}
    made.compute_slots(
        torch.tensor([0], **numbers),
        torch.tensor([1, 9], **numbers),
        torch.tensor([0, 1, 2, 3], **numbers),
        4,
    )
    assert made.slots(0).tolist() == [PAD_SLOT, 9, 10, 11, 77, 77]

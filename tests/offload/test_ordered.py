"""Orders of cells against plain lists: a move takes a cell from one list to the end of another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import LocalError
from kvconnect.offload.index import ordered
from kvconnect.offload.index.ordered import NOWHERE, Orders

CELLS, KINDS, UNORDERED = 40, 3, 3


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(ordered, "CHUNK_ENTRIES", 16)
    monkeypatch.setattr(ordered, "_CLEANING_ENTRIES", 0)
    monkeypatch.setattr(ordered, "_FIRST_LOOK", 4)


class Lists:
    """The same with lists."""

    def __init__(self):
        self.of = {kind: [] for kind in range(KINDS + 1)}

    def move(self, cells, kind):
        for cell in cells:
            for cells_of_kind in self.of.values():
                if cell in cells_of_kind:
                    cells_of_kind.remove(cell)
            self.of[kind].append(cell)

    def take(self, kind, count, into):
        taken = self.of[kind][: max(0, count)]
        self.move(taken, into)
        return taken


moves = st.tuples(
    st.just("move"),
    st.lists(st.integers(0, CELLS - 1), max_size=CELLS),
    st.integers(0, KINDS),
    st.booleans(),
)
takes = st.tuples(st.just("take"), st.integers(1, KINDS - 1), st.integers(-1, CELLS), st.integers(0, KINDS))


@settings(max_examples=150)
@given(st.lists(moves | takes, max_size=60))
def test_orders_are_lists(steps):
    orders, lists = Orders(CELLS, KINDS, frozenset({UNORDERED})), Lists()
    for step, *what in steps:
        if step == "move":
            cells, kind, as_array = what
            orders.move(np.asarray(cells, dtype=np.int64) if as_array else cells, kind)
            lists.move(cells, kind)
        else:
            kind, count, into = what
            assert list(orders.take(kind, count, into)) == lists.take(kind, count, into)
        for kind in range(1, KINDS + 1):
            assert orders.size(kind) == len(lists.of[kind])
            assert set(np.flatnonzero(orders.kinds.array == kind).tolist()) == set(lists.of[kind])
    for kind in range(1, KINDS):
        assert list(orders.take(kind, CELLS)) == lists.of[kind]
        assert orders.size(kind) == 0


def num_entries(orders, kind):
    """Entries of a kind's log, those that count for nothing included."""
    log = orders._logs[kind]
    return sum(len(cells) for cells, _ in log._chunks) + len(log._tail_cells)


def test_what_counts_for_nothing_is_swept_out():
    orders = Orders(100, 1)
    draw = np.random.default_rng(0)
    orders.move(list(range(100)), 1)
    for step in range(2000):
        cells = draw.integers(50, 100, size=10)
        orders.move(cells.tolist() if step % 2 else cells, 1)
        assert num_entries(orders, 1) <= 3 * 100
    assert list(orders.take(1, 50)) == list(range(50))


def test_a_kind_without_an_order_gives_nothing():
    orders = Orders(4, 2, frozenset({2}))
    orders.move([0, 1], 2)
    assert orders.size(2) == 2
    with pytest.raises(LocalError, match="kind 2 keeps no order"):
        orders.take(2, 1)
    orders.move([0], NOWHERE)
    assert orders.size(2) == 1

"""The policies against slow and obvious models: lists, and one cell at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.errors import LocalError
from kvconnect.offload.index.policies import Arc, Lru, make_policy, num_remembered

CELLS, CAPACITY = 60, 12
SOME = st.lists(st.integers(0, CELLS - 1), unique=True, max_size=CELLS)


class LruModel:
    def __init__(self):
        self.kept: list[int] = []
        self.parked: set[int] = set()
        self.gone: list[int] = []

    def remembered(self):
        return []

    def recall(self, cells):
        self.gone = [cell for cell in self.gone if cell not in cells]

    def admit(self, cells):
        self.kept += cells

    def use(self, cells):
        for cell in cells:
            if cell in self.kept:
                self.kept.remove(cell)
                self.kept.append(cell)

    refresh = use

    def park(self, cells):
        self.kept = [cell for cell in self.kept if cell not in cells]
        self.parked |= set(cells)

    def unpark(self, cells):
        self.parked -= set(cells)
        self.kept += cells

    def evict(self, count):
        evicted, self.kept = self.kept[:count], self.kept[count:]
        self.gone += evicted
        return evicted

    def forget(self, cells):
        self.kept = [cell for cell in self.kept if cell not in cells]
        self.parked -= set(cells)
        self.gone = [cell for cell in self.gone if cell not in cells] + cells

    def spare(self, count):
        spared, self.gone = self.gone[:count], self.gone[count:]
        return spared


class ArcModel:
    """T1, T2, B1 and B2 of the paper as lists, oldest first, and its parameter p."""

    def __init__(self):
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []
        self.parked: dict[int, list[int]] = {}
        self.gone: list[int] = []
        self.returned: set[int] = set()
        self.p = 0.0

    def remembered(self):
        return self.b1 + self.b2

    def recall(self, cells):
        b1, b2 = len(self.b1), len(self.b2)
        hits1, hits2 = ([c for c in cells if c in ghosts] for ghosts in (self.b1, self.b2))
        for cell in hits1:
            self.p = min(CAPACITY, self.p + max(1, b2 / b1))
            self.b1.remove(cell)
        for cell in hits2:
            self.p = max(0, self.p - max(1, b1 / b2))
            self.b2.remove(cell)
        self.returned |= {*hits1, *hits2}
        self.gone = [cell for cell in self.gone if cell not in cells]

    def admit(self, cells):
        self.t1 += [cell for cell in cells if cell not in self.returned]
        self.t2 += [cell for cell in cells if cell in self.returned]
        self.returned -= set(cells)

    def use(self, cells):
        once = [cell for cell in cells if cell in self.t1]
        often = [cell for cell in cells if cell in self.t2]
        for cell in cells:
            if self.parked.get(cell) is self.t1:
                self.parked[cell] = self.t2
        for cell in once:
            self.t1.remove(cell)
        for cell in often:
            self.t2.remove(cell)
        self.t2 += [cell for cell in cells if cell in once or cell in often]

    def refresh(self, cells):
        for side in (self.t1, self.t2):
            those = [cell for cell in cells if cell in side]
            side[:] = [cell for cell in side if cell not in those] + those

    def park(self, cells):
        for cell in cells:
            side = self.t1 if cell in self.t1 else self.t2
            side.remove(cell)
            self.parked[cell] = side

    def unpark(self, cells):
        for cell in cells:
            self.parked.pop(cell).append(cell)

    def evict(self, count):
        evicted = []
        while len(evicted) < count and (self.t1 or self.t2):
            if self.t1 and (len(self.t1) > int(self.p) or not self.t2):
                evicted.append(self.t1.pop(0))
                self.b1.append(evicted[-1])
            else:
                evicted.append(self.t2.pop(0))
                self.b2.append(evicted[-1])
        while self.b1 and len(self.t1) + len(self.b1) > CAPACITY:
            self.gone.append(self.b1.pop(0))
        while len(self.b1) + len(self.b2) > CAPACITY:
            self.gone.append((self.b2 or self.b1).pop(0))
        return evicted

    def forget(self, cells):
        for cells_of_kind in (self.t1, self.t2, self.b1, self.b2, self.gone):
            cells_of_kind[:] = [cell for cell in cells_of_kind if cell not in cells]
        for cell in cells:
            self.parked.pop(cell, None)
            self.returned.discard(cell)
        self.gone += cells

    def spare(self, count):
        spared, self.gone = self.gone[:count], self.gone[count:]
        return spared


class PolicyMachine(RuleBasedStateMachine):
    """A policy and its model, called as a shelf calls them. Also says in which state each cell is."""

    def __init__(self):
        super().__init__()
        self.policy, self.model = self.make()
        # absent: unknown; out: evicted or forgotten; wanted: to be admitted; kept; parked.
        self.state = ["absent"] * CELLS
        self.as_array = False

    def call(self, name, cells):
        self.as_array = not self.as_array
        getattr(self.policy, name)(np.asarray(cells, dtype=np.int64) if self.as_array else list(cells))
        getattr(self.model, name)(cells)

    def those(self, cells, *states):
        return [cell for cell in cells if self.state[cell] in states]

    def become(self, cells, state):
        for cell in cells:
            self.state[cell] = state

    @rule(cells=SOME)
    def reserve(self, cells):
        self.call("recall", self.those(cells, "out"))
        self.become(self.those(cells, "out", "absent"), "wanted")

    @rule(cells=SOME)
    def admit(self, cells):
        cells = self.those(cells, "wanted")
        self.call("admit", cells)
        self.become(cells, "kept")

    @rule(cells=SOME)
    def use(self, cells):
        self.call("use", self.those(cells, "kept", "parked"))

    @rule(cells=SOME)
    def refresh(self, cells):
        self.call("refresh", self.those(cells, "kept", "parked"))

    @rule(cells=SOME)
    def park(self, cells):
        cells = self.those(cells, "kept")
        self.call("park", cells)
        self.become(cells, "parked")

    @rule(cells=SOME)
    def unpark(self, cells):
        cells = self.those(cells, "parked")
        self.call("unpark", cells)
        self.become(cells, "kept")

    @rule(cells=SOME)
    def forget(self, cells):
        cells = self.those(cells, "kept", "parked", "wanted")
        self.call("forget", cells)
        self.become(cells, "out")

    @rule(count=st.integers(0, CELLS))
    def evict(self, count):
        sides = self.sides()
        evicted = list(self.policy.evict(count))
        expected = self.model.evict(count)
        assert len(evicted) == len(expected)
        for side in sides:
            # What is evicted at once leaves in order on each side.
            assert [cell for cell in evicted if cell in side] == [cell for cell in expected if cell in side]
        assert all(self.state[cell] == "kept" for cell in evicted)
        self.become(evicted, "out")

    def sides(self):
        """The cells that may make room, those apart that are ordered apart."""
        return [list(self.model.kept)]

    @precondition(lambda self: "out" in self.state)
    @rule(count=st.integers(0, CELLS))
    def spare(self, count):
        assert self.policy.num_spare == len(self.model.gone)
        spared = list(self.policy.spare(count))
        assert spared == self.model.spare(count)
        self.become(spared, "absent")

    @invariant()
    def parked_are_counted(self):
        assert self.policy.num_parked == self.state.count("parked")

    @invariant()
    def what_is_out_is_remembered_or_spare(self):
        remembered = self.model.remembered()
        assert len(remembered) <= num_remembered(self.name, CAPACITY)
        assert sorted(remembered + self.model.gone) == [
            cell for cell in range(CELLS) if self.state[cell] == "out"
        ]


class LruMachine(PolicyMachine):
    name = "lru"

    def make(self):
        return Lru(CELLS), LruModel()


class ArcMachine(PolicyMachine):
    name = "arc"

    def make(self):
        return Arc(CELLS, CAPACITY), ArcModel()

    def sides(self):
        return [list(self.model.t1), list(self.model.t2)]

    @invariant()
    def the_target_is_the_papers_parameter(self):
        assert self.policy.target == pytest.approx(self.model.p)
        assert self.policy.num_remembered == len(self.model.b1) + len(self.model.b2)


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArc = ArcMachine.TestCase
TestArc.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_the_target_moves_by_how_much_more_the_other_side_lost():
    arc = Arc(CELLS, CAPACITY)
    arc.admit(list(range(12)))
    arc.use(list(range(12)))
    assert list(arc.evict(8)) == list(range(8))
    arc.admit(list(range(12, 20)))
    assert list(arc.evict(1)) == [12]
    arc.recall([12])
    assert arc.target == 8
    arc.recall([0])
    assert arc.target == 7
    arc.recall([1, 2])
    assert arc.target == 5


def replay(policy, keys, rows):
    """How many of the keys are there when they are asked for, with a cache of so many rows."""
    kept: set[int] = set()
    out: set[int] = set()
    hits = 0
    for key in keys:
        if key in kept:
            hits += 1
            policy.use([key])
            continue
        if key in out:
            policy.recall([key])
            out.discard(key)
        if len(kept) == rows:
            gone = list(policy.evict(1))
            kept -= set(gone)
            out |= set(gone)
        policy.admit([key])
        kept.add(key)
        out -= {int(cell) for cell in policy.spare(100)}
    return hits


def test_a_scan_does_not_drive_out_what_arc_keeps():
    often = list(range(40)) * 6
    scan = list(range(100, 400))
    keys = often + scan + list(range(40)) * 2 + [*range(400, 700)] + list(range(40)) * 2
    lru, arc = replay(Lru(1000), keys, 50), replay(Arc(1000, 50), keys, 50)
    assert arc > lru


def test_a_policy_has_a_name():
    assert isinstance(make_policy("lru", 4, 8), Lru)
    assert isinstance(make_policy("arc", 4, 8), Arc)
    with pytest.raises(LocalError, match="no policy 'fifo'; known: lru, arc"):
        make_policy("fifo", 4, 8)  # type: ignore[arg-type]

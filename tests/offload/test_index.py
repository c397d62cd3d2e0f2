"""The index of host memory against a model that keeps everything in plain lists and evicts one at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvconnect.errors import LocalError
from kvconnect.offload.index.budgets import plan_arena
from kvconnect.offload.index.tier_index import ContentState, TierIndex
from kvconnect.offload.tier_events import TierEvents
from tests.offload.half_kit import Plain, Removed, check_index

# Groups 0 and 1 share a class of 40 rows, of which 30 are those of group 0; group 2 has 12 rows of its own.
PLAN = plan_arena(5640, {0: 64, 1: 64, 2: 200}, {0: 1920 / 5632, 1: 640 / 5632, 2: 3072 / 5632})
GROUPS = (0, 1, 2)
ABSENT, PENDING, READY = ContentState


def name(sequence, block):
    return hashlib.sha256(f"{sequence}:{block}".encode()).digest()


def names(sequence, first, count):
    return [name(sequence, block) for block in range(first, first + count)]


@dataclass
class Held:
    """A content that has a row; it has no state once it was dropped while it was pinned."""

    row: int = -1
    state: ContentState | None = PENDING
    pins: int = 0


class IndexMachine(RuleBasedStateMachine):
    """Sequences of blocks are stored, found, pinned and dropped, in all kinds of overlapping parts.

    ``order`` holds what may make room of a class, oldest first.
    """

    @initialize()
    def begin(self):
        self.events = TierEvents(Plain())
        self.index = TierIndex(PLAN, self.events)
        self.held = {group: {} for group in GROUPS}
        self.order = [[] for _ in PLAN.classes]
        self.told = {group: set() for group in GROUPS}
        for sequence in range(3):
            for group in GROUPS:
                self.store(group, names(sequence, 0, 9))

    # Most parts overlap.
    parts = st.builds(
        names, st.sampled_from([0, 0, 0, 1, 2, 5]), st.sampled_from([0, 0, 3, 20]), st.integers(0, 45)
    )
    groups = st.sampled_from(GROUPS)

    def in_state(self, group, state):
        return {content for content, held in self.held[group].items() if held.state is state}

    def num_free(self, place):
        return PLAN.classes[place].num_rows - sum(len(self.held[group]) for group in PLAN.groups_of(place))

    def use(self, group, contents):
        order = self.order[PLAN.class_of[group]]
        for content in contents:
            if (group, content) in order:
                order.remove((group, content))
            held = self.held[group].get(content)
            if held is not None and held.state is READY and not held.pins:
                order.append((group, content))

    def lose(self, group, contents):
        for content in contents:
            if (held := self.held[group].get(content)) is not None:
                held.state = None
                self.use(group, [content])
                if not held.pins:
                    del self.held[group][content]

    @rule(group=groups, hashes=parts, twice=st.booleans())
    def reserve(self, group, hashes, twice):
        asked, place = hashes + hashes[:3] if twice else hashes, PLAN.class_of[group]
        expected = []
        for content in dict.fromkeys(asked):
            if content in self.held[group]:
                continue
            old = [key for key in self.order[place] if key[0] != group or key[1] not in asked]
            if not self.num_free(place):
                if not old:
                    break
                self.lose(old[0][0], [old[0][1]])
            self.held[group][content] = Held()
            expected.append(content)
        taken, rows = self.index.reserve(group, asked)
        assert taken == expected
        for content, row in zip(taken, rows, strict=True):
            self.held[group][content].row = row
        self.use(group, reversed(asked))

    @rule(group=groups, hashes=parts, fails=st.booleans())
    def finish(self, group, hashes, fails):
        pending = [content for content in hashes if content in self.in_state(group, PENDING)]
        if fails:
            self.index.drop(group, pending)
            self.lose(group, pending)
            return
        self.index.commit(group, pending)
        for content in pending:
            self.held[group][content].state = READY
        self.use(group, reversed(pending))

    @rule(group=groups, hashes=parts)
    def commit_what_is_not_pending(self, group, hashes):
        if not self.in_state(group, PENDING).issuperset(hashes):
            with pytest.raises(LocalError, match="is not pending"):
                self.index.commit(group, hashes)

    @rule(group=groups, hashes=parts)
    def touch(self, group, hashes):
        self.index.touch(group, hashes)
        self.use(group, reversed(hashes))

    @rule(group=groups, hashes=parts, times=st.integers(1, 2))
    def pin(self, group, hashes, times):
        there = [content for content in hashes if (held := self.held[group].get(content)) and held.state]
        if there != hashes:
            with pytest.raises(LocalError, match="is not ready or pending"):
                self.index.pin(group, hashes * times)
        self.index.pin(group, there * times)
        for content in there:
            self.held[group][content].pins += times
        self.use(group, there)

    @rule(group=groups, hashes=parts)
    def unpin(self, group, hashes):
        pinned = [content for content in hashes if (held := self.held[group].get(content)) and held.pins]
        if pinned != hashes:
            with pytest.raises(LocalError, match="unpinned more often"):
                self.index.unpin(group, hashes)
        self.index.unpin(group, pinned)
        for content in reversed(pinned):
            self.held[group][content].pins -= 1
            if self.held[group][content].state is None:
                self.lose(group, [content])
        self.use(group, reversed(pinned))

    @rule(group=groups, hashes=parts)
    def drop(self, group, hashes):
        self.index.drop(group, hashes)
        self.lose(group, hashes)

    @rule(group=groups, hashes=parts)
    def drop_unused(self, group, hashes):
        self.index.drop_unused(group, hashes)
        order = self.order[PLAN.class_of[group]]
        self.lose(group, [content for content in hashes if (group, content) in order])

    @rule(group=groups, hashes=parts)
    def store(self, group, hashes):
        self.reserve(group, hashes, False)
        self.finish(group, hashes, False)

    @rule(really=st.integers(0, 9))
    def clear(self, really):
        if really:
            return
        self.index.clear()
        for group in GROUPS:
            self.lose(group, self.in_state(group, READY))
        self.hear()

    @rule()
    def hear(self):
        for event in self.events.take():
            if isinstance(event, Removed):
                assert self.told[event.group].issuperset(event.hashes)
                self.told[event.group].difference_update(event.hashes)
            else:
                assert self.told[event.group].isdisjoint(event.hashes)
                self.told[event.group].update(event.hashes)
        assert self.told == {group: self.in_state(group, READY) for group in GROUPS}

    @rule(group=groups, hashes=parts, broken=st.booleans())
    def look_up(self, group, hashes, broken):
        if broken:
            hashes = hashes[:20] + names(9, 0, 3) + hashes[20:]
        found = [self.held[group].get(content, Held(state=None)) for content in hashes]
        assert self.index.states(group, hashes) == [held.state or ABSENT for held in found]
        ready = list(takewhile(lambda held: held.state is READY, found))
        assert self.index.rows_of(group, hashes[: len(ready)]) == [held.row for held in ready]
        if len(ready) < len(hashes):
            with pytest.raises(LocalError, match=hashes[len(ready)].hex()):
                self.index.rows_of(group, hashes)

    @invariant()
    def nothing_is_lost(self):
        check_index(self.index)
        for group, counts in self.index.counts().items():
            held = self.held[group].values()
            assert counts.held == len(held)
            assert counts.ready == len(self.in_state(group, READY))
            assert counts.pending == len(self.in_state(group, PENDING))
            assert counts.pinned == sum(one.pins > 0 for one in held)
        for place, rows in enumerate(PLAN.classes):
            taken = [held.row for group in PLAN.groups_of(place) for held in self.held[group].values()]
            assert len(set(taken)) == len(taken) == rows.num_rows - self.num_free(place)
            made = self.index.classes[place]
            assert [made.content[row] for row in made.ages] == self.order[place]


class TestIndex(IndexMachine.TestCase):
    settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def stored(index, group, hashes):
    taken, _ = index.reserve(group, hashes)
    index.commit(group, taken)
    return taken


def small(rows, events=None):
    return TierIndex(plan_arena(rows * 64, {0: 64}, {0: 1.0}), events)


def test_neighbours_in_a_sequence_are_neighbours_in_memory():
    index = small(1000)
    for sequence in range(20):
        stored(index, 0, names(sequence, 0, 100))
    _, rows = index.reserve(0, names(30, 0, 100))
    assert rows == list(range(rows[0], rows[0] + 100))


def test_what_comes_and_goes_between_two_calls_is_not_written_down():
    events = TierEvents(Plain())
    index = small(4, events)
    for sequence in range(50):
        stored(index, 0, names(sequence, 0, 4))
    (told,) = events.take()
    assert told.hashes == names(49, 0, 4)
    stored(index, 0, names(50, 0, 4))
    stored(index, 0, names(49, 0, 4))
    assert not events.take()


def test_a_group_without_rows_is_named():
    with pytest.raises(LocalError, match=r"cache group 3 has no rows; those that have: \[0\]"):
        small(1).states(3, [])

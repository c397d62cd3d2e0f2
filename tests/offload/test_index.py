"""The index of host memory against a model that keeps everything in plain lists and evicts one at a time."""

from __future__ import annotations

import hashlib

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


class Model:
    """What is where, in lists; ``order`` holds what may make room of a class, oldest first."""

    def __init__(self):
        self.state = {group: {} for group in GROUPS}
        self.row = {group: {} for group in GROUPS}
        self.pins = {group: {} for group in GROUPS}
        self.order = [[] for _ in PLAN.classes]
        self.free = [rows.num_rows for rows in PLAN.classes]

    def ages(self, group):
        return self.order[PLAN.class_of[group]]

    def move_to_end(self, group, contents):
        order = self.ages(group)
        for content in contents:
            if (group, content) in order:
                order.remove((group, content))
            order.append((group, content))

    def leave(self, group, content):
        if (group, content) in self.ages(group):
            self.ages(group).remove((group, content))

    def let_go(self, group, content):
        del self.row[group][content]
        self.state[group].pop(content, None)
        self.leave(group, content)
        self.free[PLAN.class_of[group]] += 1


class IndexMachine(RuleBasedStateMachine):
    """Sequences of blocks are stored, found, pinned and dropped, in all kinds of overlapping parts."""

    @initialize()
    def begin(self):
        self.events = TierEvents(Plain())
        self.index = TierIndex(PLAN, self.events)
        self.model = Model()
        self.told = {group: set() for group in GROUPS}
        for sequence in range(3):
            for group in GROUPS:
                self.reserve(group, names(sequence, 0, 9), False)
                self.finish(group, names(sequence, 0, 9), False)

    # Most parts overlap.
    parts = st.builds(
        names, st.sampled_from([0, 0, 0, 1, 2, 5]), st.sampled_from([0, 0, 3, 20]), st.integers(0, 45)
    )
    groups = st.sampled_from(GROUPS)

    @rule(group=groups, hashes=parts, twice=st.booleans())
    def reserve(self, group, hashes, twice):
        model = self.model
        state, order = model.state[group], model.ages(group)
        asked = hashes + hashes[:3] if twice else hashes
        kept = [content for content in asked if (group, content) in order]
        kept = list(reversed(dict.fromkeys(kept)))
        for content in kept:
            model.leave(group, content)
        absent = [content for content in dict.fromkeys(asked) if content not in model.row[group]]
        expected = []
        for content in absent:
            if not model.free[PLAN.class_of[group]]:
                if not order:
                    break
                model.let_go(*order[0])
            model.free[PLAN.class_of[group]] -= 1
            expected.append(content)
            model.row[group][content] = None
            state[content] = PENDING
        taken, rows = self.index.reserve(group, asked)
        assert taken == expected
        model.row[group].update(zip(taken, rows, strict=True))
        model.move_to_end(group, kept)

    @rule(group=groups, hashes=parts, fails=st.booleans())
    def finish(self, group, hashes, fails):
        model = self.model
        pending = [content for content in hashes if model.state[group].get(content) is PENDING]
        if fails:
            self.index.drop(group, pending)
            for content in pending:
                self.drop_in_model(group, content)
            return
        self.index.commit(group, pending)
        for content in pending:
            model.state[group][content] = READY
        model.move_to_end(
            group, [content for content in reversed(pending) if content not in model.pins[group]]
        )

    @rule(group=groups, hashes=parts)
    def commit_what_is_not_pending(self, group, hashes):
        if any(self.model.state[group].get(content) is not PENDING for content in hashes):
            with pytest.raises(LocalError, match="is not pending"):
                self.index.commit(group, hashes)

    @rule(group=groups, hashes=parts)
    def touch(self, group, hashes):
        self.index.touch(group, hashes)
        order = self.model.ages(group)
        self.model.move_to_end(group, [content for content in reversed(hashes) if (group, content) in order])

    @rule(group=groups, hashes=parts, times=st.integers(1, 2))
    def pin(self, group, hashes, times):
        model = self.model
        wanted = hashes * times
        if any(content not in model.state[group] for content in hashes):
            with pytest.raises(LocalError, match="is not ready or pending"):
                self.index.pin(group, wanted)
            wanted = [content for content in wanted if content in model.state[group]]
        self.index.pin(group, wanted)
        for content in wanted:
            model.pins[group][content] = model.pins[group].get(content, 0) + 1
            model.leave(group, content)

    @rule(group=groups, hashes=parts)
    def unpin(self, group, hashes):
        model = self.model
        pins = model.pins[group]
        if any(content not in pins for content in hashes):
            with pytest.raises(LocalError, match="unpinned more often"):
                self.index.unpin(group, hashes)
        hashes = [content for content in hashes if content in pins]
        self.index.unpin(group, hashes)
        for content in reversed(hashes):
            pins[content] -= 1
            if pins[content]:
                continue
            del pins[content]
            if model.state[group].get(content) is READY:
                model.ages(group).append((group, content))
            elif content not in model.state[group]:
                model.let_go(group, content)

    @rule(group=groups, hashes=parts)
    def drop(self, group, hashes):
        self.index.drop(group, hashes)
        for content in hashes:
            self.drop_in_model(group, content)

    @rule(group=groups, hashes=parts)
    def drop_unused(self, group, hashes):
        self.index.drop_unused(group, hashes)
        for content in hashes:
            if (group, content) in self.model.ages(group):
                self.drop_in_model(group, content)

    def drop_in_model(self, group, content):
        model = self.model
        if content in model.pins[group]:
            model.state[group].pop(content, None)
        elif content in model.state[group]:
            model.let_go(group, content)

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
            for content, state in list(self.model.state[group].items()):
                if state is READY:
                    self.drop_in_model(group, content)
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
        for group in GROUPS:
            states = self.model.state[group]
            assert self.told[group] == {content for content in states if states[content] is READY}

    @rule(group=groups, hashes=parts, broken=st.booleans())
    def look_up(self, group, hashes, broken):
        if broken:
            hashes = hashes[:20] + names(9, 0, 3) + hashes[20:]
        states = [self.model.state[group].get(content, ABSENT) for content in hashes]
        assert self.index.states(group, hashes) == states
        ready = next((at for at, state in enumerate(states) if state is not READY), len(hashes))
        rows = [self.model.row[group][content] for content in hashes[:ready]]
        assert self.index.rows_of(group, hashes[:ready]) == rows
        if ready < len(hashes):
            with pytest.raises(LocalError, match=hashes[ready].hex()):
                self.index.rows_of(group, hashes)

    @invariant()
    def nothing_is_lost(self):
        check_index(self.index)
        for group, counts in self.index.counts().items():
            states = list(self.model.state[group].values())
            assert counts.held == len(self.model.row[group])
            assert (counts.ready, counts.pending) == (states.count(READY), states.count(PENDING))
            assert counts.pinned == len(self.model.pins[group])
        for place, rows in enumerate(PLAN.classes):
            held = [row for group in PLAN.groups_of(place) for row in self.model.row[group].values()]
            assert len(set(held)) == len(held) == rows.num_rows - self.model.free[place]


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

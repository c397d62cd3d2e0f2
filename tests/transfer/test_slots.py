"""The bookkeeping of slots: one table of legal moves, and no slot in two hands."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import LocalError
from kvconnect.transfer.slots import SlotPool, SlotState


def make_pool(count=3):
    return SlotPool([4096 * (1 + index) for index in range(count)], 4096, first_generation=10)


def test_no_slot_is_given_out_twice_and_none_beyond_those_that_are():
    pool = make_pool()
    taken = [pool.take(state) for state in (SlotState.THEIRS, SlotState.OURS, SlotState.THEIRS)]
    assert {slot.address for slot in taken} == {4096, 8192, 12288}
    assert [slot.generation for slot in taken] == [10, 11, 12]
    assert (pool.free, pool.taken) == (0, 3)
    with pytest.raises(LocalError, match="all 3 slots are taken"):
        pool.take(SlotState.THEIRS)
    pool.move(taken[1], SlotState.FREE)
    again = pool.take(SlotState.THEIRS)
    assert (again, again.generation) == (taken[1], 13)


@pytest.mark.parametrize(("count", "most"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (8, 7)])
def test_of_more_than_two_slots_no_holder_has_all(count, most):
    pool = make_pool(count)
    taken = []
    while pool.room_for("one") > 0:
        taken.append(pool.take(SlotState.THEIRS, "one"))
    assert len(taken) == most
    assert pool.room_for("other") == count - most
    for slot in taken:
        pool.move(slot, SlotState.QUARANTINED)
    assert pool.room_for("one") == 0, "what may still be touched counts"
    for slot in taken:
        pool.move(slot, SlotState.FREE)
    assert pool.room_for("one") == pool.room_for("other") == most
    assert not pool._taken_for


@given(st.integers(0, 2**32 - 1))
def test_whatever_happens_every_slot_is_in_one_place_and_no_generation_comes_twice(seed):
    rng = random.Random(seed)
    pool = make_pool(rng.randint(1, 5))
    generations = []
    for _ in range(60):
        slot = rng.choice(pool.slots)
        after = rng.choice(list(SlotState))
        try:
            if rng.random() < 0.5:
                generations.append(pool.take(after).generation)
            else:
                pool.move(slot, after)
        except LocalError:
            pass
        free = [slot for slot in pool.slots if slot.state is SlotState.FREE]
        assert (pool.free, pool.taken) == (len(free), len(pool.slots) - len(free))
        assert {id(slot) for slot in pool._free} == {id(slot) for slot in free}
    assert generations == sorted(set(generations))


@given(st.integers(3, 12), st.lists(st.sampled_from("abc"), max_size=40), st.randoms(use_true_random=False))
def test_however_often_one_holder_loses_slots_some_are_left_for_others(count, holders, chance):
    """Each in turn takes what it may have, and loses some of it."""
    pool = make_pool(count)
    for holder in holders:
        taken = [pool.take(SlotState.THEIRS, holder) for _ in range(pool.room_for(holder))]
        for slot in taken:
            is_lost = holder == "a" and chance.random() < 0.7
            pool.move(slot, SlotState.QUARANTINED if is_lost else SlotState.FREE)
        assert pool.room_for("b") >= 1
    for slot in pool.slots:
        if slot.state is SlotState.QUARANTINED:
            pool.move(slot, SlotState.FREE)
    assert pool.room_for("a") == count - 1


def test_how_many_slots_there_are_is_shown_beside_those_that_are_taken(pair):
    for worker in pair.workers:
        assert worker.gauge("slots_landing_limit") == len(worker.landing.slots)
        assert worker.gauge("slots_send_limit") == len(worker.send.slots)

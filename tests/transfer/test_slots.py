"""The bookkeeping of slots: one table of legal moves, and no slot in two hands."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import LocalError
from kvconnect.transfer.slots import SlotPool, SlotState


def make_pool(count=3):
    return SlotPool([4096 * (1 + index) for index in range(count)], 4096, first_generation=10)


@given(st.integers(0, 2**32 - 1))
def test_whatever_happens_every_slot_is_in_one_place_and_no_generation_comes_twice(seed):
    rng = random.Random(seed)
    pool = make_pool(rng.randint(1, 5))
    assert len({slot.address for slot in pool.slots}) == len(pool.slots)
    generations = []
    for _ in range(60):
        slot, after, was_free = rng.choice(pool.slots), rng.choice(list(SlotState)), pool.free
        is_taken = rng.random() < 0.5
        try:
            if is_taken:
                generations.append(pool.take(after).generation)
            else:
                pool.move(slot, after)
        except LocalError:
            assert not is_taken or not was_free or after not in (SlotState.OURS, SlotState.THEIRS)
        else:
            assert was_free or not is_taken, "it was in use"
        free = [slot for slot in pool.slots if slot.state is SlotState.FREE]
        assert (pool.free, pool.taken) == (len(free), len(pool.slots) - len(free))
        assert {id(slot) for slot in pool._free} == {id(slot) for slot in free}
    assert generations == list(range(10, 10 + len(generations)))


@given(st.integers(0, 12), st.lists(st.sampled_from("abc"), max_size=40), st.randoms(use_true_random=False))
def test_however_often_one_holder_loses_slots_some_are_left_for_others(count, holders, chance):
    """Each in turn takes what it may have, and loses some of it. Of two slots it may have both."""
    pool, most = make_pool(count), count - (count > 2)
    assert pool.room_for("a") == most
    for holder in holders:
        taken = [pool.take(SlotState.THEIRS, holder) for _ in range(pool.room_for(holder))]
        assert pool.room_for(holder) == 0
        for slot in taken:
            is_lost = holder == "a" and chance.random() < 0.7
            pool.move(slot, SlotState.QUARANTINED if is_lost else SlotState.FREE)
        lost = count - pool.free
        assert (pool.room_for("a"), pool.room_for("b")) == (most - lost, min(most, count - lost))
    for slot in pool.slots:
        if slot.state is SlotState.QUARANTINED:
            pool.move(slot, SlotState.FREE)
    assert pool.room_for("a") == most
    assert not pool._taken_for


def test_how_many_slots_there_are_is_shown_beside_those_that_are_taken(pair):
    for worker in pair.workers:
        assert worker.gauge("slots_landing_limit") == len(worker.landing.slots)
        assert worker.gauge("slots_send_limit") == len(worker.send.slots)

"""Transfers that are kept to be posted again: which, how many, and when they must go."""

from __future__ import annotations

import numpy as np

from kvconnect.engine.base import Batch, Verb
from kvconnect.engine.nixl_reuse import KeptTransfers, Stretch, stretch_of


def stretch(number: int, agent: str = "a") -> Stretch:
    return Stretch(agent, Verb.WRITE, number, number, 8)


def batch(copies: int, verb: Verb = Verb.WRITE) -> Batch:
    column = np.arange(1, copies + 1, dtype=np.int64)
    return Batch(1, "peer", verb, column, 10 * column, 100 * column, 1.0)


def test_a_transfer_is_taken_by_one_batch_at_a_time():
    kept = KeptTransfers(lambda _: None)
    kept.keep(stretch(1), "first")
    assert kept.take(stretch(2)) is None
    assert kept.take(stretch(1, "b")) is None
    assert kept.take(stretch(1)) == "first"
    assert kept.take(stretch(1)) is None


def test_what_is_not_kept_is_released_once():
    released: list[str] = []
    kept = KeptTransfers(released.append)
    kept.keep(stretch(1), "first")
    kept.keep(stretch(1), "second")
    assert released == ["first"], "two batches of one stretch were under way"
    for number in range(2, 1000):
        kept.keep(stretch(number), str(number))
    assert len(kept) < 500
    assert released[:3] == ["first", "second", "2"]
    assert len(released) + len(kept) == 1000


def test_those_to_one_agent_go_with_it_and_all_go_with_the_memory():
    released: list[str] = []
    kept = KeptTransfers(released.append)
    for agent in "ab":
        for number in (1, 2):
            kept.keep(stretch(number, agent), f"{agent}{number}")
    kept.drop("a")
    assert released == ["a1", "a2"]
    assert kept.take(stretch(1, "a")) is None
    kept.drop()
    assert sorted(released) == ["a1", "a2", "b1", "b2"]


def test_a_stretch_is_all_that_a_transfer_is_made_from():
    assert stretch_of(batch(1), "a") == Stretch("a", Verb.WRITE, 1, 10, 100)
    assert stretch_of(batch(1, Verb.READ), "a") == Stretch("a", Verb.READ, 10, 1, 100)
    assert stretch_of(batch(2), "a") is None
    assert stretch_of(batch(0), "a") is None

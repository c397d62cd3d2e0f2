"""Time that transfers share: none is lost, none is counted twice, and nobody pays for waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.plan.time_shares import TimeShares

users = st.frozensets(st.integers(0, 4))


@given(st.lists(st.tuples(st.floats(0, 10), users), max_size=20), st.floats(0, 10))
def test_all_shares_together_are_the_time_in_use(steps, rest):
    shares, now, in_use, current = TimeShares(), 5.0, 0.0, frozenset()
    for wait, following in [*steps, (rest, frozenset())]:
        in_use += wait if current else 0.0
        now += wait
        shares.change(following, now)
        current = following
    assert sum(shares.take(user) for user in range(5)) == pytest.approx(in_use)
    assert len(shares) == 0


def test_whoever_waits_for_others_pays_only_for_itself():
    shares, seconds = TimeShares(), [3.0, 0.5, 8.0]
    now = 100.0
    for index, took in enumerate(seconds):
        shares.change({index}, now)
        now += took
    shares.change((), now)
    assert [shares.take(index) for index in range(3)] == pytest.approx(seconds)


def test_those_who_go_at_the_same_time_share_it():
    shares = TimeShares()
    shares.change({"a"}, 0.0)
    shares.change({"a", "b"}, 1.0)
    shares.change({"b"}, 5.0)
    shares.change((), 7.0)
    assert (shares.take("a"), shares.take("b"), shares.take("c")) == (3.0, 4.0, 0.0)


def test_who_was_taken_uses_nothing_any_more():
    shares = TimeShares()
    shares.change({"a", "b"}, 0.0)
    shares.change({"a", "b"}, 2.0)
    assert shares.take("a") == 1.0
    shares.change((), 3.0)
    assert (shares.take("a"), shares.take("b")) == (0.0, 2.0)
    assert len(shares) == 0


def test_a_clock_that_stands_or_goes_back_gives_nothing():
    shares = TimeShares()
    shares.change({"a"}, 2.0)
    shares.change({"a"}, 2.0)
    shares.change({"a"}, 1.0)
    assert shares.take("a") == 0.0

"""The clock of a transfer thread, against a plain list that is searched."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.transfer.parts import Timers

WHEN = st.integers(0, 30)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("at"), st.integers(0, 9), WHEN),
        st.tuples(st.just("by"), st.integers(0, 9), WHEN),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("run"), st.just(0), WHEN),
    ),
    max_size=200,
)


def fail(error: Exception) -> None:
    raise error


@given(ACTIONS)
def test_each_timer_is_called_once_when_it_is_due(actions):
    timers, called = Timers(fail), []
    made = [timers.timer(lambda now, number=number: called.append(number)) for number in range(10)]
    wanted = dict.fromkeys(range(10), math.inf)
    now = 0
    for action, number, when in actions:
        match action:
            case "at":
                made[number].at(now + when)
                wanted[number] = now + when
            case "by":
                made[number].by(now + when)
                wanted[number] = min(wanted[number], now + when)
            case "cancel":
                made[number].cancel()
                wanted[number] = math.inf
            case "run":
                now += when
                due = [number for number, at in wanted.items() if at <= now]
                called.clear()
                assert timers.run(now) is bool(due)
                assert sorted(called) == due
                wanted |= dict.fromkeys(due, math.inf)
        assert timers.next_at() == min(wanted.values())
        assert [timer.due_at for timer in made] == list(wanted.values())


def test_a_call_may_arm_put_off_and_disarm_others_and_itself():
    timers, called = Timers(fail), []
    first = timers.timer(lambda now: (called.append("first"), second.cancel(), third.at(9), first.at(now)))
    second = timers.timer(lambda now: called.append("second"))
    third = timers.timer(lambda now: called.append("third"))
    for timer in (first, second, third):
        timer.at(1)
    assert timers.run(1)
    # What was armed for this moment by a call comes with the next run.
    assert called == ["first"]
    assert timers.next_at() == 1
    first.cancel()
    assert timers.next_at() == 9
    assert not timers.run(8.9)
    assert timers.run(9)
    assert called == ["first", "third"]
    assert timers.next_at() == math.inf


def test_a_call_that_raises_is_made_again_and_keeps_no_other_from_its_time():
    failures, called = [], []
    timers = Timers(failures.append)

    def broken(now: float) -> None:
        called.append(now)
        if len(called) == 1:
            raise ValueError("once")

    broken_timer, other = timers.timer(broken), timers.timer(lambda now: called.append(f"other at {now}"))
    broken_timer.at(1)
    other.at(1)
    timers.run(1)
    assert [str(error) for error in failures] == ["once"]
    assert called == [1, "other at 1"]
    again_at = timers.next_at()
    assert 1 < again_at < math.inf
    timers.run(again_at)
    assert called[2:] == [again_at]
    assert timers.next_at() == math.inf


@pytest.mark.parametrize("action", ["put off", "bring forward", "disarm"])
def test_what_is_armed_anew_all_the_time_leaves_nothing_behind(action):
    timers = Timers(fail)
    made = [timers.timer(lambda now: None) for _ in range(10)]
    for step in range(10_000):
        timer = made[step % 10]
        timer.at(20_000 + step if action == "put off" else 20_000 - step)
        if action == "disarm":
            timer.cancel()
        timers.next_at()
    assert len(timers._heap) < 200

"""An idle vLLM steps until what is on disk was told, and not for ever."""

from __future__ import annotations

from kvconnect.orders import OffloadReport, TierChange
from kvconnect.vllm.steps import WAIT_S, Recovery

NEWS = [OffloadReport(0), OffloadReport(1, changes=(TierChange("disk", 0, (b"h",)),))]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_it_steps_while_more_is_told_and_then_no_more():
    recovery = Recovery(expects=True, clock=Clock())
    for _ in range(3):
        assert recovery.is_under_way
        recovery.step()
        recovery.reported(NEWS)
    assert recovery.is_under_way
    recovery.step()
    assert not recovery.is_under_way, "a step that brought nothing is the last"
    recovery.step()
    recovery.reported(NEWS)
    assert recovery.is_under_way, "what changes later is heard in the same way"


def test_where_nothing_is_told_it_waits_for_a_while():
    clock = Clock()
    recovery = Recovery(expects=True, clock=clock)
    assert recovery.is_under_way
    clock.now += WAIT_S - 0.1
    recovery.step()
    recovery.reported([OffloadReport(0)])
    assert recovery.is_under_way
    clock.now += 0.2
    assert not recovery.is_under_way
    clock.now -= 1.0
    assert not recovery.is_under_way


def test_without_lower_tiers_it_waits_for_nothing():
    assert not Recovery(expects=False, clock=Clock()).is_under_way

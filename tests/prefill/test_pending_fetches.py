"""Fetches that wait on P are looked at again for each event that may let them begin, and only then."""

from __future__ import annotations

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.outcome import Cause
from kvconnect.peer.messages import Fetch
from kvconnect.prefill.pending_fetches import PendingFetch, PendingFetches
from kvconnect.transfer.parts import Timers

HANDLE = "transfer:t"


def _failed(*error: object) -> None:
    raise AssertionError(error)


def waiting():
    """A fetch of a prefill under way, which has to wait."""
    pending = PendingFetches(ExtraConfig(), set(), Timers(_failed))
    pending.expect(HANDLE)
    fetch = Fetch(1, HANDLE, num_tokens=20, consumers=1, timeout_s=30.0)
    assert pending.admit(PendingFetch("link", fetch, 0.0), 0.0) is None
    assert not pending.touched
    return pending


@pytest.mark.parametrize(
    "event",
    [
        lambda pending: pending.hold(HANDLE),
        lambda pending: pending.end(HANDLE, Cause.PREFILL_ENDED("it was aborted")),
        lambda pending: pending.touch(HANDLE),
        lambda pending: pending.touch_link("link"),
        lambda pending: pending.touch_fetch(("link", 1)),
    ],
    ids=["hold", "end", "touch", "touch_link", "touch_fetch"],
)
def test_an_event_has_the_fetch_looked_at_in_the_next_turn(event):
    pending = waiting()
    event(pending)
    (early,) = pending.take_touched()
    assert (early.key, pending.touched) == (("link", 1), {})
    pending.remove(early)
    assert not len(pending)


def test_events_of_others_do_not():
    pending = waiting()
    for event in (pending.hold, pending.touch, pending.touch_link):
        event("another")
    pending.touch_fetch(("link", 2))
    assert not pending.touched

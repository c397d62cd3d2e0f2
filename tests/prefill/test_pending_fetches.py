"""Fetches that wait for a link to be measured are looked at again once it is, those of others not."""

from __future__ import annotations

from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import Fetch
from kvconnect.prefill.pending_fetches import PendingFetch, PendingFetches
from kvconnect.transfer.parts import Timers


def test_fetches_of_a_link_that_is_measured_are_looked_at():
    pending = PendingFetches(ExtraConfig(), set(), Timers(lambda error: None))
    pending.expect("transfer:t")
    fetch = Fetch(1, "transfer:t", num_tokens=20, consumers=1, timeout_s=30.0)
    assert pending.admit(PendingFetch("link", fetch, 0.0), 0.0) is None
    pending.touch_link("another")
    assert not pending.touched
    pending.touch_link("link")
    assert [early.key for early in pending.take_touched()] == [("link", 1)]

"""What each rank reports of its own."""

from __future__ import annotations

import pytest

from kvconnect.transfer.orders import Reports


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_every_rank_reports_the_windows_that_are_not_full(rank):
    """A pipeline rank knows of its own layers alone, and windows may be on a later one."""
    reports = Reports(rank)
    reports.ragged("a")
    reports.received("a", "")
    reports.settled("h")
    taken = reports.take()
    assert (taken.ragged, taken.received) == (("a",), ("a",))
    assert taken.settled == (("h",) if rank == 0 else ()), "what all ranks know alike is reported once"

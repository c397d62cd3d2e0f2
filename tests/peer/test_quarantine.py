"""What news shortens a quarantine: proof always, likelihood never what a proof said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.peer.loss import Quarantine

times = st.floats(min_value=0, max_value=1000)
news = st.lists(st.tuples(times, st.booleans()), max_size=8)


@given(times, news)
def test_it_ends_by_the_first_proof_or_by_the_earliest_likely_time(until, told):
    quarantine = Quarantine(until, is_unproven=True)
    for time, proven in told:
        quarantine.hasten(time, proven=proven)
    proofs = [time for time, proven in told if proven]
    if proofs:
        # A first proof may say later than what seemed likely; nothing that follows may.
        assert quarantine.until == min(proofs)
        assert not quarantine.ends_unproven(10_000)
    else:
        assert quarantine.until == min([until, *(time for time, _ in told)])
        assert quarantine.ends_unproven(quarantine.until)


def test_a_guess_after_a_proof_changes_nothing():
    quarantine = Quarantine(100, is_unproven=True)
    quarantine.hasten(9, proven=True)
    quarantine.hasten(8, proven=False)
    assert (quarantine.until, quarantine.is_unproven) == (9, False)


def test_it_can_be_extended_and_never_by_that_shortened():
    quarantine = Quarantine(5)
    quarantine.extend(3)
    quarantine.extend(7)
    assert quarantine.until == 7

"""Some hundred simulated deployments: no invariant breaks, and much of what can happen does."""

from __future__ import annotations

import pytest

from tests.simulator.run import Summary, run_seed, run_seeds

SEEDS = 150


def shown(summary: Summary) -> str:
    return "\n".join(
        f"seed {outcome.seed} breaks {outcome.invariant}: {outcome.text}" for outcome in summary.violations
    )


# Forty seconds on an idle core.
@pytest.mark.timeout(600)
def test_no_invariant_breaks_in_some_hundred_seeds():
    summary = Summary()
    for outcome in run_seeds(0, SEEDS, jobs=1):
        summary.add(outcome)
    assert not summary.violations, shown(summary)
    assert summary.seeds == SEEDS
    # A simulation in which everything fails, or nothing does, would show nothing.
    counts = summary.counts
    assert counts["loads ok"] > 2 * SEEDS
    for what in (
        "copies: received",
        "streamed",
        "preemptions",
        "clients left",
        "loads failed",
        "failures: lease_expired",
        "failures: peer_lost",
        "failures: digest",
        "failures: landing",
        "failures: peer_not_trusted",
        "forged handles refused",
        "stray writes",
        "loads ok by name",
        "loads ok by restore",
        "loads ok by parked",
        "failures: park_failed",
        "failures: park_rows_short",
        "loads failed by name",
        "pinned on the device",
        "pulls: missed",
        "pulls: unanswered",
        "pulls: not_worth_it",
        "sessions: pin accepted",
        "sessions: pin clipped",
        "sessions: pin rejected",
        "sessions: release accepted",
        "sessions: demote accepted",
        "sessions: prefetch accepted",
    ):
        assert counts.get(what, 0) > 0, what


# A process dies while it writes to slots, which its peer lends anew as soon as nothing can arrive any more.
@pytest.mark.parametrize("seed", [1000371, 1000481, 1000753])
def test_no_invariant_breaks_in_a_rare_case(seed):
    outcome = run_seed(seed)
    assert not outcome.invariant, outcome.text


@pytest.mark.full
@pytest.mark.timeout(0)
def test_no_invariant_breaks_in_ten_thousand_seeds():
    summary = Summary()
    for outcome in run_seeds(1_000_000, 10_000, jobs=2):
        summary.add(outcome)
    assert not summary.violations, shown(summary)

"""A wire between two network namespaces that does not carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.links import CUTS, Wire, link_stage, run_cut, unusable
from tests.faults.stage import DEADLINES, Questions, Stage

PROBLEM = unusable()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "it can")

SHORT = [("down", 1.0, True), ("blackhole", 3.0, False)]


@pytest.fixture(scope="module")
def cut_off(engine):
    # Each policy with one of them.
    policy = "fail" if engine == "mooncake" else "recompute"
    with Wire() as wire, Stage(replace(link_stage(wire, engine, policy), lengths=(600, 512, 300))) as stage:
        yield stage, Questions(stage, seed=1), wire


@pytest.mark.parametrize(
    ("how", "lasts_s", "mid_transfer"),
    [*SHORT, *(pytest.param(*cut, marks=pytest.mark.full) for cut in CUTS)],
    ids=lambda value: str(value),
)
@pytest.mark.timeout(300)
def test_every_client_is_answered_and_the_pair_meets_again(cut_off, how, lasts_s, mid_transfer):
    stage, questions, wire = cut_off
    report = run_cut(questions, wire, how, lasts_s, mid_transfer)
    assert report.problems == [], stage.tails()
    assert report.hits or mid_transfer
    if not mid_transfer:
        # They never met: nothing can be on its way, and nobody waits for longer than the greeting may take.
        assert report.slowest_s < DEADLINES["peer_timeout_s"] / 2 + 1.0 + 5.0
        assert (report.exact, report.refused) == ((4, 0) if report.policy == "recompute" else (0, 4))

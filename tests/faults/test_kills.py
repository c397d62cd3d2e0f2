"""A pair that nobody asks anything, and SIGKILL of either side in the middle of transfers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.faults.signals import kill_stage, run_kills
from tests.faults.stage import Questions, Stage


@pytest.fixture(scope="module")
def pair(engine):
    # Of both policies, so that neither costs a pair more.
    options = kill_stage(engine, "recompute" if engine == "mooncake" else "fail")
    with Stage(replace(options, lengths=(600, 512, 40), flows=("parallel",))) as stage:
        yield stage, Questions(stage, seed=1)


def test_an_idle_pair_costs_next_to_nothing(pair):
    stage, questions = pair
    assert questions.are_fetched()
    time.sleep(1.0)
    before = [node.cpu_seconds for node in stage.nodes]
    time.sleep(4.0)
    # The aim is 0.05 of a core over 30 s. A progress thread would take a whole one.
    assert max(node.cpu_seconds - then for node, then in zip(stage.nodes, before, strict=True)) < 0.25 * 4.0


@pytest.mark.parametrize(
    "kills", [pytest.param(5, id="5"), pytest.param(100, id="100", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.timeout(2400)
def test_a_killed_side_costs_nothing_but_its_own_requests(pair, side, kills):
    stage, questions = pair
    other = stage.decode if side == "prefill" else stage.prefill
    survivor, starts = other.pid, other.starts
    report = run_kills(questions, side, kills)
    assert report.problems == [], stage.tails()
    assert report.kills == kills
    assert report.hits >= kills / 2, "too few kills came in the middle of a transfer"
    assert (other.pid, other.starts) == (survivor, starts), "the other side needed no restart"
    assert len(report.usable_s) == kills, "what took its place was fetched from, or fetched, each time"
    assert report.slowest_s <= stage.options.deadline_s
    if side == "prefill":
        assert report.failed_loads >= kills / 2

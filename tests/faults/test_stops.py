"""SIGSTOP in the middle of transfers, and SIGCONT after every deadline, while slots are in quarantine."""

from __future__ import annotations

import dataclasses

import pytest

from tests.faults.signals import StopReport, run_stops, stop_stage
from tests.faults.stage import Questions, Side, Stage

# Over well before the stop is. The quarantine lasts 15 s more: ``python -m tests.faults stops`` outlasts it.
SHORT = {
    "lease_s": 2.0,
    "load_timeout_s": 2.0,
    "peer_timeout_s": 2.0,
    "transfer_timeout_s": 1.0,
}
STOP_S = 3.5

sides = pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=pytest.mark.full)])


def stopped_once(engine: str, side: Side, protocol: str) -> StopReport:
    options = stop_stage(engine, "fail", protocol, STOP_S)
    options = dataclasses.replace(options, extra={**options.extra, **SHORT})
    with Stage(options) as stage:
        report = run_stops(Questions(stage, seed=1), side, 1, stop_s=STOP_S)
        assert report.problems == [], stage.tails()
    assert report.hits == 1
    assert report.beside > 0
    assert report.exact >= report.beside
    return report


@sides
@pytest.mark.timeout(300)
def test_what_comes_late_goes_nowhere(engine, side):
    stopped_once(engine, side, "")


# Mooncake itself carries the bytes of CPU caches over TCP, also within a machine.
@pytest.mark.parametrize("engine", ["mooncake"], indirect=True)
@sides
@pytest.mark.timeout(300)
def test_what_is_packed_late_into_shared_memory_goes_nowhere(engine, side):
    assert stopped_once(engine, side, "auto").lanes == ["shared_memory"]

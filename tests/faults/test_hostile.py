"""Hostile traffic on every port of a running pair."""

from __future__ import annotations

import pytest

from tests.faults.hostile import BATTERIES, run_batteries

CONNECTIONS = 400


@pytest.mark.parametrize(
    "frames", [pytest.param(800, id="800"), pytest.param(250_000, id="250000", marks=pytest.mark.full)]
)
@pytest.mark.timeout(3600)
def test_no_thread_dies_and_honest_requests_go_on(engine, frames):
    # The ports that all engines have in common are attacked once.
    only = BATTERIES if engine == "mooncake" or frames > 1000 else ("insider", "engine")
    reports = run_batteries(engine, frames_per_s=1000.0, total=frames, windows=1, idle=CONNECTIONS, only=only)
    assert tuple(report.battery for report in reports) == only
    for report in reports:
        assert report.problems == [], report.battery
        if report.battery == "idle":
            assert report.connections >= CONNECTIONS / 2
            continue
        assert sum(report.frames.values()) >= frames
        assert all(report.frames.values()), "a port was not attacked"
        assert report.honest > 0
    names = [name for report in reports for name in report.frames]
    kinds = ["side channel", "engine"]
    if "http" in only:
        kinds += ["HTTP", "side channel, wrong key", "side channel, right key"]
        assert "router-0 HTTP" in names
    for who in ("prefill-0", "decode-0"):
        for kind in kinds:
            assert any(name.startswith(f"{who} {kind}") for name in names), f"{who} {kind}"

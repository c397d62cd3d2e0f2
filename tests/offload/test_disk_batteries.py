"""The batteries of ``python -m tests.faults disk``, short: kills while writing, every kind of damage."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.faults.damage import KINDS, run_damage


def test_nothing_wrong_is_served_after_kills():
    command = [sys.executable, "-m", "tests.faults", "disk", "--count", "25", "--records", "0"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stdout + told.stderr
    report = json.loads(told.stdout)
    assert (report["kills"], report["wrong"], report["problems"]) == (25, 0, [])
    assert report["wrote"] > 0
    assert report["served"] > 0
    assert report["most_of_bound"] <= 1.0


@pytest.fixture(scope="module")
def damage(tmp_path_factory):
    reports = run_damage(tmp_path_factory.mktemp("damage"), 600, seed=1)
    return {(report.kind, report.when): report for report in reports}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["closed", "open"])
def test_nothing_damaged_is_served(damage, kind, when):
    report = damage[kind, when]
    assert report.wrong == 0
    assert report.problems == []
    assert report.served + report.missed == 600


def test_what_is_not_damaged_is_served(damage):
    for when in ("closed", "open"):
        report = damage["flipped rows", when]
        assert report.damaged
        assert report.served == 600 - report.damaged
        assert report.failures == {"disk_corrupt": report.damaged}
    assert damage["flipped", "open"].served == damage["foreign", "closed"].served == 0
    assert damage["appended", "closed"].served == damage["appended", "open"].served == 600
    zeroed = damage["zeroed pages", "closed"]
    assert zeroed.damaged
    assert zeroed.served == 600 - zeroed.damaged

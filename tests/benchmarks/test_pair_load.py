"""The idle measurement, kept short."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def bench(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True, timeout=110
    )
    return (
        done.returncode,
        [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")],
        done,
    )


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_an_idle_pair_costs_next_to_nothing(engine):
    code, (report,), done = bench("idle", "--json", "--engine", engine, "--seconds", "4")
    assert code == 0, done.stdout + done.stderr
    # The aim is 0.05 of a core over 30 s. A progress thread would take a whole one.
    assert max(report["more_than_alone"].values()) < 0.2

"""A seed is one run: the same in every process, whatever order its sets would have."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.simulator.run import format_event, run_seed

SEEDS = range(40, 60)
PRINT_TRACES = f"""
import hashlib
from tests.simulator.run import run_seed
from tests.simulator.run import format_event
for seed in range({SEEDS.start}, {SEEDS.stop}):
    outcome = run_seed(seed)
    text = "\\n".join(format_event(event) for event in outcome.trace)
    print(seed, outcome.steps, len(outcome.trace), hashlib.sha256(text.encode()).hexdigest())
"""


def traces(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_TRACES], env=environment, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_two_processes_with_other_hashes_see_the_same_events():
    first, second = traces("1"), traces("77")
    assert first == second
    assert len(first.splitlines()) == len(SEEDS)


def test_a_seed_does_not_depend_on_what_ran_before():
    alone = [format_event(event) for event in run_seed(7).trace]
    run_seed(8)
    assert [format_event(event) for event in run_seed(7).trace] == alone


def test_seeds_differ():
    traces = {tuple(format_event(event) for event in run_seed(seed).trace) for seed in range(10)}
    assert len(traces) == 10

"""A seed is one run: the same in every process, whatever order its sets have, and whatever ran before it."""

from __future__ import annotations

import os
import subprocess
import sys

SEEDS = range(40, 46)
PRINT_TRACES = """
import hashlib
from tests.simulator.run import format_event, run_seed
for seed in {}:
    outcome = run_seed(seed)
    text = "\\n".join(format_event(event) for event in outcome.trace)
    print(seed, outcome.steps, len(outcome.trace), hashlib.sha256(text.encode()).hexdigest())
"""


def traces(hash_seed: str, seeds: range) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_TRACES.format(seeds)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_two_processes_with_other_hashes_and_another_order_see_the_same_events():
    first, second = traces("1", SEEDS), traces("77", SEEDS[::-1])
    assert first == second[::-1]
    assert len({line.split()[-1] for line in first}) == len(SEEDS), "seeds differ"

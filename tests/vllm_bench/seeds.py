"""``python -m tests.vllm_bench --kind pd --first-seed 0 --seeds 2000``: many seeds, or one with its trace."""

from __future__ import annotations

import argparse
import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field

from tests.vllm_bench.pair import KINDS, Engines, Setup
from tests.vllm_bench.traffic import Traffic


@dataclass
class Outcome:
    """What came of a number of seeds."""

    num_seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None

    def __str__(self) -> str:
        told = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return (
            f"{self.num_seeds} seeds, {self.steps} steps in {self.seconds:.1f} s "
            f"({self.steps / max(self.seconds, 1e-9):.0f} steps/s); {told}"
        )


@dataclass
class Failure:
    """A seed that failed, with what happened in it until then."""

    kind: str
    seed: int
    setup: Setup
    error: Exception
    trace: list[str]

    def __str__(self) -> str:
        name = type(self.error).__name__
        return f"seed {self.seed} of {self.kind}, model {self.setup.model.name}: {name}: {self.error}"


def run_seeds(kind: str, seeds: Iterable[int]) -> Outcome:
    """Run them; seeds that share engines one after the other. Ends with the first that fails."""
    by_setup: dict[Setup, list[int]] = {}
    for seed in seeds:
        by_setup.setdefault(Setup.of_seed(kind, seed), []).append(seed)
    outcome = Outcome()
    for setup, shared in by_setup.items():
        with closing(Engines(setup)) as engines:
            for seed in shared:
                outcome.failure = _run(engines, seed, outcome)
                if outcome.failure is not None:
                    return outcome
    return outcome


def _run(engines: Engines, seed: int, outcome: Outcome) -> Failure | None:
    before, begun = sum(engine.steps for engine in engines.all), time.monotonic()
    traffic = Traffic(engines, seed)
    try:
        traffic.run()
    except Exception as error:
        return Failure(engines.setup.kind, seed, engines.setup, error, traffic.trace)
    finally:
        outcome.num_seeds += 1
        outcome.seconds += time.monotonic() - begun
        outcome.steps += sum(engine.steps for engine in engines.all) - before
        outcome.counts.update(traffic.counts)
    return None


def main() -> int:
    """Exit status 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_bench", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="left out, all of them")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="print all that happened in a seed that failed")
    given = parser.parse_args()
    for name in ("kvconnect", "vllm"):
        logging.getLogger(name).setLevel(logging.WARNING if given.trace else logging.ERROR)
    failed = False
    for kind in (given.kind,) if given.kind else KINDS:
        outcome = run_seeds(kind, range(given.first_seed, given.first_seed + given.seeds))
        if outcome.failure is not None:
            failed = True
            _tell(outcome.failure, whole=given.trace)
        print(f"{kind}: {outcome}", flush=True)
    return int(failed)


def _tell(failure: Failure, *, whole: bool) -> None:
    print(f"FAILED {failure}")
    for line in failure.trace if whole else failure.trace[-6:]:
        print(f"    {line}")
    if not isinstance(failure.error, AssertionError) or whole:
        traceback.print_exception(failure.error)
    print(
        f"    again: python -m tests.vllm_bench --kind {failure.kind} --first-seed {failure.seed} --seeds 1 "
        "--trace"
    )

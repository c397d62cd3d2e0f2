"""``python -m tests.vllm_bench --kind pd --first-seed 0 --seeds 2000``: many seeds, or one with its trace."""

from __future__ import annotations

import argparse
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.vllm_bench.model import MODELS
from tests.vllm_bench.pair import KINDS, Engines, Setup
from tests.vllm_bench.traffic import Traffic


@dataclass
class Outcome:
    """What came of a number of seeds."""

    num_seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        told = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return (
            f"{self.num_seeds} seeds, {self.steps} steps in {self.seconds:.1f} s "
            f"({self.steps / max(self.seconds, 1e-9):.0f} steps/s), {len(self.failures)} failed; {told}"
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
        return (
            f"seed {self.seed} of {self.kind}, model {self.setup.model.name}: "
            f"{type(self.error).__name__}: {self.error}"
        )


def run_seeds(
    kind: str,
    seeds: Iterable[int],
    *,
    models: tuple[str, ...] = (),
    most_failures: int = 1,
    tell: Callable[[Failure], None] = lambda failure: None,
) -> Outcome:
    """Run them; seeds that share engines one after the other. Ends after ``most_failures``."""
    by_setup: dict[Setup, list[int]] = {}
    for seed in seeds:
        by_setup.setdefault(Setup.of_seed(kind, seed, models), []).append(seed)
    outcome, begun = Outcome(), time.monotonic()
    for setup, shared in by_setup.items():
        engines: Engines | None = None
        for seed in shared:
            if len(outcome.failures) >= most_failures:
                break
            engines = engines or Engines(setup)
            failure = _run(engines, seed, outcome)
            if failure is not None:
                outcome.failures.append(failure)
                tell(failure)
                engines.close()
                engines = None
        if engines is not None:
            engines.close()
    outcome.seconds = time.monotonic() - begun
    return outcome


def _run(engines: Engines, seed: int, outcome: Outcome) -> Failure | None:
    before = sum(engine.steps for engine in engines.all)
    traffic = None
    try:
        traffic = Traffic(engines, seed)
        traffic.run()
    except Exception as error:
        return Failure(engines.setup.kind, seed, engines.setup, error, traffic.trace if traffic else [])
    finally:
        outcome.num_seeds += 1
        outcome.steps += sum(engine.steps for engine in engines.all) - before
        if traffic is not None:
            outcome.counts.update(traffic.counts)
    return None


def main() -> int:
    """Exit status 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_bench", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="left out, all of them")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--model", choices=tuple(MODELS), action="append", default=[], help="only these caches"
    )
    parser.add_argument("--most-failures", type=int, default=1, help="end after so many")
    parser.add_argument("--trace", action="store_true", help="print all that happened in a seed that failed")
    given = parser.parse_args()
    for name in ("kvconnect", "vllm"):
        logging.getLogger(name).setLevel(logging.WARNING if given.trace else logging.ERROR)
    failed = False
    for kind in (given.kind,) if given.kind else KINDS:
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        outcome = run_seeds(
            kind,
            seeds,
            models=tuple(given.model),
            most_failures=given.most_failures,
            tell=lambda failure: _tell(failure, whole=given.trace, models=given.model),
        )
        print(f"{kind}: {outcome}", flush=True)
        failed |= bool(outcome.failures)
    return int(failed)


def _tell(failure: Failure, *, whole: bool, models: list[str]) -> None:
    print(f"FAILED {failure}")
    for line in failure.trace if whole else failure.trace[-6:]:
        print(f"    {line}")
    if not isinstance(failure.error, AssertionError) or whole:
        traceback.print_exception(failure.error)
    only = "".join(f" --model {name}" for name in models)
    print(
        f"    again: python -m tests.vllm_bench --kind {failure.kind} --first-seed {failure.seed} --seeds 1"
        f"{only} --trace",
        flush=True,
    )

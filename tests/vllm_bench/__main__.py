"""``python -m tests.vllm_bench --kind pd --first-seed 0 --seeds 2000``: many seeds, or one with its trace."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback

from tests.vllm_bench.model import MODELS
from tests.vllm_bench.pair import KINDS
from tests.vllm_bench.seeds import Failure, run_seeds


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


if __name__ == "__main__":
    sys.exit(main())

"""Many seeds, in several processes if wanted, and the sum of what came of them."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from tests.simulator.draw import draw_scenario
from tests.simulator.run import Outcome, run_seed
from tests.simulator.world import World

_SEEDS_AT_ONCE = 20


@dataclass
class Summary:
    """Sums over seeds. ``violations`` are those in which an invariant does not hold."""

    seeds: int = 0
    steps: int = 0
    simulated_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    violations: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Add one."""
        self.seeds += 1
        self.steps += outcome.steps
        self.simulated_s += outcome.seconds
        self.counts.update(outcome.counts)
        self.reasons.update(outcome.reasons)
        if outcome.invariant:
            self.violations.append(outcome)


def run_seeds(first_seed: int, seeds: int, jobs: int, *, only_pulls: bool = False) -> Iterator[Outcome]:
    """The outcomes of so many seeds, without their traces; with several jobs, in no certain order.

    ``only_pulls``: of those among them in which nodes ask one another for KV by name.
    """
    run_part = functools.partial(_run_part, only_pulls)
    numbers = range(first_seed, first_seed + seeds)
    if jobs <= 1:
        _prepare()
        for seed in numbers:
            yield from run_part([seed])
        return
    # Forked children would share the parent's torch threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _prepare) as pool:
        parts = [numbers[start : start + _SEEDS_AT_ONCE] for start in range(0, seeds, _SEEDS_AT_ONCE)]
        yield from itertools.chain.from_iterable(pool.imap_unordered(run_part, parts))


def _prepare() -> None:
    torch.set_num_threads(1)
    # To look through all that was imported is most of what a collection takes.
    gc.collect()
    gc.freeze()


def _run_part(only_pulls: bool, seeds: Iterable[int]) -> list[Outcome]:
    wanted = filter(_pulls, seeds) if only_pulls else seeds
    return [replace(run_seed(seed), trace=[]) for seed in wanted]


def _pulls(seed: int) -> bool:
    return draw_scenario(seed, World(seed).random).nodes[0].keeps is not None

"""What the simulator prints: progress, sums, and for a broken invariant all that is needed to see why."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulator.batch import Summary, run_seeds
from tests.simulator.run import Outcome, run_seed
from tests.simulator.trace import format_event

_LAST_EVENTS = 40
_MOST_REASONS = 12


def run_sim(*, seeds: int, first_seed: int, jobs: int, trace: bool, keep_going: bool) -> int:
    """Run seeds and show what came of them. Returns the exit code: 1 if an invariant does not hold."""
    console = Console()
    if trace:
        return _replay(console, first_seed)
    summary, started = Summary(), time.perf_counter()
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=seeds)
        for outcome in run_seeds(first_seed, seeds, jobs):
            summary.add(outcome)
            progress.advance(task)
            if outcome.invariant:
                _show_violation(progress.console, outcome)
                if not keep_going:
                    break
    _show_summary(console, summary, time.perf_counter() - started)
    return 1 if summary.violations else 0


def _replay(console: Console, seed: int) -> int:
    outcome = run_seed(seed)
    for event in outcome.trace:
        console.print(format_event(event), markup=False, highlight=False, soft_wrap=True)
    _show_scenario(console, outcome)
    if outcome.invariant:
        console.print(f"seed {seed} breaks {outcome.invariant}: {outcome.text}", markup=False, soft_wrap=True)
    return 1 if outcome.invariant else 0


def _show_violation(console: Console, outcome: Outcome) -> None:
    console.print(
        f"seed {outcome.seed} breaks {outcome.invariant}: {outcome.text}", markup=False, soft_wrap=True
    )
    again = run_seed(outcome.seed)
    _show_scenario(console, again)
    console.print(f"the last {_LAST_EVENTS} events:")
    for event in again.trace[-_LAST_EVENTS:]:
        console.print(format_event(event), markup=False, highlight=False, soft_wrap=True)
    if again.invariant != outcome.invariant:
        console.print(f"run again it breaks {again.invariant or 'nothing'}: {again.text}", markup=False)
    console.print(f"replay: python -m tests.simulator --first-seed {outcome.seed} --trace")


def _show_scenario(console: Console, outcome: Outcome) -> None:
    words = "; ".join(f"{name} {value}" for name, value in outcome.scenario.items())
    console.print(f"seed {outcome.seed}: {words}", markup=False, soft_wrap=True)


def _show_summary(console: Console, summary: Summary, seconds: float) -> None:
    table = Table(title=f"{summary.seeds} seeds in {seconds:.1f} s", show_header=False)
    rows: list[tuple[str, str]] = [
        ("violations", str(len(summary.violations))),
        ("simulated hours", f"{summary.simulated_s / 3600:.1f}"),
        ("events", str(summary.steps)),
        ("milliseconds a seed", f"{seconds / max(1, summary.seeds) * 1e3:.1f}"),
    ]
    rows += [(what, str(count)) for what, count in sorted(summary.counts.items())]
    often = sorted(summary.reasons.items(), key=lambda item: (-item[1], item[0]))[:_MOST_REASONS]
    rows += [(f"failed: {why}", str(count)) for why, count in often]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if summary.violations:
        console.print(f"broken by seeds {sorted(outcome.seed for outcome in summary.violations)}")

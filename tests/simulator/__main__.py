"""``python -m tests.simulator``: options, and what is printed: of a broken invariant all that shows why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulator.run import Outcome, Summary, format_event, parks, run_seed, run_seeds
from tests.simulator.run import pulls as asks_by_name

_LAST_EVENTS = 40
_MOST_REASONS = 12


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 1000,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run them.")] = 2,
    pulls: Annotated[
        bool, typer.Option("--pulls", help="Of the seeds only those in which nodes ask for KV by name.")
    ] = False,
    parked: Annotated[
        bool, typer.Option("--parked", help="Of the seeds only those in which decode nodes park KV.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run the first seed only, and print every event of it.")
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Do not stop at the first seed that breaks an invariant.")
    ] = False,
) -> None:
    """Simulate whole deployments with faults, seed by seed, and check that no invariant breaks."""
    console = Console()
    if trace:
        outcome = run_seed(first_seed)
        _show(console, outcome, outcome.trace)
        raise typer.Exit(1 if outcome.invariant else 0)
    summary, started = Summary(), time.perf_counter()
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=seeds)
        only = asks_by_name if pulls else parks if parked else None
        for outcome in run_seeds(first_seed, seeds, jobs, only=only):
            summary.add(outcome)
            progress.advance(task)
            if outcome.invariant:
                _show_violation(progress.console, outcome)
                if not keep_going:
                    break
    _show_summary(console, summary, time.perf_counter() - started)
    raise typer.Exit(1 if summary.violations else 0)


def _show(console: Console, outcome: Outcome, events: Sequence[Sequence[object]]) -> None:
    """Events of a seed, what it stands for, and the invariant that it breaks."""
    for event in events:
        console.print(format_event(event), markup=False, highlight=False, soft_wrap=True)
    words = "; ".join(f"{name} {value}" for name, value in outcome.scenario.items())
    console.print(f"seed {outcome.seed}: {words}", markup=False, soft_wrap=True)
    if outcome.invariant:
        text = f"seed {outcome.seed} breaks {outcome.invariant}: {outcome.text}"
        console.print(text, markup=False, soft_wrap=True)


def _show_violation(console: Console, outcome: Outcome) -> None:
    again = run_seed(outcome.seed)
    console.print(f"the last {_LAST_EVENTS} events:")
    _show(console, outcome, again.trace[-_LAST_EVENTS:])
    if again.invariant != outcome.invariant:
        console.print(f"run again it breaks {again.invariant or 'nothing'}: {again.text}", markup=False)
    console.print(f"replay: python -m tests.simulator --first-seed {outcome.seed} --trace")


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


if __name__ == "__main__":
    app()

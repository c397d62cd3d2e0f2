"""``python -m tests.simulator``: options, and what is printed: of a broken invariant all that shows why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from tests.simulator.run import Outcome, Summary, format_event, run_seed, run_seeds

_LAST_EVENTS = 40
_MOST_REASONS = 12


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 1000,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run them.")] = 2,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run the first seed only, and print every event of it.")
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Do not stop at the first seed that breaks an invariant.")
    ] = False,
) -> None:
    """Simulate whole deployments with faults, seed by seed, and check that no invariant breaks."""
    if trace:
        outcome = run_seed(first_seed)
        _show(outcome, outcome.trace)
        raise typer.Exit(1 if outcome.invariant else 0)
    summary, started = Summary(), time.perf_counter()
    with typer.progressbar(run_seeds(first_seed, seeds, jobs), length=seeds, label="seeds") as outcomes:
        for outcome in outcomes:
            summary.add(outcome)
            if outcome.invariant:
                _show_violation(outcome)
                if not keep_going:
                    break
    _show_summary(summary, time.perf_counter() - started)
    raise typer.Exit(1 if summary.violations else 0)


def _show(outcome: Outcome, events: Sequence[Sequence[object]]) -> None:
    """Events of a seed, what it stands for, and the invariant that it breaks."""
    for event in events:
        typer.echo(format_event(event))
    words = "; ".join(f"{name} {value}" for name, value in outcome.scenario.items())
    typer.echo(f"seed {outcome.seed}: {words}")
    if outcome.invariant:
        typer.echo(f"seed {outcome.seed} breaks {outcome.invariant}: {outcome.text}")


def _show_violation(outcome: Outcome) -> None:
    again = run_seed(outcome.seed)
    typer.echo(f"\nthe last {_LAST_EVENTS} events:")
    _show(outcome, again.trace[-_LAST_EVENTS:])
    if again.invariant != outcome.invariant:
        typer.echo(f"run again it breaks {again.invariant or 'nothing'}: {again.text}")
    typer.echo(f"replay: python -m tests.simulator --first-seed {outcome.seed} --trace")


def _show_summary(summary: Summary, seconds: float) -> None:
    each_ms = seconds / max(1, summary.seeds) * 1e3
    typer.echo(f"{summary.seeds} seeds in {seconds:.1f} s, {each_ms:.1f} ms each")
    often = sorted(summary.reasons.items(), key=lambda item: (-item[1], item[0]))[:_MOST_REASONS]
    for what, count in (
        ("violations", len(summary.violations)),
        ("simulated hours", round(summary.simulated_s / 3600, 1)),
        ("events", summary.steps),
        *sorted(summary.counts.items()),
        *((f"failed: {why}", count) for why, count in often),
    ):
        typer.echo(f"{count:>10}  {what}")
    if summary.violations:
        typer.echo(f"broken by seeds {sorted(outcome.seed for outcome in summary.violations)}")


if __name__ == "__main__":
    app()

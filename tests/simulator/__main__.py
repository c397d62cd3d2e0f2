"""``python -m tests.simulator``: its options and help texts."""

from __future__ import annotations

from typing import Annotated

import typer

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
    from tests.simulator.report import run_sim

    raise typer.Exit(
        run_sim(seeds=seeds, first_seed=first_seed, jobs=jobs, trace=trace, keep_going=keep_going)
    )


if __name__ == "__main__":
    app()

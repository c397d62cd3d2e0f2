"""``python -m benchmarks NAME``: the names. The options of each, and what is measured, lie with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from benchmarks.harness import add_command, run_app

BENCHMARKS = {
    "turns": "Time a turn of the transfer thread and a step of the scheduler half beside records at rest.",
    "pack": "Time the packing of pages into slots and back, beside a plain copy of as many bytes.",
    "offload": "Time blocks on their way to host memory and back, beside contiguous copies and one per page.",
    "transfer": "Time the KV of requests between two workers, beside what the engine alone can do.",
}
"""Help text by name; the module of that name has ``bench_NAME``."""


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """The app of a command line. Only the benchmark that is asked for is imported: some import torch."""
    app = typer.Typer(
        name="benchmarks",
        help="Measure parts of kvconnect on this machine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    asked = next((argument for argument in arguments if argument in BENCHMARKS), "")
    for name, text in BENCHMARKS.items():
        if name == asked:
            add_command(app, name, text, getattr(import_module(f"benchmarks.{name}"), f"bench_{name}"))
        else:
            app.command(name, help=text)(lambda: None)
    return app


if __name__ == "__main__":
    run_app(make_app(sys.argv[1:]))

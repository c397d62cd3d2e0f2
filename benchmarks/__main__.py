"""``python -m benchmarks NAME``: the names. The options of each, and what is measured, lie with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from benchmarks.options import add_command, run_app

# Module and help text by name; the module has ``bench_NAME``.
BENCHMARKS = {
    "zero": (
        "runner_kit",
        "Time the zeroing of fresh blocks beside a memset of as many bytes, on the GPU if there is one.",
    ),
    "tables": ("runner_kit", "Time the update of block tables, on the GPU if there is one."),
    "scheduler": (
        "scheduler",
        "Time what the scheduler half's hooks add to a step, on one core and without a network.",
    ),
    "turns": (
        "turns",
        "Time a turn of the transfer thread and a step of the scheduler half beside records at rest.",
    ),
    "index": (
        "index",
        "Time what the index of kept blocks takes of a scheduler's thread: "
        "look-ups, evictions, reservations.",
    ),
    "disk": (
        "disk",
        "Time the disk tier beside plain sequential I/O of as many bytes, and what a restart takes.",
    ),
    "pack": (
        "pack",
        "Time the packing of pages into slots and back, beside a plain copy of as many bytes.",
    ),
    "idle": ("pair_load", "Measure what a pair that has met costs while nobody asks it anything."),
    "offload": (
        "offload.runner",
        "Time blocks on their way to host memory and back, beside contiguous copies and one copy per page.",
    ),
    "transfer": (
        "transfer.pair",
        "Time the KV of requests between two workers, beside what the engine alone can do.",
    ),
    "node": (
        "node.pair",
        "Time a node's decode steps while it receives KV without pause, beside those while it does not.",
    ),
    "streaming": (
        "streaming",
        "Time the first token of a pair that sends KV while it is computed, beside one that does not.",
    ),
    "returning": (
        "returning.runner",
        "Time the first token of a prompt that comes back: "
        "computed anew, from the GPU, host memory, or disk.",
    ),
}


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
    for name, (module, text) in BENCHMARKS.items():
        if name == asked:
            add_command(app, name, text, getattr(import_module(f"benchmarks.{module}"), f"bench_{name}"))
        else:
            app.command(name, help=text)(lambda: None)
    return app


if __name__ == "__main__":
    run_app(make_app(sys.argv[1:]))

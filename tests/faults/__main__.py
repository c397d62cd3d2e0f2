"""``python -m tests.faults NAME``: the options of every fault battery; what is injected lies with each."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import run_app
from kvconnect.errors import ConfigError
from tests.faults.disk import run_disk_kills
from tests.faults.hostile import BATTERIES, attacked_stage, run_batteries, run_liars
from tests.faults.links import CUTS, Wire, link_stage, run_cut
from tests.faults.signals import (
    kill_stage,
    neighbour_stage,
    run_kills,
    run_soak,
    run_stopped_neighbour,
    run_stops,
    soak_stage,
    stop_stage,
)
from tests.faults.stage import Questions, Report, Side, Stage, StageOptions, progress

app = typer.Typer(
    name="faults",
    help="Kill, stop, cut off and attack a pair of nodes on this machine while it serves. Prints one JSON "
    "object per report; the exit code is 1 if anything was wrong.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Engine = Annotated[str, typer.Option(help="mooncake, nixl or memory.")]
Policy = Annotated[str, typer.Option(help="The decode node's kv_load_failure_policy: recompute or fail.")]
Seed = Annotated[int, typer.Option(help="Seed of what is random.")]
OneSide = Annotated[str, typer.Option("--side", help="prefill or decode; left out, both.")]


def _show(reports: Sequence[Report], stage: Stage | None = None) -> None:
    for report in reports:
        typer.echo(json.dumps(asdict(report)))
    if any(report.problems for report in reports):
        if stage is not None:
            progress(stage.tails())
        raise typer.Exit(1)


def _run(options: StageOptions, seed: int, run: Callable[[Questions], Sequence[Report]]) -> None:
    with Stage(options) as stage:
        _show(run(Questions(stage, seed)), stage)


def _sides(side: str) -> list[Side]:
    sides: list[Side] = ["prefill", "decode"]
    if side and side not in sides:
        raise ConfigError(f"side is {side!r}; accepted: {', '.join(sides)}")
    return [one for one in sides if side in ("", one)]


@app.command()
def kills(
    engine: Engine = "mooncake",
    policy: Policy = "recompute",
    side: OneSide = "",
    count: Annotated[int, typer.Option(min=1, help="SIGKILLs of each side.")] = 100,
    seed: Seed = 0,
) -> None:
    """SIGKILL in the middle of transfers; what is killed is started again, the other side is not."""
    sides = _sides(side)
    _run(
        kill_stage(engine, policy),
        seed,
        lambda questions: [run_kills(questions, one, count, seed=seed) for one in sides],
    )


@app.command()
def stops(
    engine: Engine = "mooncake",
    policy: Policy = "fail",
    protocol: Annotated[str, typer.Option(help="The engine's; auto for shared memory.")] = "",
    side: OneSide = "",
    count: Annotated[int, typer.Option(min=1, help="Stops of each side.")] = 10,
    stop_s: Annotated[float, typer.Option(help="Seconds that each lasts.")] = 25.0,
    seed: Seed = 0,
) -> None:
    """SIGSTOP in the middle of transfers for longer than every deadline and the quarantine, then SIGCONT."""
    sides = _sides(side)
    _run(
        stop_stage(engine, policy, protocol, stop_s),
        seed,
        lambda questions: [run_stops(questions, one, count, stop_s=stop_s, seed=seed) for one in sides],
    )


@app.command()
def neighbours(
    engine: Engine = "mooncake",
    side: OneSide = "",
    windows: Annotated[int, typer.Option(min=1, help="Windows with a fault, and as many without.")] = 4,
    window_s: Annotated[float, typer.Option(help="Seconds of each.")] = 8.0,
    seed: Seed = 0,
) -> None:
    """Stop one of two nodes of a role, and time requests that only need the other."""
    for one in _sides(side):
        with Stage(neighbour_stage(engine, one)) as stage:
            questions = Questions(stage, seed)
            _show([run_stopped_neighbour(questions, one, windows=windows, window_s=window_s)], stage)


@app.command()
def links(engine: Engine = "mooncake", policy: Policy = "fail", seed: Seed = 0) -> None:
    """Cut the wire between two network namespaces, shortly and for long (needs root)."""
    with Wire() as wire:
        _run(
            link_stage(wire, engine, policy),
            seed,
            lambda questions: [run_cut(questions, wire, *cut) for cut in CUTS],
        )


@app.command()
def hostile(
    engine: Engine = "mooncake",
    total: Annotated[int, typer.Option(min=10, help="Frames of each battery.")] = 1_000_000,
    rate: Annotated[float, typer.Option(help="Frames a second; 0 for as fast as it can.")] = 1000.0,
    windows: Annotated[int, typer.Option(min=1, help="Windows under attack, and as many without.")] = 5,
    idle: Annotated[int, typer.Option(min=0, help="Connections that never finish a message.")] = 4000,
    battery: Annotated[
        list[str] | None,
        typer.Option(help="insider, keys, http, engine, idle (several times for several); default: all."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Malformed, mutated, replayed and forged frames on every port, and thousands of idle connections."""
    only = battery or BATTERIES
    _show(
        run_batteries(
            engine, frames_per_s=rate, total=total, windows=windows, idle=idle, only=only, seed=seed
        )
    )


@app.command()
def liars(
    engine: Engine = "mooncake",
    requests: Annotated[int, typer.Option(min=1, help="Fetches by way of a liar.")] = 500,
    seed: Seed = 0,
) -> None:
    """A prefill node whose every second answer is mutated on its way; the decode node must outlive that."""
    _run(attacked_stage(engine), seed, lambda questions: [run_liars(questions, requests, seed=seed)])


@app.command()
def soak(
    engine: Engine = "mooncake",
    policy: Policy = "recompute",
    minutes: Annotated[float, typer.Option(help="How long.")] = 20.0,
    seed: Seed = 0,
) -> None:
    """Load with random kills, stops and clients that leave; memory and what is left are watched."""
    _run(
        soak_stage(engine, policy),
        seed,
        lambda questions: [run_soak(questions, minutes * 60.0, seed=seed)],
    )


@app.command()
def disk(
    count: Annotated[int, typer.Option(min=0, help="SIGKILLs of a process that writes.")] = 100,
    path: Annotated[
        str, typer.Option(help="A folder on the disk that is meant; left out, one for temporary files.")
    ] = "",
    seed: Seed = 0,
) -> None:
    """SIGKILL of a process that writes to the disk tier: nothing wrong is served."""
    if path and not Path(path).is_dir():
        raise ConfigError(f"--path is {path!r}; accepted: a folder that is there")
    # What a tier says of what a kill leaves is what was asked for here.
    logging.getLogger("kvconnect").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="kvconnect-faults-", dir=path or None) as folder:
        _show([run_disk_kills(Path(folder, "kills"), count, seed=seed)])


if __name__ == "__main__":
    run_app(app)

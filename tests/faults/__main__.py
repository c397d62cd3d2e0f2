"""``python -m tests.faults NAME``: the options of every fault battery; what is injected lies with each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.options import run_app
from tests.faults.reports import progress

if TYPE_CHECKING:
    from tests.faults.load import Questions
    from tests.faults.stage import Stage, StageOptions

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
Path = Annotated[str, typer.Option(help="How KV travels: auto, direct or packed.")]
Seed = Annotated[int, typer.Option(help="Seed of what is random.")]
Side = Annotated[str, typer.Option(help="prefill or decode; left out, both.")]


def _show(reports: list[Any], stage: Stage | None = None) -> None:
    from dataclasses import asdict

    for report in reports:
        typer.echo(json.dumps(asdict(report)))
    if any(report.problems for report in reports):
        if stage is not None:
            progress(stage.tails())
        raise typer.Exit(1)


def _run(
    options: StageOptions,
    lengths: list[int],
    run: Callable[[Stage, Questions], list[Any]],
    *,
    max_tokens: int,
    deadline_s: float,
    seed: int,
) -> None:
    from tests.faults.load import Questions
    from tests.faults.stage import Stage

    with Stage(options) as stage:
        questions = Questions(stage, lengths, max_tokens=max_tokens, deadline_s=deadline_s, seed=seed)
        _show(run(stage, questions), stage)


def _sides(side: str) -> list[Any]:
    from kvconnect.errors import ConfigError

    if side not in ("", "prefill", "decode"):
        raise ConfigError(f"side is {side!r}; accepted: prefill, decode")
    return [side] if side else ["prefill", "decode"]


@app.command()
def kills(
    engine: Engine = "mooncake",
    policy: Policy = "recompute",
    side: Side = "",
    count: Annotated[int, typer.Option(min=1, help="SIGKILLs of each side.")] = 100,
    seed: Seed = 0,
) -> None:
    """SIGKILL in the middle of transfers; what is killed is started again, the other side is not."""
    from tests.faults.kills import CLIENT_DEADLINE_S, kill_stage, run_kills

    def run(stage: Stage, questions: Questions) -> list[Any]:
        stage.add_router()
        stage.add_router("parallel")
        return [run_kills(stage, questions, one, count, seed=seed) for one in _sides(side)]

    lengths = [1024, 777, 1024, 1000, 300, 40]
    _run(kill_stage(engine, policy), lengths, run, max_tokens=8, deadline_s=CLIENT_DEADLINE_S, seed=seed)


@app.command()
def stops(
    engine: Engine = "mooncake",
    policy: Policy = "fail",
    path: Path = "auto",
    side: Side = "",
    count: Annotated[int, typer.Option(min=1, help="Stops of each side.")] = 10,
    stop_s: Annotated[float, typer.Option(help="Seconds that each lasts.")] = 9.0,
    seed: Seed = 0,
) -> None:
    """SIGSTOP in the middle of transfers for longer than every deadline, then SIGCONT."""
    from tests.faults.stops import run_stops, stop_stage

    def run(stage: Stage, questions: Questions) -> list[Any]:
        return [run_stops(stage, questions, one, count, stop_s=stop_s, seed=seed) for one in _sides(side)]

    lengths = [1024, 777, 1024, 1000]
    options = stop_stage(engine, policy, path)
    _run(options, lengths, run, max_tokens=48, deadline_s=25.0 + stop_s, seed=seed)


@app.command()
def neighbours(
    engine: Engine = "mooncake",
    side: Side = "",
    windows: Annotated[int, typer.Option(min=1, help="Windows with a fault, and as many without.")] = 4,
    window_s: Annotated[float, typer.Option(help="Seconds of each.")] = 8.0,
    seed: Seed = 0,
) -> None:
    """Stop one of two nodes of a role, and time requests that only need the other."""
    from tests.faults.neighbours import neighbour_stage, run_stopped_neighbour

    for one in _sides(side):
        _run(
            neighbour_stage(engine, one),
            [1024, 777, 300, 64],
            lambda stage, questions, one=one: [  # type: ignore[misc]
                run_stopped_neighbour(stage, questions, one, windows=windows, window_s=window_s)
            ],
            max_tokens=4,
            deadline_s=40.0,
            seed=seed,
        )


@app.command()
def links(engine: Engine = "mooncake", policy: Policy = "fail", seed: Seed = 0) -> None:
    """Cut the wire between two network namespaces, shortly and for long (needs root)."""
    from tests.faults.links import CUTS, Wire, link_deadline_s, link_stage, run_cut

    def run(stage: Stage, questions: Questions) -> list[Any]:
        reports = []
        for how, lasts_s, mid_transfer in CUTS:
            reports.append(run_cut(stage, questions, wire, how, lasts_s, mid_transfer=mid_transfer))
            progress(f"{reports[-1].fault}: {len(reports[-1].problems)} problems")
        return reports

    with Wire() as wire:
        options = link_stage(wire, engine, policy)
        _run(options, [1024, 777, 1024, 300], run, max_tokens=8, deadline_s=link_deadline_s(), seed=seed)


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
    from tests.faults.hostile import BATTERIES, run_batteries

    reports = run_batteries(
        engine,
        frames_per_s=rate,
        total=total,
        windows=windows,
        idle=idle,
        only=battery or BATTERIES,
        seed=seed,
    )
    for report in reports:
        typer.echo(json.dumps(report))
    if any(report["problems"] for report in reports):
        raise typer.Exit(1)


@app.command()
def liars(
    engine: Engine = "mooncake",
    requests: Annotated[int, typer.Option(min=1, help="Fetches by way of a liar.")] = 500,
    seed: Seed = 0,
) -> None:
    """A prefill node whose every second answer is mutated on its way; the decode node must outlive that."""
    from tests.faults.liars import liar_stage, run_liars

    def run(stage: Stage, questions: Questions) -> list[Any]:
        stage.add_router()
        return [run_liars(stage, questions, requests, seed=seed)]

    _run(liar_stage(engine), [100, 17, 200], run, max_tokens=4, deadline_s=30.0, seed=seed)


@app.command()
def soak(
    engine: Engine = "mooncake",
    policy: Policy = "recompute",
    minutes: Annotated[float, typer.Option(help="How long.")] = 20.0,
    seed: Seed = 0,
) -> None:
    """Load with random kills, stops and clients that leave; memory and what is left are watched."""
    from tests.faults.soak import run_soak, soak_stage

    def run(stage: Stage, questions: Questions) -> list[Any]:
        stage.add_router()
        stage.add_router("parallel")
        return [run_soak(stage, questions, minutes * 60.0, seed=seed)]

    lengths = [1024, 777, 600, 300, 40, 17]
    _run(soak_stage(engine, policy), lengths, run, max_tokens=8, deadline_s=60.0, seed=seed)


@app.command()
def disk(
    count: Annotated[int, typer.Option(min=0, help="SIGKILLs of a process that writes.")] = 100,
    records: Annotated[int, typer.Option(min=0, help="Records that are damaged in every way.")] = 10_000,
    path: Annotated[
        str, typer.Option(help="A folder on the disk that is meant; left out, one for temporary files.")
    ] = "",
    seed: Seed = 0,
) -> None:
    """SIGKILL of a process that writes to the disk tier, and damage to its files: nothing wrong is served."""
    import logging
    import tempfile
    from pathlib import Path

    from kvconnect.errors import ConfigError
    from tests.faults.damage import run_damage
    from tests.faults.disk import run_disk_kills

    if path and not Path(path).is_dir():
        raise ConfigError(f"--path is {path!r}; accepted: a folder that is there")
    # What a tier says of every piece of damage is what was asked for here.
    logging.getLogger("kvconnect").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="kvconnect-faults-", dir=path or None) as folder:
        # Kills first: they fork, and damage leaves threads behind for a moment.
        reports: list[Any] = [run_disk_kills(Path(folder, "kills"), count, seed=seed)]
        if records:
            reports += run_damage(Path(folder, "damage"), records, seed=seed)
    _show(reports)


if __name__ == "__main__":
    run_app(app)

"""``kvconnect cache``: lists, checks and removes the records of the disk tier."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvconnect.cli.options import JsonObject
from kvconnect.errors import ConfigError, listed
from kvconnect.tools.showing import duration, size

cache_app = typer.Typer(
    name="cache",
    help="Look at what nodes keep on disk. Every rank of every model, and of every way to lay out its cache, "
    "has a folder of its own below the node's disk_path.",
    no_args_is_help=True,
)

CachePath = Annotated[Path, typer.Option("--path", metavar="DIR", help="The disk_path of the nodes.")]
Names = Annotated[
    list[str] | None,
    typer.Option("--name", help="The beginning of a folder's name, as `ls` shows it (repeatable)."),
]


@cache_app.command("ls")
def list_command(path: CachePath, json_output: JsonObject = False) -> None:
    """Show what is kept: model, rank, records, bytes, age, and the process that uses it."""
    from kvconnect.offload.disk.folder import cache_folders, look

    found = [look(folder) for folder in cache_folders(path)]
    if json_output:
        typer.echo(json.dumps({"path": str(path), "folders": found}))
        return
    if not found:
        typer.echo(f"{path}: nothing is kept here")
        return
    typer.echo(f"{'RECORDS':>9} {'SIZE':>9} {'AGE':>13}  {'USED BY':>8} {'RANK':>4}  NAME  MODEL")
    now_s = time.time()
    for one in found:
        age = f"{duration(now_s - one['newest_s'])}..{duration(now_s - one['oldest_s'])}"
        typer.echo(
            f"{one['records']:>9} {size(one['length_bytes']):>9} {age if one['records'] else '-':>13}  "
            f"{one['holder'] or '-':>8} {one['rank']:>4}  {one['name']}  {_called(one)}"
        )


@cache_app.command()
def verify(path: CachePath, name: Names = None) -> None:
    """Read and check every record; report what is wrong. Exit 1 if anything is."""
    from kvconnect.offload.disk.folder import verify as verify_folder

    all_problems = 0
    for folder in _chosen(path, name):
        records = length_bytes = problems = 0
        for file, file_bytes, text in verify_folder(folder):
            if text:
                problems += 1
                typer.echo(f"{folder / file}: {text}")
            else:
                records += 1
                length_bytes += file_bytes
        all_problems += problems
        typer.echo(f"{folder.name}: {records} records are right, {size(length_bytes)}; {problems} problems")
    if all_problems:
        raise typer.Exit(1)


@cache_app.command()
def clear(
    path: CachePath,
    name: Names = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all folders.")] = False,
) -> None:
    """Remove folders. Refused while a process uses one of them: nothing is removed then."""
    from kvconnect.offload.disk.folder import remove

    if bool(name) == everything:
        raise ConfigError("cache clear wants either --name or --all")
    chosen = _chosen(path, name)
    remove(chosen)
    for folder in chosen:
        typer.echo(f"{folder.name}: removed")
    if not chosen:
        typer.echo(f"{path}: nothing is kept here")


def _chosen(path: Path, names: list[str] | None) -> list[Path]:
    """The folders whose names begin with one of these; all without names."""
    from kvconnect.offload.disk.folder import cache_folders

    folders = cache_folders(path)
    for name in names or ():
        if not any(folder.name.startswith(name) for folder in folders):
            raise ConfigError(
                f"--name is {name!r}; in {path} there are {listed(folder.name for folder in folders)}"
            )
    return [folder for folder in folders if not names or folder.name.startswith(tuple(names))]


def _called(one: dict[str, Any]) -> str:
    """The node's label for its model, and the model class in its identity."""
    label, model = one["label"], one["model"]
    return f"{label} ({model})" if label and model and label != model else label or model or "-"

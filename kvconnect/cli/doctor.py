"""``kvconnect doctor``: options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvconnect.cli.options import JsonObject


def doctor(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PREFILL.json]",
            help="Compare two caches, in place of this machine: the prefill node's, by its model's folder or "
            "config.json, or a file as in deploy/examples.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[DECODE.json]", help="The decode node's cache; left out, the same."),
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help="The node's configuration, as it is started with."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="A node that serves: http://HOST:PORT of its server, or HOST:PORT of its side channel "
            "(repeatable)."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Measure the link to each peer too, for a second or two.")
    ] = False,
    tp: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tensor-parallel size of a cache; a second one is the decode node's."),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a block (16 of a model); a second one is the decode node's."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Tokens of the request that caches are compared by.")
    ] = 8192,
    json_output: JsonObject = False,
) -> None:
    """Report what will work here, what will not, and what to do about it; exit 1 on a failure.

    Of this machine, its configuration and peers that serve; or, with files of two caches, what their nodes
    would exchange for a request, rank by rank, and every reason for which they would not. Neither need run.
    """
    from kvconnect.tools import doctor_runner

    if source is None:
        found = doctor_runner.examine(kv_transfer_config, peers=peer or (), tokens=tokens, measured=measure)
    else:
        given = {"tp_size": tp or [], "block_size": block_size or []}
        sizes = [{key: values[at] for key, values in given.items() if values} for at in (0, -1)]
        sides = (source, sizes[0]), (target or source, sizes[1])
        found = list(doctor_runner.compare(*sides, tokens, kv_transfer_config))
    raise typer.Exit(doctor_runner.show(found, json_output=json_output))

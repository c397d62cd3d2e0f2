"""``kvconnect explain``: options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvconnect.cli.options import JsonObject


def explain(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PREFILL.json",
            help="The prefill node's cache: a model's config.json, or a file as in deploy/examples.",
        ),
    ],
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[DECODE.json]", help="The decode node's cache; left out, the same."),
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tensor-parallel size; a second one is the decode node's."),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a block (16 of a model); a second one is the decode node's."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the request.")] = 8192,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help="The configuration of both nodes, in place of the files'."),
    ] = None,
    json_output: JsonObject = False,
) -> None:
    """Report what two nodes would exchange, by which path and how fast, or why not; neither need run."""
    from kvconnect.explain.explain_runner import run_explain
    from kvconnect.vllm.configuration import read_configuration

    extra = read_configuration(kv_transfer_config).extra if kv_transfer_config else None
    given = {"tp_size": tp or [], "block_size": block_size or []}
    sizes = [{key: values[at] for key, values in given.items() if values} for at in (0, -1)]
    sides = (source, sizes[0]), (target or source, sizes[1])
    raise typer.Exit(run_explain(*sides, tokens=tokens, extra=extra, json_output=json_output))

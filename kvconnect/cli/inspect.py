"""``kvconnect inspect``: options and help texts."""

from __future__ import annotations

from typing import Annotated

import typer

from kvconnect.cli.options import Insecure, JsonObject, Key, keys_at


def inspect(
    address: Annotated[
        str,
        typer.Argument(metavar="HOST:PORT", help="Side channel of a worker: rank r listens on port + r."),
    ],
    request: Annotated[
        str,
        typer.Option("--request", metavar="ID", help="Only what belongs to a request, by a part of its id."),
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Anew each second, until Ctrl-C.")] = False,
    json_output: JsonObject = False,
    key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Show what a running worker, a node's or vLLM's, holds and does right now, and what came of its loads.

    Its role and versions, leases, loads, slots, peers and breakers, tiers, and its last records. Of leases
    and loads the oldest; --json has all. Handles are shown as digests, which `kvconnect trace` has too.
    """
    from kvconnect.inspect.inspect_runner import run_inspect

    raise typer.Exit(
        run_inspect(address, keys_at(key, insecure), request=request, watch=watch, json_output=json_output)
    )

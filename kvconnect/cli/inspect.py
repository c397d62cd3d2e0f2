"""``kvconnect inspect``: options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvconnect.cli.options import Insecure, JsonObject, Key, keys_at


def inspect(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS...",
            help="http://HOST:PORT of a server, for all of its workers, or HOST:PORT of a side channel.",
        ),
    ],
    request: Annotated[
        str,
        typer.Option("--request", metavar="ID", help="Only what belongs to a request, by a part of its id."),
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Anew each second, until Ctrl-C.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what happened lately to requests, P's and D's, as a trace."),
    ] = None,
    last: Annotated[
        int, typer.Option(min=1, help="So many requests of the trace, those that ended last.")
    ] = 100,
    json_output: JsonObject = False,
    key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Show what running workers, a node's or vLLM's, hold and do right now, and what came of their loads.

    Their role and versions, leases, loads, slots, peers and breakers, tiers, and their last records. Of
    leases and loads the oldest; --json has all, one object a worker. Handles are shown as digests.

    --trace asks P and D, all ranks of them, for their timelines instead. The file is in Chrome's trace
    format, and the slowest loads are printed: how long each took, in milliseconds, and where: to meet P and
    ask it, until P could begin, until all was packed, written, notified, unpacked and reported; and for how
    long of that a transfer thread did not get the interpreter. Exit 1 if there is no request.
    """
    from kvconnect.tools.inspect_runner import run_inspect, run_trace

    extra = keys_at(key, insecure)
    if trace is not None:
        raise typer.Exit(run_trace(addresses, extra, last=last, out=trace))
    raise typer.Exit(run_inspect(addresses, extra, request=request, watch=watch, json_output=json_output))

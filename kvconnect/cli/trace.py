"""``kvconnect trace``: options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvconnect.cli.options import Insecure, Key, keys_at


def trace(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT...",
            help="Side channels of the nodes: of one rank each, P's and D's.",
        ),
    ],
    last: Annotated[int, typer.Option(min=1, help="So many requests, those that ended last.")] = 100,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the trace.")] = Path(
        "kvconnect-trace.json"
    ),
    key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Write what happened lately to requests on running workers, and print the slowest loads.

    The file is in Chrome's trace format. Of each load the table has how long it took, in milliseconds, and
    where: to meet P and ask it, until P could begin, until all was packed, written, notified, unpacked and
    reported; and for how long of that a transfer thread did not get the interpreter. Exit 1 if there is none.
    """
    from kvconnect.trace.trace_runner import run_trace

    raise typer.Exit(run_trace(addresses, last=last, out=out, extra=keys_at(key, insecure)))

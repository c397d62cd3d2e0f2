"""``kvconnect trace``: options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A key file or a node's folder; left out, what a node here would use."
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="The workers run without keys.")] = False,
) -> None:
    """Write what happened lately to requests on running workers, and print the slowest loads.

    The file is in Chrome's trace format. Of each load the table has how long it took, in milliseconds, and
    where: to meet P and ask it, until P could begin, until all was packed, written, notified, unpacked and
    reported; and for how long of that a transfer thread did not get the interpreter. Exit 1 if there is none.
    """
    from kvconnect.config import ExtraConfig
    from kvconnect.trace.runner import run_trace

    extra = ExtraConfig(insecure=insecure)
    if key is not None:
        extra = ExtraConfig(keys_dir=str(key)) if key.is_dir() else ExtraConfig(key_file=str(key))
    raise typer.Exit(run_trace(addresses, last=last, out=out, extra=extra))

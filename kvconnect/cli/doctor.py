"""``kvconnect doctor``: options and help texts."""

from __future__ import annotations

from typing import Annotated

import typer

from kvconnect.cli.options import JsonObject


def doctor(
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help="The node's configuration, as it is started with."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT of the side channel of a node that serves (repeatable)."),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Measure the link to each peer too, for some three seconds.")
    ] = False,
    json_output: JsonObject = False,
) -> None:
    """Report what will work here, what will not, and what to do about it; exit 1 on a failure."""
    from kvconnect.doctor.doctor_runner import run_doctor

    raise typer.Exit(run_doctor(kv_transfer_config, peer or (), measured=measure, json_output=json_output))

"""Run a command-line app outside the package: an error of kvconnect is one line and exit code 2."""

from __future__ import annotations

import sys

import typer

from kvconnect.errors import KVConnectError


def run_app(app: typer.Typer) -> None:
    """Run the command that the process was given."""
    try:
        app()
    except KVConnectError as error:
        typer.echo(f"{error}", err=True)
        sys.exit(2)

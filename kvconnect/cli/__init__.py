"""The command line: options, help texts and exit codes, and nothing else.

Heavy modules (torch, the HTTP servers) are imported inside the command that needs them, so that ``--help``
and ``--version`` answer at once. Exit codes: 0 success; 1 the command ran and found a problem; 2 the command
or the configuration cannot be used, with the reason as one line on stderr.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvconnect import __version__
from kvconnect.cli.cache import cache_app
from kvconnect.cli.keys import keys_app
from kvconnect.cli.nodes import demo, router, serve
from kvconnect.cli.tools import check, doctor, inspect, up
from kvconnect.errors import KVConnectError

app = typer.Typer(
    name="kvconnect",
    help="Moves the KV cache of a request between serving nodes, over Mooncake or NIXL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings={"allow_extra_args": True})(up)
for command in (serve, router, demo, check, doctor, inspect):
    app.command()(command)
app.add_typer(cache_app, name="cache")
app.add_typer(keys_app, name="keys")


_INSTALL = {
    "aiohttp": "pip install 'kvconnect[node]'",
    "torch": "pip install torch, the build for this machine",
}
"""By package, how it is installed."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvconnect {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of ``kvconnect``: run a command; a ``KVConnectError`` is one line and exit code 2.

    So is a package that only some commands need, or that an installation without dependencies lacks.
    """
    try:
        app()
    except KVConnectError as error:
        problem = str(error)
    except ModuleNotFoundError as error:
        if error.name not in _INSTALL:
            raise
        problem = f"this command needs {error.name}, which is not installed: {_INSTALL[error.name]}"
    else:
        return
    typer.echo(f"kvconnect: {problem}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()

"""``kvconnect router``: the address; the other options and their texts are in ``router_options``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvconnect.cli.options import with_options_of
from kvconnect.router.router_options import RouterLimits, RouterOptions


@with_options_of(RouterOptions, RouterLimits)
def router(
    options: RouterOptions,
    limits: RouterLimits,
    host: Annotated[str, typer.Option(help="Address to serve HTTP on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve HTTP on; 0 takes a free one.")] = 8080,
) -> None:
    """Route requests through pairs of prefill and decode nodes, or to plain servers."""
    from kvconnect.router.app import create_router_app, run_router

    run_router(create_router_app(options, limits), host=host, port=port)

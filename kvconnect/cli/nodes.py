"""``kvconnect serve``, ``router`` and ``demo``: addresses and output.

Other options and their texts are in ``NodeOptions``, ``router_options`` and ``DemoOptions``.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from kvconnect.cli.options import with_options_of
from kvconnect.errors import ConfigError
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.pair_demo import DemoOptions, run_demo
from kvconnect.router.router_options import RouterLimits, RouterOptions


@with_options_of(NodeOptions)
def serve(
    options: NodeOptions,
    host: Annotated[str, typer.Option(help="Address to serve HTTP on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve HTTP on; 0 takes a free one.")] = 8000,
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads for torch; left out, its own choice.")
    ] = None,
) -> None:
    """Serve a small model over HTTP, alone or as one side of a pair."""
    from kvconnect.node.serving import serve as serve_node

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        serve_node(options, host=host, port=port, num_threads=num_threads)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot serve on {host}:{port}: {error}") from error


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


@with_options_of(DemoOptions)
def demo(
    options: DemoOptions,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Prove it here: prefill node, decode node and router as processes, compared with a single node."""
    raise typer.Exit(run_demo(options, json_output=json_output))

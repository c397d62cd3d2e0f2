"""``kvconnect demo``: the output format; the other options and their texts are in ``DemoOptions``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvconnect.cli.options import with_options_of
from kvconnect.node.pair_demo import DemoOptions, run_demo


@with_options_of(DemoOptions)
def demo(
    options: DemoOptions,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Prove it here: prefill node, decode node and router as processes, compared with a single node."""
    raise typer.Exit(run_demo(options, json_output=json_output))

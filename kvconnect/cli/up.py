"""``kvconnect up``: options and help texts."""

from __future__ import annotations

from typing import Annotated

import typer


def up(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the hub.")],
    port: Annotated[
        int,
        typer.Option(min=1, max=65335, help="The router's port; P has the one 100 above, D that 200 above."),
    ] = 8000,
) -> None:
    """Run a model here as prefill server, decode server and router of vLLM, and show where its KV came from.

    On two GPUs, on one that both servers share, or on a CPU with vLLM's CPU build. The commands are printed,
    to be copied. Further options are passed to both vLLM servers, after `--`: `kvconnect up MODEL --
    --max-model-len 8192`. Ctrl-C ends all three processes.
    """
    from kvconnect.tools.up_runner import run_up

    raise typer.Exit(run_up(model, port, context.args))

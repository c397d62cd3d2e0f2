"""``kvconnect demo``: options and help texts."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Engine to run (several times for several); default: every one that works here."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model to run (several times for several); default: all."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts per engine and model.")] = 8,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(help="Exit 1 if this engine cannot run here; may be given several times."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the nodes compute: cpu, cuda, cuda:N.")] = "cpu",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="What the nodes' caches keep: auto, bf16 or fp8_e4m3.")
    ] = "auto",
    path: Annotated[str, typer.Option(help="How KV travels: auto, direct or packed.")] = "packed",
) -> None:
    """Prove it here: prefill node, decode node and router as processes, compared with a single node."""
    from kvconnect.demo.runner import DemoOptions, run_demo

    options = DemoOptions(
        engines=engine or (),
        models=model or (),
        requests=requests,
        require=require or (),
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        path=path,
    )
    raise typer.Exit(run_demo(options, json_output=json_output))

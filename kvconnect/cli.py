"""The command line: options, help texts and exit codes, and nothing else.

Everything heavy (torch, the HTTP servers) is imported inside the command that needs it, so that
``--help`` and ``--version`` answer at once. Exit codes: 0 done, 1 the work was done and found wanting,
2 the command or the configuration cannot be used; the reason is one line on stderr.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvconnect import __version__
from kvconnect.cli_bench import bench_app
from kvconnect.cli_cache import cache_app
from kvconnect.cli_faults import faults_app
from kvconnect.cli_keys import keys_app
from kvconnect.cli_options import JsonObject
from kvconnect.cli_sim import sim
from kvconnect.errors import ConfigError, KVConnectError

app = typer.Typer(
    name="kvconnect",
    help="Moves the KV cache of a request between serving nodes, over Mooncake or NIXL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")
app.add_typer(faults_app, name="faults")
app.add_typer(keys_app, name="keys")
app.command()(sim)


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


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="gqa, mla, mixed, sliding or hybrid.")] = "gqa",
    host: Annotated[str, typer.Option(help="Address to serve HTTP on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve HTTP on; 0 takes a free one.")] = 8000,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="What makes this node transfer KV caches, or keep them in host memory and on disk: a JSON "
            "object, spelled as vLLM does. Left out, the node serves alone and keeps nothing.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda:N.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the model's weights; a pair needs the same one.")] = 0,
    num_blocks: Annotated[
        int, typer.Option(help="Logical blocks of KV cache, the null block included.")
    ] = 512,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per logical block; left out, the model's own.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence, in tokens.")] = 4096,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 1024,
    reserved_blocks: Annotated[
        int, typer.Option(help="Blocks never used, so that two nodes use different block ids (for tests).")
    ] = 0,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Take the beginning of a prompt from blocks that hold it already.")
    ] = True,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="What the cache keeps: auto (the model's own), bf16 or fp8_e4m3.")
    ] = "auto",
    kernel_block_size: Annotated[
        list[int] | None,
        typer.Option(help="Tokens per attention kernel block (several times for several); left out, any."),
    ] = None,
    enable_graphs: Annotated[
        bool | None, typer.Option(help="Replay decode steps as CUDA graphs; left out, where possible.")
    ] = None,
    attention_backend: Annotated[str, typer.Option(help="sdpa, or flex for flex_attention.")] = "sdpa",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads for torch; left out, its own choice.")
    ] = None,
) -> None:
    """Serve a small model over HTTP, alone or as one side of a pair."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device is {device!r}; accepted: cpu, cuda, cuda:N")
    from kvconnect.node.serve import serve as serve_node

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        serve_node(
            model=model,
            host=host,
            port=port,
            kv_transfer_config=kv_transfer_config,
            device=device,
            seed=seed,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            reserved_blocks=reserved_blocks,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_dtype=kv_cache_dtype,
            kernel_block_sizes=kernel_block_size or (),
            enable_graphs=enable_graphs,
            attention_backend=attention_backend,
            num_threads=num_threads,
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot serve on {host}:{port}: {error}") from error


@app.command()
def router(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill node; may be given several times.")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode node; may be given several times.")],
    host: Annotated[str, typer.Option(help="Address to serve HTTP on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve HTTP on; 0 takes a free one.")] = 8080,
    flow: Annotated[
        str,
        typer.Option(help="sequential asks the prefill node first, parallel asks both nodes at once."),
    ] = "sequential",
    decode_fallback: Annotated[
        bool,
        typer.Option(
            help="Have the decode node compute the prompt where no prefill node is left, or a prefill leg "
            "fails (no connection, 5xx, 408, 429, timeout, broken answer); otherwise that is the answer."
        ),
    ] = True,
    connect_timeout_s: Annotated[float, typer.Option(help="Seconds to reach a node.")] = 3.0,
    prefill_timeout_s: Annotated[float, typer.Option(help="Seconds for a whole prefill leg.")] = 120.0,
    decode_timeout_s: Annotated[
        float, typer.Option(help="Seconds to a decode node's first byte, and between its bytes.")
    ] = 120.0,
    retries: Annotated[int, typer.Option(help="Further nodes tried when one cannot be reached.")] = 2,
    max_in_flight: Annotated[int, typer.Option(help="Requests served at once; more get 503.")] = 1024,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 16 << 20,
    drain_timeout_s: Annotated[float, typer.Option(help="Seconds for requests to end after SIGTERM.")] = 30.0,
) -> None:
    """Route requests through pairs of prefill and decode nodes."""
    from kvconnect.router.app import run_router
    from kvconnect.router.limits import RouterLimits

    limits = RouterLimits(
        connect_timeout_s=connect_timeout_s,
        prefill_timeout_s=prefill_timeout_s,
        decode_timeout_s=decode_timeout_s,
        retries=retries,
        max_in_flight=max_in_flight,
        max_body_bytes=max_body_bytes,
        drain_timeout_s=drain_timeout_s,
    )
    run_router(
        host=host,
        port=port,
        prefill=prefill,
        decode=decode,
        limits=limits,
        flow=flow,
        decode_fallback=decode_fallback,
    )


@app.command()
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
    flow: Annotated[str, typer.Option(help="The router's flow: sequential or parallel.")] = "sequential",
    path: Annotated[str, typer.Option(help="How KV travels: auto, direct or packed.")] = "packed",
    decode_block_size: Annotated[
        int, typer.Option(min=0, help="Tokens of the decode node's blocks; 0 for the model's own.")
    ] = 0,
    offload: Annotated[
        bool,
        typer.Option(
            help="Show one node instead, whose blocks come back from host memory, and from disk after a "
            "restart."
        ),
    ] = False,
) -> None:
    """Prove it here: prefill node, decode node and router as processes, compared with a single node."""
    from kvconnect.demo.runner import run_demo

    if offload:
        from kvconnect.demo.offload import run_offload

        options = ("--device", device, "--kv-cache-dtype", kv_cache_dtype)
        raise typer.Exit(run_offload(models=model or [], json_output=json_output, node_options=options))
    code = run_demo(
        engines=engine or [],
        models=model or [],
        requests=requests,
        json_output=json_output,
        require=require or [],
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        flow=flow,
        path=path,
        decode_block_size=decode_block_size,
    )
    raise typer.Exit(code)


@app.command()
def explain(
    source: Annotated[
        Path, typer.Argument(metavar="PREFILL.json", help="The prefill node's cache: see deploy/examples.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DECODE.json", help="The decode node's cache.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the request.")] = 8192,
    rates: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON",
            help="What was measured of the link: seconds_per_batch, seconds_per_copy and bytes_per_s of the "
            "engine, and pack_bytes_per_s, unpack_bytes_per_s and round_trip_s if known.",
        ),
    ] = None,
    json_output: JsonObject = False,
) -> None:
    """Say what two nodes would exchange, by which path and how fast, or why not; neither need run."""
    from kvconnect.explain.runner import run_explain

    raise typer.Exit(run_explain(source, target, tokens=tokens, rates=rates, json_output=json_output))


def main() -> None:
    """Entry point of ``kvconnect``: run a command; an error of ours is one line and exit code 2."""
    try:
        app()
    except KVConnectError as error:
        typer.echo(f"kvconnect: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

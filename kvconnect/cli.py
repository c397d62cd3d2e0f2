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
from kvconnect.errors import ConfigError, KVConnectError

app = typer.Typer(
    name="kvconnect",
    help="Moves the KV cache of a request between serving nodes, over Mooncake or NIXL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure parts of kvconnect on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


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
            help="What makes this node transfer KV caches: a JSON object, spelled as vLLM does. "
            "Left out, the node serves alone.",
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
    run_router(host=host, port=port, prefill=prefill, decode=decode, limits=limits, flow=flow)


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
    path: Annotated[str, typer.Option(help="How KV travels: auto, direct or packed.")] = "auto",
    decode_block_size: Annotated[
        int, typer.Option(min=0, help="Tokens of the decode node's blocks; 0 for the model's own.")
    ] = 0,
) -> None:
    """Prove it here: prefill node, decode node and router as processes, compared with a single node."""
    from kvconnect.demo.runner import run_demo

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
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what two nodes would exchange, by which path and how fast, or why not; neither need run."""
    from kvconnect.explain.runner import run_explain

    raise typer.Exit(run_explain(source, target, tokens=tokens, rates=rates, json_output=json_output))


@bench_app.command("plan")
def bench_plan_command(
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Time the planning of large transfers, on one core and without a network."""
    from kvconnect.bench import bench_plan

    bench_plan(json_output)


@bench_app.command("zero")
def bench_zero_command(
    page_bytes: Annotated[int, typer.Option(min=64, help="Bytes of a page.")] = 16 << 10,
    regions: Annotated[int, typer.Option(min=1, help="Layers, each in its own allocation.")] = 64,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks to zero.")] = 256,
) -> None:
    """Time the zeroing of fresh blocks beside a memset of as many bytes, on the GPU if there is one."""
    from kvconnect.bench_kit import bench_zero

    bench_zero(page_bytes=page_bytes, regions=regions, blocks=blocks)


@bench_app.command("tables")
def bench_tables_command(
    requests: Annotated[int, typer.Option(min=1, help="Requests that grow in the step.")] = 256,
    groups: Annotated[int, typer.Option(min=1, help="Cache groups.")] = 4,
) -> None:
    """Time the update of block tables, on the GPU if there is one."""
    from kvconnect.bench_kit import bench_tables

    bench_tables(requests=requests, groups=groups)


@bench_app.command("scheduler")
def bench_scheduler_command(
    requests: Annotated[int, typer.Option(min=1, help="Requests that run.")] = 256,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Time what the scheduler half's hooks add to a step, on one core and without a network."""
    from kvconnect.bench_scheduler import bench_scheduler

    bench_scheduler(requests=requests, json_output=json_output)


@bench_app.command("pack")
def bench_pack_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; left out, the GPU if there is one.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Time the packing of pages into slots and back, beside a plain copy of as many bytes."""
    from kvconnect.bench_pack import bench_pack

    bench_pack(device=device, json_output=json_output)


@bench_app.command("transfer")
def bench_transfer_command(
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Engine to measure (several times for several); default: one that works here."),
    ] = None,
    path: Annotated[
        list[str] | None,
        typer.Option(help="direct, packed or auto (several times for several); default: direct and packed."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: one GPU for each side if there are two, else one for both.")
    ] = "cpu",
    page_bytes: Annotated[
        list[int] | None,
        typer.Option(help="Bytes of a page of the prefill side; default: 4096 and 16384."),
    ] = None,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Blocks of a request; default: 256 and 1024, on a CPU 16 and 64."),
    ] = None,
    regions: Annotated[int, typer.Option(min=1, help="Layers, each in its own allocation.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests per measurement.")] = 16,
    in_flight: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at a time; default: 1, whose time is a latency, and 8."),
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(help="PREFILL:DECODE, nhd or hnd with tokens per block; default: nhd16:nhd16."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Measurements per case.")] = 5,
    budget_s: Annotated[float, typer.Option(help="Seconds after which a case is not repeated.")] = 10.0,
    timeout_s: Annotated[float, typer.Option(help="Seconds that one step of a child may take.")] = 120.0,
    batch_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes of the engine's own contiguous copies; 0 suits the device.")
    ] = 0,
    extra: Annotated[
        str, typer.Option(metavar="JSON", help="Further settings of kv_connector_extra_config.")
    ] = "{}",
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set in the children only; NAME alone takes it away. On GPUs "
            "MC_INTRANODE_NVLINK=true is set, unless it is said otherwise.",
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Time the KV of requests between two workers, beside what the engine alone can do."""
    from kvconnect.bench_transfer.cases import Layouts
    from kvconnect.bench_transfer.options import Options, parse_environment, parse_extra
    from kvconnect.bench_transfer.runner import bench_transfer

    options = Options(
        engines=tuple(engine or ("auto",)),
        paths=tuple(path or ("direct", "packed")),
        device=device,
        page_bytes=tuple(page_bytes or (4096, 16384)),
        blocks=tuple(blocks or ()),
        regions=regions,
        requests=requests,
        in_flight=tuple(in_flight or (1, 8)),
        layouts=tuple(Layouts.parse(text) for text in layouts or ("nhd16:nhd16",)),
        repeat=repeat,
        budget_s=budget_s,
        timeout_s=timeout_s,
        batch_bytes=batch_bytes,
        extra=parse_extra(extra),
        environment=parse_environment(env or ()),
    )
    raise typer.Exit(bench_transfer(options, json_output=json_output))


@bench_app.command("node")
def bench_node_command(
    side: Annotated[
        str, typer.Option(help="Who computes: decode, which receives, or prefill, which sends.")
    ] = "decode",
    engine: Annotated[str, typer.Option(help="Engine of both workers.")] = "auto",
    path: Annotated[str, typer.Option(help="direct, packed or auto.")] = "packed",
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: one GPU for each side if there are two, else one for both.")
    ] = "cpu",
    model: Annotated[
        str, typer.Option(help="8b or tiny, with random weights; default: 8b, on a CPU tiny.")
    ] = "",
    batch: Annotated[int, typer.Option(help="Requests that decode; default: 32, on a CPU 4.")] = 0,
    context: Annotated[
        int, typer.Option(help="Tokens of each, or of a prompt; default: 4096, prompts 2048, on a CPU 64.")
    ] = 0,
    request_mb: Annotated[
        float, typer.Option(help="MiB of KV of a received request; default: 256, on a CPU 0.25.")
    ] = 0.0,
    receive_gb_per_s: Annotated[
        float, typer.Option(help="GB/s at which requests are ordered; default: 25, on a CPU 0.01.")
    ] = 0.0,
    in_flight: Annotated[int, typer.Option(help="Most requests under way at a time.")] = 8,
    layouts: Annotated[
        str, typer.Option(help="PREFILL:DECODE, nhd or hnd with tokens per block.")
    ] = "nhd16:nhd16",
    programs: Annotated[
        list[int] | None,
        typer.Option(help="pack_programs to measure (several times for several), 0 for no bound."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often without and with alternate.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds of each.")] = 2.0,
    timeout_s: Annotated[float, typer.Option(help="Seconds that one step of a child may take.")] = 120.0,
    extra: Annotated[
        str, typer.Option(metavar="JSON", help="Further settings of kv_connector_extra_config.")
    ] = "{}",
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Set in the children only; NAME alone takes it away (repeatable)."
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Time a node's decode steps while it receives KV without pause, beside those while it does not."""
    from kvconnect.bench_node.options import Options
    from kvconnect.bench_node.runner import bench_node
    from kvconnect.bench_transfer.cases import Layouts
    from kvconnect.bench_transfer.options import parse_environment, parse_extra

    options = Options(
        side=side,
        engine=engine,
        path=path,
        device=device,
        model=model,
        batch=batch,
        context=context,
        request_mb=request_mb,
        gb_per_s=receive_gb_per_s,
        in_flight=in_flight,
        layouts=Layouts.parse(layouts),
        programs=tuple(programs or ()),
        rounds=rounds,
        seconds=seconds,
        timeout_s=timeout_s,
        extra=parse_extra(extra),
        environment=parse_environment(env or ()),
    )
    raise typer.Exit(bench_node(options, json_output=json_output))


@bench_app.command("streaming")
def bench_streaming_command(
    engine: Annotated[str, typer.Option(help="Engine of the nodes.")] = "mooncake",
    model: Annotated[str, typer.Option(help="Model of the nodes; `wide` keeps most.")] = "wide",
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a prompt (several times for several); default: 16384 and 256."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each length, for either pair.")] = 9,
    batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a step computes.")] = 1024,
    path: Annotated[str, typer.Option(help="auto or packed.")] = "auto",
    min_tokens: Annotated[int, typer.Option(min=0, help="stream_min_tokens of one of the pairs.")] = 4096,
    extra: Annotated[
        str, typer.Option(metavar="JSON", help="Further settings of kv_connector_extra_config.")
    ] = "{}",
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Time the first token of a pair that sends KV while it is computed, beside one that does not."""
    from kvconnect.bench_transfer.options import parse_extra
    from kvconnect.demo.streaming import StreamingOptions, bench_streaming

    lengths = tuple(tokens or (16384, 256))
    options = StreamingOptions(
        engine, model, lengths, prompts, batched_tokens, path, min_tokens, parse_extra(extra)
    )
    raise typer.Exit(bench_streaming(options, json_output=json_output))


@bench_app.command("soak")
def bench_soak_command(
    engine: Annotated[str, typer.Option(help="Engine of the pair.")] = "nixl",
    model: Annotated[str, typer.Option(help="Model of the pair.")] = "gqa",
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 2000,
    concurrency: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 1,
    compare: Annotated[bool, typer.Option(help="Compare every token with a single node's.")] = True,
) -> None:
    """Send many prompts through a pair, then see that every block is free and nothing is remembered."""
    from kvconnect.demo.measure import bench_soak

    code = bench_soak(
        engine=engine, model=model, prompts=prompts, concurrency=concurrency, seed=seed, compare=compare
    )
    raise typer.Exit(code)


@bench_app.command("idle")
def bench_idle_command(
    engine: Annotated[str, typer.Option(help="Engine of the pair.")] = "nixl",
    model: Annotated[str, typer.Option(help="Model of the pair.")] = "gqa",
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to watch.")] = 30.0,
) -> None:
    """Measure what a pair that has met costs while nobody asks it anything."""
    from kvconnect.demo.measure import bench_idle

    raise typer.Exit(bench_idle(engine=engine, model=model, seconds=seconds))


def main() -> None:
    """Entry point of ``kvconnect``: run a command; an error of ours is one line and exit code 2."""
    try:
        app()
    except KVConnectError as error:
        typer.echo(f"kvconnect: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

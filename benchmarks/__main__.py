"""``python -m benchmarks NAME``: the options of every benchmark. What is measured lies with each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run_app

app = typer.Typer(
    name="benchmarks",
    help="Measure parts of kvconnect on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
ExtraSettings = Annotated[
    str, typer.Option(metavar="JSON", help="Further settings of kv_connector_extra_config.")
]
Environment = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Set in the children only; NAME alone takes it away (repeatable)."
    ),
]


@app.command("zero")
def bench_zero_command(
    page_bytes: Annotated[int, typer.Option(min=64, help="Bytes of a page.")] = 16 << 10,
    regions: Annotated[int, typer.Option(min=1, help="Layers, each in its own allocation.")] = 64,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks to zero.")] = 256,
) -> None:
    """Time the zeroing of fresh blocks beside a memset of as many bytes, on the GPU if there is one."""
    from benchmarks.runner_kit import bench_zero

    bench_zero(page_bytes=page_bytes, regions=regions, blocks=blocks)


@app.command("tables")
def bench_tables_command(
    requests: Annotated[int, typer.Option(min=1, help="Requests that grow in the step.")] = 256,
    groups: Annotated[int, typer.Option(min=1, help="Cache groups.")] = 4,
) -> None:
    """Time the update of block tables, on the GPU if there is one."""
    from benchmarks.runner_kit import bench_tables

    bench_tables(requests=requests, groups=groups)


@app.command("scheduler")
def bench_scheduler_command(
    requests: Annotated[int, typer.Option(min=1, help="Requests that run.")] = 256,
    json_output: JsonLines = False,
) -> None:
    """Time what the scheduler half's hooks add to a step, on one core and without a network."""
    from benchmarks.scheduler import bench_scheduler

    bench_scheduler(requests=requests, json_output=json_output)


@app.command("index")
def bench_index_command(
    contents: Annotated[
        list[int] | None,
        typer.Option(min=65536, help="Contents in the index (several times for several); 10^5 and 10^6."),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Calls of each kind; ten times as many of short ones.")
    ] = 100,
    json_output: JsonLines = False,
) -> None:
    """Time what the index of kept blocks takes of a scheduler's thread: look-ups, evictions, reservations."""
    from benchmarks.index import SIZES, bench_index

    bench_index(
        sizes=tuple(contents or SIZES),
        repeat=repeat,
        json_output=json_output,
    )


@app.command("disk")
def bench_disk_command(
    path: Annotated[
        str, typer.Option(help="A folder on the disk that is meant; left out, one for temporary files.")
    ] = "",
    record_bytes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Bytes of a row (several times for several); default: 1 MiB and 64 KiB."),
    ] = None,
    total_bytes: Annotated[int, typer.Option(min=1, help="Bytes written and read each time.")] = 1 << 30,
    records: Annotated[int, typer.Option(min=0, help="Records to recover; 0 for none.")] = 100_000,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each, of which the median counts.")] = 3,
    json_output: JsonLines = False,
) -> None:
    """Time the disk tier beside plain sequential I/O of as many bytes, and what a restart takes."""
    from benchmarks.disk import bench_disk

    bench_disk(
        path=path,
        record_bytes=record_bytes or (1 << 20, 64 << 10),
        total_bytes=total_bytes,
        recovery_records=records,
        repeat=repeat,
        json_output=json_output,
    )


@app.command("pack")
def bench_pack_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; left out, the GPU if there is one.")
    ] = None,
    json_output: JsonLines = False,
) -> None:
    """Time the packing of pages into slots and back, beside a plain copy of as many bytes."""
    from benchmarks.pack import bench_pack

    bench_pack(device=device, json_output=json_output)


@app.command("offload")
def bench_offload_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; left out, the GPU if there is one.")
    ] = None,
    page_bytes: Annotated[
        list[int] | None, typer.Option(help="Bytes of a page (several times for several); default: 16384.")
    ] = None,
    regions: Annotated[int, typer.Option(min=1, help="Layers, each in its own allocation.")] = 64,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Blocks at a time; default: 256 and 1024, on a CPU 16 and 64."),
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Time decode steps beside copies instead.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="With --decode: 8b or tiny, random weights; default: 8b, on a CPU tiny.")
    ] = "",
    batch: Annotated[int, typer.Option(help="With --decode: requests; default: 32, on a CPU 4.")] = 0,
    context: Annotated[
        int, typer.Option(help="With --decode: tokens of each; default: 4096, on a CPU 64.")
    ] = 0,
    gb_per_s: Annotated[
        float, typer.Option(help="With --decode: GB/s in each direction; default: 10, on a CPU 0.01.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(help="With --decode: how often without and with alternate.")] = 3,
    seconds: Annotated[float, typer.Option(help="With --decode: seconds of each.")] = 2.0,
    json_output: JsonLines = False,
) -> None:
    """Time blocks on their way to host memory and back, beside contiguous copies and one copy per page."""
    from benchmarks.offload.decode import DecodeOptions
    from benchmarks.offload.runner import bench_offload, bench_offload_decode
    from benchmarks.runner_kit import default_device

    chosen = device or default_device()
    if decode:
        options = DecodeOptions(
            device=chosen,
            model=model,
            batch=batch,
            context=context,
            gb_per_s=gb_per_s,
            rounds=rounds,
            seconds=seconds,
        )
        raise typer.Exit(bench_offload_decode(options, json_output=json_output))
    code = bench_offload(
        device=chosen,
        page_bytes=tuple(page_bytes or (16384,)),
        regions=regions,
        blocks=tuple(blocks or ()),
        json_output=json_output,
    )
    raise typer.Exit(code)


@app.command("transfer")
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
    in_turn: Annotated[
        bool, typer.Option("--in-turn", help="Let the rounds of all paths take turns: for a machine in use.")
    ] = False,
    extra: ExtraSettings = "{}",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set in the children only; NAME alone takes it away."),
    ] = None,
    json_output: JsonLines = False,
) -> None:
    """Time the KV of requests between two workers, beside what the engine alone can do."""
    from benchmarks.transfer.cases import Layouts
    from benchmarks.transfer.options import Options, parse_environment, parse_extra
    from benchmarks.transfer.runner import bench_transfer

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
        in_turn=in_turn,
        extra=parse_extra(extra),
        environment=parse_environment(env or ()),
    )
    raise typer.Exit(bench_transfer(options, json_output=json_output))


@app.command("node")
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
    rounds: Annotated[int, typer.Option(help="How often without and with alternate.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds of each.")] = 2.0,
    timeout_s: Annotated[float, typer.Option(help="Seconds that one step of a child may take.")] = 120.0,
    extra: ExtraSettings = "{}",
    env: Environment = None,
    json_output: JsonLines = False,
) -> None:
    """Time a node's decode steps while it receives KV without pause, beside those while it does not."""
    from benchmarks.node.options import Options
    from benchmarks.node.runner import bench_node
    from benchmarks.transfer.cases import Layouts
    from benchmarks.transfer.options import parse_environment, parse_extra

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
        rounds=rounds,
        seconds=seconds,
        timeout_s=timeout_s,
        extra=parse_extra(extra),
        environment=parse_environment(env or ()),
    )
    raise typer.Exit(bench_node(options, json_output=json_output))


@app.command("streaming")
def bench_streaming_command(
    engine: Annotated[str, typer.Option(help="Engine of the nodes.")] = "mooncake",
    model: Annotated[str, typer.Option(help="Model of the nodes; `wide` keeps most.")] = "wide",
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a prompt (several times for several); default: 16384 and 256."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each length, for either pair.")] = 9,
    batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a step computes.")] = 1024,
    path: Annotated[str, typer.Option(help="auto or packed.")] = "packed",
    min_tokens: Annotated[int, typer.Option(min=0, help="stream_min_tokens of one of the pairs.")] = 4096,
    extra: ExtraSettings = "{}",
    json_output: JsonLines = False,
) -> None:
    """Time the first token of a pair that sends KV while it is computed, beside one that does not."""
    from benchmarks.streaming import StreamingOptions, bench_streaming
    from benchmarks.transfer.options import parse_extra

    lengths = tuple(tokens or (16384, 256))
    options = StreamingOptions(
        engine, model, lengths, prompts, batched_tokens, path, min_tokens, parse_extra(extra)
    )
    raise typer.Exit(bench_streaming(options, json_output=json_output))


@app.command("idle")
def bench_idle_command(
    engine: Annotated[str, typer.Option(help="Engine of the pair.")] = "nixl",
    model: Annotated[str, typer.Option(help="Model of the pair.")] = "gqa",
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to watch.")] = 30.0,
) -> None:
    """Measure what a pair that has met costs while nobody asks it anything."""
    from benchmarks.pair_load import bench_idle

    raise typer.Exit(bench_idle(engine=engine, model=model, seconds=seconds))


@app.command("returning")
def bench_returning_command(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    model: Annotated[
        str, typer.Option(help="8b or tiny, with random weights; default: 8b, on a CPU tiny.")
    ] = "",
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of a prompt; default: 16384, on a CPU 2048.")
    ] = 0,
    prompts: Annotated[int, typer.Option(help="Prompts that come back.")] = 5,
    batched_tokens: Annotated[int, typer.Option(help="Tokens that a step computes.")] = 8192,
    disk_path: Annotated[
        Path | None, typer.Option(help="A folder on the disk to measure; left out, a new temporary one.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that one prompt may take.")] = 300.0,
    json_output: JsonLines = False,
) -> None:
    """Time the first token of a prompt that comes back: computed anew, from the GPU, host memory, or disk."""
    from benchmarks.returning.options import Options
    from benchmarks.returning.runner import bench_returning

    options = Options(
        device=device,
        model=model,
        prompt_tokens=prompt_tokens,
        prompts=prompts,
        batched_tokens=batched_tokens,
        disk_path=disk_path,
        timeout_s=timeout_s,
    )
    raise typer.Exit(bench_returning(options, json_output=json_output))


if __name__ == "__main__":
    run_app(app)

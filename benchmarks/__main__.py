"""``python -m benchmarks NAME``: the options of every benchmark. What is measured lies with each of them."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.command import run_app
from benchmarks.disk import bench_disk
from benchmarks.index import SIZES, bench_index
from benchmarks.node.options import Options as NodeOptions
from benchmarks.node.runner import bench_node
from benchmarks.offload.options import Options as OffloadOptions
from benchmarks.offload.runner import bench_offload
from benchmarks.options import JsonLines, add_command
from benchmarks.pack import bench_pack
from benchmarks.pair_load import bench_idle
from benchmarks.returning.options import Options as ReturningOptions
from benchmarks.returning.runner import bench_returning
from benchmarks.runner_kit import bench_tables, bench_zero
from benchmarks.scheduler import bench_scheduler
from benchmarks.streaming import Options as StreamingOptions
from benchmarks.streaming import bench_streaming
from benchmarks.transfer.options import Options as TransferOptions
from benchmarks.transfer.runner import bench_transfer

app = typer.Typer(
    name="benchmarks",
    help="Measure parts of kvconnect on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("zero")
def bench_zero_command(
    page_bytes: Annotated[int, typer.Option(min=64, help="Bytes of a page.")] = 16 << 10,
    regions: Annotated[int, typer.Option(min=1, help="Layers, each in its own allocation.")] = 64,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks to zero.")] = 256,
) -> None:
    """Time the zeroing of fresh blocks beside a memset of as many bytes, on the GPU if there is one."""
    bench_zero(page_bytes=page_bytes, regions=regions, blocks=blocks)


@app.command("tables")
def bench_tables_command(
    requests: Annotated[int, typer.Option(min=1, help="Requests that grow in the step.")] = 256,
    groups: Annotated[int, typer.Option(min=1, help="Cache groups.")] = 4,
) -> None:
    """Time the update of block tables, on the GPU if there is one."""
    bench_tables(requests=requests, groups=groups)


@app.command("scheduler")
def bench_scheduler_command(
    requests: Annotated[int, typer.Option(min=1, help="Requests that run.")] = 256,
    json_output: JsonLines = False,
) -> None:
    """Time what the scheduler half's hooks add to a step, on one core and without a network."""
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
    bench_pack(device=device, json_output=json_output)


@app.command("idle")
def bench_idle_command(
    engine: Annotated[str, typer.Option(help="Engine of the pair.")] = "nixl",
    model: Annotated[str, typer.Option(help="Model of the pair.")] = "gqa",
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to watch.")] = 30.0,
) -> None:
    """Measure what a pair that has met costs while nobody asks it anything."""
    raise typer.Exit(bench_idle(engine=engine, model=model, seconds=seconds))


add_command(app, "offload", OffloadOptions, bench_offload)
add_command(app, "transfer", TransferOptions, bench_transfer)
add_command(app, "node", NodeOptions, bench_node)
add_command(app, "streaming", StreamingOptions, bench_streaming)
add_command(app, "returning", ReturningOptions, bench_returning)


if __name__ == "__main__":
    run_app(app)

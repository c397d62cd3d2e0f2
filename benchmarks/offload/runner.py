"""The whole run, and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.offload.copies import Case, CopyTiming, measure_case
from benchmarks.offload.decode import DecodeOptions, DecodeTiming, measure_decode
from kvconnect.errors import ConfigError
from kvconnect.pack.torch_mover import use_one_thread


def bench_offload(
    *,
    device: str,
    page_bytes: Sequence[int],
    regions: int,
    blocks: Sequence[int],
    json_output: bool,
) -> int:
    """Measure every page size and number of blocks; returns 0, or 1 if wrong bytes came back.

    Raises:
        ConfigError: an option is not usable, or the device is not there.
    """
    _check_device(device)
    if device == "cpu":
        use_one_thread()
    timings = []
    for page in page_bytes:
        for count in blocks or ((16, 64) if device == "cpu" else (256, 1024)):
            case = Case(device, page, regions, count)
            for timing in measure_case(case):
                timings.append(timing)
                if json_output:
                    print(json.dumps({"bench": "offload", **asdict(timing)}), flush=True)
            del case
    if not json_output:
        Console(width=150).print(_copies_table(device, timings))
    return 0 if all(timing.verified for timing in timings) else 1


def bench_offload_decode(options: DecodeOptions, *, json_output: bool) -> int:
    """Measure decode steps beside copies; returns 0.

    Raises:
        ConfigError: the device is not there.
    """
    _check_device(options.device)
    timings = []
    for timing in measure_decode(options):
        timings.append(timing)
        if json_output:
            print(json.dumps({"bench": "offload-decode", **asdict(timing)}), flush=True)
    if not json_output:
        Console(width=150).print(_decode_table(timings))
    return 0


def _check_device(device: str) -> None:
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device is {device!r}; accepted: cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; accepted: cpu")


def _copies_table(device: str, timings: Sequence[CopyTiming]) -> Table:
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    table = Table(title=f"blocks to host memory and back, {where}; GB/s, and as a part of a contiguous copy")
    columns = ("page KiB", "regions", "blocks", "MiB", "rows", "contiguous", "per page")
    for column in (*columns, "out", "back", "host us", "verified"):
        table.add_column(column, justify="right")
    for one in timings:
        table.add_row(
            f"{one.page_bytes / 1024:g}",
            str(one.regions),
            str(one.blocks),
            str(one.total_bytes >> 20),
            one.rows,
            f"{one.contiguous_out:.1f} / {one.contiguous_back:.1f}",
            f"{one.per_page_out:.1f} / {one.per_page_back:.1f}",
            f"{one.out:.1f} ({one.out_of_contiguous:.2f})",
            f"{one.back:.1f} ({one.back_of_contiguous:.2f})",
            f"{one.out_host_us:.0f} / {one.back_host_us:.0f}",
            str(one.verified),
        )
    return table


def _decode_table(timings: Sequence[DecodeTiming]) -> Table:
    first = timings[0]
    table = Table(
        title=f"decode without -> while offloading: {first.model}, batch {first.batch}, "
        f"{first.context} tokens"
    )
    for column in (
        "flow",
        "out GB/s",
        "back GB/s",
        "tokens/s",
        "ratio",
        "step ms",
        "p99 ms",
        "host ms",
        "waits",
    ):
        table.add_column(column, justify="right")
    for one in timings:
        table.add_row(
            one.flow,
            f"{one.out:.4g}",
            f"{one.back:.4g}",
            f"{one.tokens_per_s_without:.0f} -> {one.tokens_per_s_with:.0f}",
            f"{one.ratio:.3f}",
            f"{one.step_ms_p50_without:.2f} -> {one.step_ms_p50_with:.2f}",
            f"{one.step_ms_p99_without:.2f} -> {one.step_ms_p99_with:.2f}",
            f"{one.host_ms_p50_without:.2f} -> {one.host_ms_p50_with:.2f}",
            str(one.staging_waits),
        )
    return table

"""The whole run, and the report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.node.options import Options
from benchmarks.node.pair import NodeTiming, measure_node
from benchmarks.transfer.process import StepFailed
from benchmarks.transfer.runner import devices_of

_NEARLY = 0.95


def bench_node(options: Options, *, json_output: bool = False) -> int:
    """Returns 0, or 1 if it could not be measured, which is shown.

    Raises:
        ConfigError: the device is not there.
    """
    devices = devices_of(options.device)
    try:
        timing = measure_node(options, devices)
    except StepFailed as error:
        if json_output:
            print(json.dumps({"bench": "node", "error": str(error)}), flush=True)
        print(f"not measured: {error}", file=sys.stderr, flush=True)
        return 1
    if json_output:
        print(json.dumps({"bench": "node", **asdict(timing)}), flush=True)
    _comment(timing)
    if not json_output:
        Console(width=150).print(_table(options, timing))
    return 0


def _comment(timing: NodeTiming) -> None:
    """What a reader of the numbers must know."""
    if timing.shared_gpu:
        print(
            "both sides are on one GPU: the peer's kernels take from the node too",
            file=sys.stderr,
            flush=True,
        )
    if timing.gb_per_s < _NEARLY * timing.asked_gb_per_s:
        print(
            f"{timing.gb_per_s:.4g} GB/s arrived of the {timing.asked_gb_per_s:.4g} that were asked for",
            file=sys.stderr,
            flush=True,
        )


def _table(options: Options, one: NodeTiming) -> Table:
    kind = "decode" if options.side == "decode" else "prompts"
    doing = "receiving" if options.side == "decode" else "sending"
    table = Table(
        title=f"{kind} without -> while {doing}: {one.model}, batch {one.batch}, {one.context} tokens, "
        f"{one.engine} {one.path_used}, {one.layouts}"
    )
    columns = ("slot MiB", "GB/s", "tokens/s", "ratio", "step ms", "p99 ms", "host ms", "GPU ms", "verified")
    for column in columns:
        table.add_column(column, justify="right")
    device = (one.device_ms_p50_without, one.device_ms_p50_with)
    table.add_row(
        f"{one.slot_bytes / 2**20:g}",
        f"{one.gb_per_s:.4g}",
        f"{one.tokens_per_s_without:.0f} -> {one.tokens_per_s_with:.0f}",
        f"{one.ratio:.3f}",
        f"{one.step_ms_p50_without:.2f} -> {one.step_ms_p50_with:.2f}",
        f"{one.step_ms_p99_without:.2f} -> {one.step_ms_p99_with:.2f}",
        f"{one.host_ms_p50_without:.2f} -> {one.host_ms_p50_with:.2f}",
        "" if None in device else f"{device[0]:.2f} -> {device[1]:.2f}",
        str(one.verified),
    )
    return table

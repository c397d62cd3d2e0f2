"""The whole run: every setting of the transfer threads that is asked for, and the report.

One that fails is shown and the rest goes on; the exit code tells.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.node.options import Options
from benchmarks.node.pair import NodeTiming, measure_node
from benchmarks.transfer.process import StepFailed
from benchmarks.transfer.runner import devices_of

_NEARLY = 0.95


def bench_node(options: Options, *, json_output: bool = False) -> int:
    """Measure every value of ``pack_programs``; returns 0, or 1 if something could not be measured.

    Raises:
        ConfigError: the device is not there.
    """
    devices = devices_of(options.device)
    timings, failures = [], 0
    for programs in dict.fromkeys(options.programs or (None,)):
        try:
            timing = measure_node(options, programs, devices)
        except StepFailed as error:
            failures += 1
            setting = {} if programs is None else {"pack_programs": programs}
            if json_output:
                print(json.dumps({"bench": "node", **setting, "error": str(error)}), flush=True)
            named = "".join(f" with {name} {value}" for name, value in setting.items())
            print(f"not measured{named}: {error}", file=sys.stderr, flush=True)
            continue
        timings.append(timing)
        if json_output:
            print(json.dumps({"bench": "node", **asdict(timing)}), flush=True)
        _comment(timing)
    if timings and not json_output:
        Console(width=150).print(_table(options, timings))
    return 1 if failures else 0


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


def _table(options: Options, timings: Sequence[NodeTiming]) -> Table:
    first = timings[0]
    kind = "decode" if options.side == "decode" else "prompts"
    doing = "receiving" if options.side == "decode" else "sending"
    table = Table(
        title=f"{kind} without -> while {doing}: {first.model}, batch {first.batch}, {first.context} tokens, "
        f"{first.engine} {first.path_used}, {first.layouts}"
    )
    columns = ("pack programs", "slot MiB", "GB/s", "tokens/s", "ratio", "step ms", "p99 ms", "host ms")
    for column in (*columns, "GPU ms", "verified"):
        table.add_column(column, justify="right")
    for one in timings:
        device = (one.device_ms_p50_without, one.device_ms_p50_with)
        table.add_row(
            str(one.pack_programs or "unbounded"),
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

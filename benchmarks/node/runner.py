"""The whole run, and the report."""

from __future__ import annotations

import sys

from benchmarks.node.options import Options
from benchmarks.node.pair import NodeTiming, measure_node
from benchmarks.report import Report
from benchmarks.transfer.process import StepFailed
from benchmarks.transfer.runner import devices_of

_NEARLY = 0.95


def bench_node(options: Options, *, json_output: bool = False) -> int:
    """Time a node's decode steps while it receives KV without pause, beside those while it does not.

    Returns 0, or 1 if it could not be measured, which is shown.

    Raises:
        ConfigError: the device is not there.
    """
    devices = devices_of(options.device)
    report = Report("node", json_output=json_output)
    try:
        timing = measure_node(options, devices)
    except StepFailed as error:
        report.failed(error)
        return 1
    report.add(timing)
    _comment(timing)
    report.show()
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

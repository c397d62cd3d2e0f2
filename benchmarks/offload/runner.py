"""The whole run, and the report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.offload.copies import Case, measure_case
from benchmarks.offload.decode import DecodeOptions, measure_decode
from benchmarks.report import Report
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
    report, verified = Report("offload", json_output=json_output), True
    for page in page_bytes:
        for count in blocks or ((16, 64) if device == "cpu" else (256, 1024)):
            case = Case(device, page, regions, count)
            for timing in measure_case(case):
                report.add(timing)
                verified &= timing.verified
            del case
    report.show()
    return 0 if verified else 1


def bench_offload_decode(options: DecodeOptions, *, json_output: bool) -> int:
    """Measure decode steps beside copies; returns 0.

    Raises:
        ConfigError: the device is not there.
    """
    _check_device(options.device)
    report = Report("offload-decode", json_output=json_output)
    for timing in measure_decode(options):
        report.add(timing)
    report.show()
    return 0


def _check_device(device: str) -> None:
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device is {device!r}; accepted: cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; accepted: cpu")

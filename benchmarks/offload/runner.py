"""The whole run, and the report."""

from __future__ import annotations

import torch

from benchmarks.offload.copies import Case, measure_case
from benchmarks.offload.decode import measure_decode
from benchmarks.offload.options import Options
from benchmarks.report import Report
from kvconnect.errors import ConfigError
from kvconnect.pack.torch_mover import use_one_thread


def bench_offload(options: Options, *, json_output: bool) -> int:
    """Time blocks on their way to host memory and back, beside contiguous copies and one copy per page.

    Returns 0, or 1 if wrong bytes came back.

    Raises:
        ConfigError: an option is not usable, or the device is not there.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; accepted: cpu")
    verified = True
    if options.decode:
        report = Report("offload-decode", json_output=json_output)
        for found in measure_decode(options):
            report.add(found)
    else:
        report = Report("offload", json_output=json_output)
        if options.on_cpu:
            use_one_thread()
        for page_bytes in options.page_bytes:
            for blocks in options.used_blocks:
                case = Case(options.device, page_bytes, options.regions, blocks)
                for timing in measure_case(case):
                    report.add(timing)
                    verified &= timing.verified
                del case
    report.show()
    return 0 if verified else 1

"""The whole run, and the report."""

from __future__ import annotations

from benchmarks.device import check_device
from benchmarks.offload.copies import Case, measure_case
from benchmarks.offload.decode import measure_decode
from benchmarks.offload.options import Options
from benchmarks.report import Report


def bench_offload(options: Options, report: Report) -> int:
    """Time blocks on their way to host memory and back, or decode steps beside such copies.

    Returns 0, or 1 if wrong bytes came back.

    Raises:
        ConfigError: an option is not usable, or the device is not there.
    """
    check_device(options.device)
    verified = True
    if options.decode:
        for found in measure_decode(options):
            report.add(found, "offload-decode")
        return 0
    for page_bytes in options.page_bytes:
        for blocks in options.used_blocks:
            case = Case(options.device, page_bytes, options.regions, blocks)
            for timing in measure_case(case):
                report.add(timing)
                verified &= timing["verified"]
            # Two of them may not fit at once.
            del case
    return 0 if verified else 1

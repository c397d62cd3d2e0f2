"""The whole run: every engine, its limit, its pairs of workers, and the report.

One thing that fails is shown and the rest goes on; the exit code tells.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.report import Report
from benchmarks.transfer.cases import EngineLimit, PairCase, TransferTiming
from benchmarks.transfer.options import Options
from benchmarks.transfer.pair import (
    Devices,
    EngineUnusable,
    measure_limit,
    measure_pairs,
    over_direct,
)
from benchmarks.transfer.process import StepFailed
from kvconnect.errors import ConfigError


def devices_of(device: str) -> Devices:
    """Where prefill and decode live: on two GPUs if there are two.

    Raises:
        ConfigError: there is no GPU.
    """
    if device == "cpu":
        return "cpu", "cpu"
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; accepted: cpu")
    return "cuda:0", "cuda:1" if count > 1 else "cuda:0"


def _is_skipped(case: PairCase) -> bool:
    """Whether a pair is left out, which is said: the direct path needs equal blocks."""
    sides = case.layouts
    skipped = case.path == "direct" and sides.prefill.block_tokens != sides.decode.block_tokens
    if skipped:
        print(f"left out: path direct with layouts {sides}, whose blocks differ", file=sys.stderr, flush=True)
    return skipped


def _rounded(limit: EngineLimit, device: str) -> dict[str, Any]:
    return {
        "engine": limit.engine,
        "device": device,
        "batch_bytes": limit.batch_bytes,
        "contiguous_gb_per_s": round(limit.contiguous, 3),
        "pages_gb_per_s": {str(size): round(rate, 3) for size, rate in limit.pages.items()},
        "peer_copy_gb_per_s": None if limit.peer_copy is None else round(limit.peer_copy, 3),
    }


def bench_transfer(options: Options, *, json_output: bool = False) -> int:
    """Time the KV of requests between two workers, beside what the engine alone can do.

    Returns 0, or 1 if something could not be measured.

    Raises:
        ConfigError: the device is not there.
    """
    devices = devices_of(options.device)
    report = Report("transfer", json_output=json_output)
    limits: set[str] = set()
    timings: list[TransferTiming] = []
    failures = 0

    def failed(error: StepFailed, engine: str, case: PairCase | None = None) -> None:
        nonlocal failures
        failures += 1
        where: dict[str, Any] = {"engine": engine}
        if case is not None:
            where.update(path=case.path, layouts=str(case.layouts), page_bytes=case.page_bytes)
        report.failed(error, **where)

    for asked in dict.fromkeys(options.engines):
        engine, limit = asked, None
        try:
            limit = measure_limit(options, asked, devices)
            if limit.engine in limits:
                # What auto stands for was asked for by name too.
                continue
            engine = limit.engine
            limits.add(engine)
            report.add(_rounded(limit, options.device), "engine")
        except EngineUnusable as error:
            failed(error, asked)
            continue
        except StepFailed as error:
            failed(error, asked)
        for cases in options.pairs_at_once(engine):
            wanted = [case for case in cases if not _is_skipped(case)]
            try:
                for timing in measure_pairs(options, wanted, devices, limit):
                    timings.append(over_direct(timing, timings))
                    report.add(timings[-1])
            except StepFailed as error:
                failed(error, engine, wanted[0] if len(wanted) == 1 else None)
    report.show()
    return 1 if failures else 0

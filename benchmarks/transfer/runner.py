"""The whole run: every engine, its limit, its pairs of workers, and the report.

One thing that fails is shown and the rest goes on; the exit code tells.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

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


class _Report:
    """What was measured so far: as JSON lines at once, or as tables at the end."""

    def __init__(self, options: Options, json_output: bool) -> None:
        self._options, self._json = options, json_output
        self.limits: list[EngineLimit] = []
        self.timings: list[TransferTiming] = []
        self.failures = 0

    def limit(self, limit: EngineLimit) -> None:
        self.limits.append(limit)
        self._line(
            {
                "bench": "engine",
                "engine": limit.engine,
                "device": self._options.device,
                "batch_bytes": limit.batch_bytes,
                "contiguous_gb_per_s": round(limit.contiguous, 3),
                "pages_gb_per_s": {str(size): round(rate, 3) for size, rate in limit.pages.items()},
                "peer_copy_gb_per_s": None if limit.peer_copy is None else round(limit.peer_copy, 3),
            }
        )

    def timing(self, timing: TransferTiming) -> None:
        timing = over_direct(timing, self._direct_of(timing))
        self.timings.append(timing)
        self._line({"bench": "transfer", **asdict(timing)})

    def failed(self, engine: str, case: PairCase | None, error: Exception) -> None:
        self.failures += 1
        where: dict[str, Any] = {"engine": engine}
        if case is not None:
            where.update(path=case.path, layouts=str(case.layouts), page_bytes=case.page_bytes)
        self._line({"bench": "transfer", **where, "error": str(error)})
        named = ", ".join(f"{key} {value}" for key, value in where.items())
        print(f"not measured: {named}: {error}", file=sys.stderr, flush=True)

    def _direct_of(self, timing: TransferTiming) -> TransferTiming | None:
        def key(one: TransferTiming) -> tuple[object, ...]:
            return (one.engine, one.layouts, one.page_bytes, one.blocks, one.requests_in_flight)

        return next((one for one in self.timings if one.path == "direct" and key(one) == key(timing)), None)

    def _line(self, values: dict[str, Any]) -> None:
        if self._json:
            print(json.dumps(values), flush=True)

    def print_tables(self) -> None:
        if self._json or not (self.limits or self.timings):
            return
        console = Console(width=150)
        console.print(self._limit_table())
        console.print(self._timing_table())

    def _limit_table(self) -> Table:
        options = self._options
        table = Table(title=f"engines with nothing above them, {options.device}, GB/s")
        table.add_column("engine")
        table.add_column("contiguous", justify="right")
        for size in dict.fromkeys(options.page_bytes):
            table.add_column(f"pages of {_size(size)}", justify="right")
        table.add_column("copy of a tensor", justify="right")
        for limit in self.limits:
            rates = (limit.contiguous, *limit.pages.values(), limit.peer_copy)
            table.add_row(limit.engine, *("" if rate is None else f"{rate:.2f}" for rate in rates))
        return table

    def _timing_table(self) -> Table:
        options = self._options
        table = Table(title=f"KV of requests between two workers, {options.regions} regions, median times")
        for column in ("engine", "path", "layouts"):
            table.add_column(column)
        columns = ("page", "blocks", "MiB a request", "in flight", "latency ms", "GB/s")
        for column in (*columns, "of contiguous", "of direct", "copies", "samples"):
            table.add_column(column, justify="right")
        for timing in self.timings:
            same = timing.path == timing.path_used
            table.add_row(
                timing.engine,
                timing.path if same else f"{timing.path} ({timing.path_used})",
                timing.layouts,
                _size(timing.page_bytes),
                str(timing.blocks),
                f"{timing.total_bytes / timing.requests / 2**20:.1f}",
                str(timing.requests_in_flight),
                f"{timing.latency_ms:.2f}",
                f"{timing.gb_per_s:.2f}",
                "" if timing.of_contiguous is None else f"{timing.of_contiguous:.1%}",
                "" if timing.over_direct is None else f"{timing.over_direct:.2f}x",
                str(timing.copies),
                str(timing.samples),
            )
        return table


def _size(length_bytes: int) -> str:
    return f"{length_bytes >> 10} KiB" if length_bytes % 1024 == 0 else f"{length_bytes} B"


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


def bench_transfer(options: Options, *, json_output: bool = False) -> int:
    """Measure everything that ``options`` ask for; returns 0, or 1 if something could not be measured.

    Raises:
        ConfigError: the device is not there.
    """
    devices = devices_of(options.device)
    report = _Report(options, json_output)
    for asked in dict.fromkeys(options.engines):
        engine, limit = asked, None
        try:
            limit = measure_limit(options, asked, devices)
            if any(limit.engine == known.engine for known in report.limits):
                # What auto stands for was asked for by name too.
                continue
            engine = limit.engine
            report.limit(limit)
        except EngineUnusable as error:
            report.failed(asked, None, error)
            continue
        except StepFailed as error:
            report.failed(asked, None, error)
        for cases in options.pairs_at_once(engine):
            wanted = [case for case in cases if not _is_skipped(case)]
            try:
                for timing in measure_pairs(options, wanted, devices, limit):
                    report.timing(timing)
            except StepFailed as error:
                report.failed(engine, wanted[0] if len(wanted) == 1 else None, error)
    report.print_tables()
    return 1 if report.failures else 0

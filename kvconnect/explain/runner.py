"""``kvconnect explain``: two files in, a table or JSON out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.explain.hugging_face import read_cache
from kvconnect.explain.report import Case, Pair, Report, make_report

MAX_TOKENS = 1 << 20

_COLUMNS = (
    *("P > D", "heads", "blocks", "copies", "KiB each", "MiB", "direct ms"),
    *("order", "MiB", "chunks", "packed ms", "path"),
)


Side = tuple[Path, Mapping[str, int]]
"""A node's file, and what replaces ``tp_size`` and ``block_size`` of it."""


def run_explain(
    source: Side, target: Side, *, tokens: int, extra: ExtraConfig | None = None, json_output: bool = False
) -> int:
    """Print what a decode node fetches from a prefill node; 1 if it cannot. ``extra`` replaces the files'."""
    if not 1 <= tokens <= MAX_TOKENS:
        raise ConfigError(f"tokens is {tokens}; accepted: 1 to {MAX_TOKENS}")
    held, wanted = (read_cache(*side) for side in (source, target))
    if extra is not None:
        held, wanted = (msgspec.structs.replace(side, extra=extra) for side in (held, wanted))
    report = make_report(held, wanted, tokens)
    if json_output:
        print(msgspec.json.encode({**asdict(report), "works": report.works}).decode())
    else:
        _print(report, source[0].name, target[0].name)
    return 0 if report.works else 1


def _print(report: Report, source: str, target: str) -> None:
    console = Console(width=140, highlight=False)
    table = Table(title=escape(f"{source} (P) to {target} (D): a request of {report.tokens} tokens"))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("heads", "blocks", "order") else "right")
    for pair in report.pairs:
        for index, case in enumerate(pair.cases):
            table.add_row(*_row(pair, case, index == 0), end_section=index + 1 == len(pair.cases))
    if report.pairs:
        console.print(table)
    lines = [f"refused: {refusal}" for refusal in report.refusals]
    for side, places in report.places.items():
        lines += [f"{side} rank {rank} is at {place}" for rank, place in enumerate(places)]
    for (path, reason), ranks in _closed(report).items():
        where = "every pair of ranks" if len(ranks) == len(report.pairs) else ", ".join(ranks)
        lines.append(f"{path} is closed, {where}: {reason}")
    lines.append(f"predicted from rates that are assumed, not measured: {report.rates}")
    console.print(escape("\n".join(lines)), soft_wrap=True)


def _row(pair: Pair, case: Case, is_first: bool) -> list[str]:
    heads = [
        label if shared is None else f"{label} {shared[0]}-{shared[1]}"
        for label, shared in pair.heads.items()
    ]
    copy_bytes = dict.fromkeys((case.least_copy_bytes, case.most_copy_bytes))
    return [
        f"{pair.source_rank} > {pair.target_rank}" if is_first else "",
        escape(", ".join(heads)) if is_first else "",
        case.blocks,
        _number(case.copies),
        " to ".join(_number(length, 2**10, ".4g") for length in copy_bytes),
        _number(case.direct_bytes, 2**20, ".1f"),
        _number(case.direct_s, 1e-3, ".2f"),
        pair.order or "-",
        _number(case.packed_bytes, 2**20, ".1f"),
        _number(case.chunks),
        _number(case.packed_s, 1e-3, ".2f"),
        case.path or "none",
    ]


def _number(value: float | None, unit: float = 1, digits: str = "d") -> str:
    if value is None:
        return "-"
    return format(value if digits == "d" else value / unit, digits)


def _closed(report: Report) -> dict[tuple[str, str], list[str]]:
    """The reasons why paths are closed, each with the pairs of ranks that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for pair in report.pairs:
        for path, reasons in pair.closed.items():
            for reason in reasons:
                found.setdefault((path, reason), []).append(f"{pair.source_rank} > {pair.target_rank}")
    return found

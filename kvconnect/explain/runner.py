"""``kvconnect explain``: two files in, a table or JSON out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconnect.errors import ConfigError
from kvconnect.explain.cache_file import read_cache_file, read_rates
from kvconnect.explain.report import Case, Pair, Report, make_report

MOST_TOKENS = 1 << 20

_COLUMNS = (
    *("P > D", "heads", "blocks", "copies", "KiB each", "MiB", "direct ms"),
    *("order", "MiB", "chunks", "packed ms", "path"),
)


def run_explain(
    source: Path, target: Path, *, tokens: int, rates: Path | None = None, json_output: bool = False
) -> int:
    """Print what a decode node of ``target`` fetches from a prefill node of ``source``; 1 if it cannot.

    Raises:
        ConfigError: a file or an option cannot be used.
    """
    if not 1 <= tokens <= MOST_TOKENS:
        raise ConfigError(f"tokens is {tokens}; accepted: 1 to {MOST_TOKENS}")
    report = make_report(
        read_cache_file(source), read_cache_file(target), tokens, read_rates(rates) if rates else None
    )
    if json_output:
        print(msgspec.json.encode({**asdict(report), "works": report.works}).decode())
    else:
        _print(report, source.name, target.name)
    return 0 if report.works else 1


def _print(report: Report, source: str, target: str) -> None:
    console = Console(width=140, highlight=False)
    title = f"{source} (P) to {target} (D): a request of {report.tokens} tokens"
    table = Table(title=escape(title))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("heads", "blocks", "order") else "right")
    for pair in report.pairs:
        for index, case in enumerate(pair.cases):
            table.add_row(*_row(pair, case, index == 0), end_section=index + 1 == len(pair.cases))
    if report.pairs:
        console.print(table)
    for refusal in report.refusals:
        _say(console, f"refused: {refusal}")
    for (path, reason), ranks in _closed(report).items():
        where = "every pair of ranks" if len(ranks) == len(report.pairs) else ", ".join(ranks)
        _say(console, f"{path} is closed, {where}: {reason}")
    basis = "measured" if report.measured else "assumed, not measured (see --rates)"
    _say(console, f"predicted from rates that are {basis}: {report.rates}")


def _say(console: Console, line: str) -> None:
    console.print(escape(line), soft_wrap=True)


def _row(pair: Pair, case: Case, is_first: bool) -> list[str]:
    heads = [
        label if shared is None else f"{label} {shared[0]}-{shared[1]}"
        for label, shared in pair.heads.items()
    ]
    kib = "-"
    if case.copies is not None:
        kib = _kib(case.least_copy_bytes)
        if case.least_copy_bytes != case.most_copy_bytes:
            kib += f" to {_kib(case.most_copy_bytes)}"
    return [
        f"{pair.source_rank} > {pair.target_rank}" if is_first else "",
        escape(", ".join(heads)) if is_first else "",
        case.blocks,
        _number(case.copies),
        kib,
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


def _kib(length_bytes: int | None) -> str:
    return _number(length_bytes, 2**10, ".4g")


def _closed(report: Report) -> dict[tuple[str, str], list[str]]:
    """The reasons why paths are closed, each with the pairs of ranks that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for pair in report.pairs:
        for path, whys in pair.closed.items():
            for reason in whys:
                found.setdefault((path, reason), []).append(f"{pair.source_rank} > {pair.target_rank}")
    return found

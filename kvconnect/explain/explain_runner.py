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
from kvconnect.explain.cache_report import CachePair, CacheReport, make_report
from kvconnect.explain.hugging_face import read_cache

MAX_TOKENS = 1 << 20

_COLUMNS = ("P > D", "heads", "order", "MiB", "chunks")


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


def _print(report: CacheReport, source: str, target: str) -> None:
    console = Console(width=140, highlight=False)
    title = f"{source} (P) to {target} (D): a request of {report.tokens} tokens"
    console.print(escape(title), soft_wrap=True)
    table = Table()
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("heads", "order") else "right")
    for pair in report.pairs:
        table.add_row(*_row(pair))
    if report.pairs:
        console.print(table)
    lines = [f"refused: {refusal}" for refusal in report.refusals]
    for side, places in report.places.items():
        lines += [f"{side} rank {rank} is at {place}" for rank, place in enumerate(places)]
    for reason, ranks in _refusals(report).items():
        where = "every pair of ranks" if len(ranks) == len(report.pairs) else ", ".join(ranks)
        lines.append(f"refused, {where}: {reason}")
    for line in lines:
        console.print(escape(line), soft_wrap=True)


def _row(pair: CachePair) -> list[str]:
    heads = [
        label if shared is None else f"{label} {shared[0]}-{shared[1]}"
        for label, shared in pair.heads.items()
    ]
    name = f"{pair.source_rank} > {pair.target_rank}"
    size = f"{pair.total_bytes / 2**20:.1f}" if pair.order else "-"
    return [name, escape(", ".join(heads)), pair.order or "-", size, str(pair.chunks) if pair.order else "-"]


def _refusals(report: CacheReport) -> dict[str, list[str]]:
    """The reasons why caches do not fit, each with the pairs of ranks that it holds for."""
    found: dict[str, list[str]] = {}
    for pair in report.pairs:
        for reason in pair.refusals:
            found.setdefault(reason, []).append(f"{pair.source_rank} > {pair.target_rank}")
    return found

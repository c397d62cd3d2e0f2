"""What a benchmark found: each finding as a JSON line at once, or all of a kind as one table at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table


def note(text: str) -> None:
    """What a reader of the figures must know, beside them."""
    print(text, file=sys.stderr, flush=True)


class Report:
    """Findings of one benchmark, as dataclasses or dictionaries whose names have their units."""

    def __init__(self, bench: str, *, json_output: bool) -> None:
        self._bench, self.json_output = bench, json_output
        self._kinds: dict[str, list[dict[str, Any]]] = {}

    def add(self, finding: Any, kind: str = "") -> None:
        """Take a finding; ``kind`` tells those of one benchmark that have other fields."""
        values = dict(finding) if isinstance(finding, Mapping) else asdict(finding)
        name = kind or self._bench
        self._kinds.setdefault(name, []).append(values)
        self._line(name, values)

    def failed(self, error: Exception, **where: Any) -> None:
        """Show what could not be measured, and why; it is in no table."""
        self._line(self._bench, {**where, "error": str(error)})
        named = ", ".join(f"{key} {value}" for key, value in where.items())
        note(": ".join(filter(None, ("not measured", named, str(error)))))

    def show(self) -> None:
        """Print the tables: what is the same in all findings of a kind stands above its table."""
        if self.json_output:
            return
        console = Console(width=160)
        for kind, findings in self._kinds.items():
            first = findings[0]
            names = [name for name in first if any(one[name] != first[name] for one in findings)]
            if len(findings) == 1:
                table = Table("", "", title=kind, show_header=False)
                for name, value in first.items():
                    table.add_row(name, _text(value))
            else:
                same = (f"{name} {_text(value)}" for name, value in first.items() if name not in names)
                table = Table(*names, title=", ".join([kind, *same]))
                for finding in findings:
                    table.add_row(*(_text(finding[name]) for name in names))
            console.print(table)

    def _line(self, kind: str, values: dict[str, Any]) -> None:
        if self.json_output:
            print(json.dumps({"bench": kind, **values}), flush=True)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

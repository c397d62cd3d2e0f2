"""Draws the dashboard's panels as SVG, from what a real Prometheus answers to their queries.

    python -m tests.deploy.dashboard_picture docs/dashboard.svg

Titles, places, units, queries and legends are the dashboard's; the look is not Grafana's.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.deploy.test_observability import JOBS, PANELS, Prometheus, watching

COLUMN, ROW, LEGEND, LINE = 48, 29, 86, 11
LEAST_S = 30
COLOURS = ("#3274d9", "#e0752d", "#2b9348", "#c4162a", "#8f3bb8", "#0a9396", "#b08900", "#6b7280")
STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ"))
UNITS = {"s": "s", "Bps": "B/s", "bytes": "B", "ops": "/s", "short": "", "percentunit": "%"}


def number(value: float, unit: str) -> str:
    """A value of a panel's axis."""
    value *= 100 if unit == "percentunit" else 1
    size, prefix = next(((size, prefix) for size, prefix in STEPS if value >= size), (1, ""))
    return f"{value / size:.3g} {prefix}{UNITS[unit]}".strip()


def legend(text: str, labels: dict[str, str]) -> str:
    """The name of a series, from the legend's format."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), text)


def drawn(panel: dict[str, Any], prometheus: Prometheus, since: float, until: float) -> Iterator[str]:
    """The elements of a panel."""
    place, unit = panel["gridPos"], panel["fieldConfig"]["defaults"]["unit"]
    width, height = place["w"] * COLUMN - 8, place["h"] * ROW - 8
    lines = [
        (legend(target["legendFormat"], one["metric"]), one["values"])
        for target in panel["targets"]
        for one in prometheus.series(target["expr"], since, JOBS["reference"])
    ]
    most = max((value for _, values in lines for _, value in values), default=0) or 1
    bottom, top, left = height - LEGEND, 34, 66
    yield f'<g transform="translate({place["x"] * COLUMN + 4} {place["y"] * ROW + 4})">'
    yield f'<rect width="{width}" height="{height}" fill="#fff" stroke="#d0d4da"/>'
    yield f'<text x="8" y="18" font-weight="bold" font-size="12">{escape(panel["title"])}</text>'
    for at, label in ((bottom, number(0, unit)), (top, number(most, unit))):
        yield f'<path d="M{left} {at}H{width - 8}" stroke="#e3e6ea"/>'
        yield f'<text x="{left - 6}" y="{at + 4}" text-anchor="end">{label}</text>'
    yield f'<text x="{width - 8}" y="{bottom + 13}" text-anchor="end">{until - since:.0f} s</text>'
    for index, (name, values) in enumerate(lines):
        points = " ".join(
            f"{left + (at - since) / (until - since) * (width - left - 8):.0f},"
            f"{bottom - value / most * (bottom - top):.1f}"
            for at, value in values
        )
        colour, column, row = COLOURS[index % len(COLOURS)], index % 2, index // 2
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        x, y = 8 + column * (width - 8) // 2, bottom + 28 + row * LINE
        yield f'<text x="{x}" y="{y}" fill="{colour}">{escape(name)}</text>'
    yield "</g>"


def main() -> None:
    with TemporaryDirectory() as folder, watching(Path(folder), LEAST_S) as (prometheus, since):
        until = time.time()
        elements = [text for panel in PANELS for text in drawn(panel, prometheus, since, until)]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in PANELS) * ROW
    size = f'width="{24 * COLUMN}" height="{height}" viewBox="0 0 {24 * COLUMN} {height}"'
    style = 'font-family="sans-serif" font-size="9" fill="#3b4148"'
    elements = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *elements, "</svg>"]
    Path(sys.argv[1]).write_text("\n".join(elements) + "\n")


if __name__ == "__main__":
    main()

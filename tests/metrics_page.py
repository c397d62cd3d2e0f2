"""docs/metrics.md: its tables are made from the code, the texts between them stay.

python -m tests.metrics_page
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvconnect.metrics import FAMILIES
from kvconnect.offload.scheduler import host
from kvconnect.router.pool import Pool
from kvconnect.router.router_metrics import RouterMetrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_TABLE = re.compile(r"(<!-- (\w+) -->\n).*?(?=\n\n|\Z)", re.S)


def _rows(families: Iterable[tuple[str, str, Iterable[str], str]]) -> str:
    rows = ["name, labels | meaning", "---|---"]
    for name, kind, labels, text in families:
        # The page tells kinds apart by the ends of names.
        assert name.endswith("_seconds") == (kind == "histogram") or kind == "counter", name
        shown = f"{name}_total" if kind == "counter" else name
        rows.append(f"{', '.join([f'`{shown}`', *labels])} | {text.rstrip('.')}")
    return "\n".join(rows)


def worker_table() -> str:
    """Of a node, and under vLLM."""
    return _rows((f"kvconnect_{one.name}", one.kind, one.labels, one.text) for one in FAMILIES)


def router_table() -> str:
    router = RouterMetrics(Pool("prefill", ["http://p"]))
    found = []
    for collector in dict.fromkeys(router._registry._collector_to_names):
        labels = getattr(collector, "_labelnames", None)
        for family in collector.collect():
            named = labels if labels is not None else (family.samples[0].labels if family.samples else ())
            found.append((family.name, family.type, tuple(named), family.documentation))
    return _rows(found)


def page(text: str) -> str:
    offload = [f"`{reason}` | {text}" for reason, text in host.REASONS.items()]
    tables = {
        "worker": worker_table(),
        "router": router_table(),
        "offload": "\n".join(["reason | what happened", "---|---", *offload]),
    }
    return _TABLE.sub(lambda found: found[1] + tables[found[2]], text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

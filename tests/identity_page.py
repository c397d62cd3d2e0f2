"""docs/vllm.md: its table of what KV depends on is made from the list, the texts around it stay.

python -m tests.identity_page
"""

from __future__ import annotations

import re
from pathlib import Path

from kvconnect.cache.identity import ENTRIES
from kvconnect.vllm.stated_identity import FREE_FIELDS, FREE_SETTINGS, SOURCES

PAGE = Path(__file__).parents[1] / "docs" / "vllm.md"
_TABLE = re.compile(r"(<!-- identity -->\n).*?(?=\n\n|\Z)", re.S)


def table() -> str:
    """Of each entry its rule, and of what counts in none of them why."""
    rows = ["| what | rule | compared, or bridged | in vLLM |", "|---|---|---|---|"]
    rows += [f"| {one.name} | {one.rule.value} | {one.what} | {SOURCES[one.name]} |" for one in ENTRIES]
    for title, free in (("fields of the configuration", FREE_FIELDS), ("settings", FREE_SETTINGS)):
        for reason, names in free.items():
            listed = ", ".join(f"`{name}`" for name in names)
            rows.append(f"| {title} | does not matter | {reason} | {listed} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with its table as it should be."""
    return _TABLE.sub(lambda found: found[1] + table(), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

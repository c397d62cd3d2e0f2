"""docs/configuration.md, made from the docstrings of the configuration.

python -m tests.configuration_page > docs/configuration.md
"""

from __future__ import annotations

import re

import msgspec

from kvconnect.config import ExtraConfig, Limits, OffloadConfig

_HEAD = """\
# Configuration

This page has every setting of a node, made from `kvconnect/config.py`. vLLM's `kv_transfer_config` has
`kv_connector` (`KVConnect`), `kv_role` (`kv_producer` prefills for others, `kv_consumer` fetches from others,
`kv_both`), `kv_load_failure_policy` (`fail` or `recompute`) and `engine_id` (left out, a new one at every
start); the settings below are in its `kv_connector_extra_config`. An unknown key or a wrong value is an error
that names it, what is accepted and the nearest known key. `deploy/` has examples.
"""


def _described(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text of each attribute in a docstring's Attributes section."""
    _, _, listed = (kind.__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w+: |\Z)", listed, re.S | re.M)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in found}


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if isinstance(value, int) and value >= 1 << 30 and value % (1 << 30) == 0:
        return f"{value >> 30} GiB"
    return f"`{msgspec.json.encode(value).decode()}`"


def _table(kind: type[msgspec.Struct]) -> list[str]:
    described = _described(kind)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        if field.name in Limits.__struct_fields__:
            continue
        text = described[field.name]
        rows.append(f"| `{field.name}` | {_default(field)} | {text[0].upper()}{text[1:]} |")
    return rows


def page() -> str:
    parts = [_HEAD, "## `kv_connector_extra_config`", "", *_table(ExtraConfig), ""]
    parts += ["## `kv_connector_extra_config.offload`", "", "All sizes are those of one worker rank.", ""]
    return "\n".join([*parts, *_table(OffloadConfig), ""])


if __name__ == "__main__":
    print(page(), end="")

"""docs/configuration.md, made from the docstrings of the configuration.

python -m tests.configuration_page > docs/configuration.md
"""

from __future__ import annotations

import re
import typing

import msgspec

from kvconnect.config import ExtraConfig, Limits, OffloadConfig, RankConfig

_HEAD = """\
# Configuration

`kv_transfer_config` is vLLM's object: `kv_connector` (`KVConnect`), `kv_role` (`kv_producer` prefills for
others, `kv_consumer` fetches from others, `kv_both`), `kv_load_failure_policy` (`fail` or `recompute`),
`engine_id` (left out, a new one at every start). What is kvconnect's lies in `kv_connector_extra_config`. An
unknown key or a wrong value is an error that names the key, the value, what is accepted and the nearest known
key. Examples for every engine are in `deploy/`.

This page is made from the docstrings in `kvconnect/config.py`:
`python -m tests.configuration_page > docs/configuration.md`.
"""


def _described(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text of each attribute in a docstring's Attributes section."""
    _, _, listed = (kind.__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w+: |\Z)", listed, re.S | re.M)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in found}


def _values(field: msgspec.structs.FieldInfo) -> str:
    kind = field.type
    if type(None) in (given := typing.get_args(kind)):
        (kind,) = (one for one in given if one is not type(None))
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    names = {int: "integer", float: "number", bool: "`true`, `false`", str: "text"}
    return names.get(kind, "list" if typing.get_origin(kind) is tuple else "object")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value in ("", (), None) or value == {}:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} MiB" if value < 1 << 30 else f"{value >> 30} GiB"
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


def _table(kind: type[msgspec.Struct]) -> list[str]:
    described = _described(kind)
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        if field.name in Limits.__struct_fields__:
            continue
        text = described[field.name]
        rows.append(
            f"| `{field.name}` | {_values(field)} | {_default(field)} | {text[0].upper()}{text[1:]} |"
        )
    return rows


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "## `kv_connector_extra_config`", "", *_table(ExtraConfig), ""]
    parts += ["## `kv_connector_extra_config.ranks`", ""]
    parts += ["What is set for some ranks, by rank. What is left out is as for all.", ""]
    parts += [*_table(RankConfig), ""]
    parts += ["## `kv_connector_extra_config.offload`", "", "All sizes are those of one worker rank.", ""]
    return "\n".join([*parts, *_table(OffloadConfig), ""])


if __name__ == "__main__":
    print(page(), end="")

"""Records what the installed vLLM expects of a connector, to be compared where another release is installed.

    .venv-vllm-0.31.0/bin/python -m tests.vllm_contract.record

writes ``recorded/0.31.0.json`` beside this file: classes with their methods and fields, and the names that
modules define.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from kvconnect.vllm.plugin import vllm_version

RECORDED = Path(__file__).parent / "recorded"

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
CLASSES = {
    f"{CONNECTOR}.v1.base": ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorTransferResults"),
    f"{CONNECTOR}.v1.metrics": ("KVConnectorStats", "KVConnectorPromMetrics"),
    f"{CONNECTOR}.factory": ("KVConnectorFactory",),
    "vllm.config.kv_transfer": ("KVTransferConfig",),
}
"""Classes that are described, by module."""

MODULES = (
    *CLASSES,
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer",
    "vllm.distributed.parallel_state",
    "vllm.envs",
    "vllm.sampling_params",
    "vllm.utils.hashing",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.sample.logits_processor",
)
"""Modules whose names are listed: those that kvconnect imports wherever they are."""


def record() -> dict[str, Any]:
    """The description of the installed release."""
    return {
        "version": vllm_version().split("+")[0],
        "classes": {
            name: describe_class(getattr(importlib.import_module(module), name))
            for module, names in CLASSES.items()
            for name in names
        },
        "modules": {
            name: sorted(one for one in vars(importlib.import_module(name)) if not one.startswith("__"))
            for name in MODULES
        },
    }


def describe_class(cls: type) -> dict[str, Any]:
    """Methods with their parameters, and fields, of a class without its bases."""
    # A dataclass has methods that nobody has written.
    is_made = "__dataclass_fields__" in vars(cls)
    own = {
        name: item
        for name, item in vars(cls).items()
        if not name.startswith("__") or (name == "__init__" and not is_made)
    }
    methods = {name: describe_method(item) for name, item in own.items() if is_method(item)}
    names = {*own, *inspect.get_annotations(cls)} - methods.keys()
    fields = {name for name in names if not name.startswith(("__", "_abc"))}
    return {"fields": sorted(fields), "methods": methods}


def is_method(item: Any) -> bool:
    return inspect.isfunction(item) or isinstance(item, (property, classmethod, staticmethod))


def describe_method(item: Any) -> dict[str, Any]:
    """Kind, whether abstract, and parameters as ``[name, kind, default]``; None is "no default"."""
    function = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
    return {
        "kind": "method" if inspect.isfunction(item) else type(item).__name__,
        "abstract": getattr(item, "__isabstractmethod__", False),
        "parameters": [
            [one.name, one.kind.name, None if one.default is one.empty else repr(one.default)]
            for one in inspect.signature(function).parameters.values()
        ],
    }


def _lay_out(value: Any, depth: int = 0) -> str:
    """JSON with a line for every method and every module: short to read, and to compare."""
    if depth == 4 or not isinstance(value, dict) or not value:
        return json.dumps(value, sort_keys=True)
    pad = " " * (depth + 1)
    lines = [f"{pad}{json.dumps(key)}: {_lay_out(value[key], depth + 1)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    found = record()
    (RECORDED / f"{found['version']}.json").write_text(_lay_out(found) + "\n")

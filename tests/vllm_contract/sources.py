"""What our own sources say, read as text: vLLM need not be installed."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path
from typing import Any

from tests.vllm_contract.record import RECORDED, describe_class

OURS = Path(__file__).parents[2] / "kvconnect" / "vllm"
VERSIONS = sorted(path.stem for path in RECORDED.glob("*.json"))
NEWEST = VERSIONS[-1]


@functools.cache
def recorded(version: str) -> dict[str, Any]:
    """The description of one released vLLM."""
    return json.loads((RECORDED / f"{version}.json").read_text())


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Our files by name."""
    return {path.name: ast.parse(path.read_text()) for path in sorted(OURS.glob("*.py"))}


def our_class(name: str) -> ast.ClassDef:
    """The class statement of one of our classes."""
    return next(
        node
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == name
    )


def lineage(name: str) -> list[ast.ClassDef]:
    """A class of ours and those of its bases that are ours too."""
    known = {
        node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    found = our_class(name)
    bases = [ast.unparse(base) for base in found.bases]
    return [found, *(node for base in bases if base in known for node in lineage(base))]


@functools.cache
def described(name: str) -> dict[str, Any]:
    """A class of ours as ``record`` describes vLLM's, with what it has from bases of ours."""
    merged: dict[str, Any] = {"fields": [], "attributes": [], "methods": {}}
    for node in reversed(lineage(name)):
        one = describe_class(node)
        merged["fields"] += one["fields"]
        merged["attributes"] += one["attributes"]
        merged["methods"].update(one["methods"])
    return merged


def complaints(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Why a call that is right for ``theirs`` would not be right for ``ours``. Both are methods."""
    found = []
    if ours["kind"] != theirs["kind"]:
        found.append(f"is a {ours['kind']}, not a {theirs['kind']}")
    kinds = {kind for _, kind, _ in ours["parameters"]}
    takes_more = "VAR_POSITIONAL" in kinds and "VAR_KEYWORD" in kinds
    by_name = {name: (kind, default) for name, kind, default in ours["parameters"]}
    for place, (name, kind, default) in enumerate(theirs["parameters"]):
        if kind in ("VAR_POSITIONAL", "VAR_KEYWORD"):
            if kind not in kinds:
                found.append(f"takes no {kind}")
        elif kind == "KEYWORD_ONLY":
            if name not in by_name and "VAR_KEYWORD" not in kinds:
                found.append(f"does not take {name}")
        elif place < len(ours["parameters"]) and ours["parameters"][place][0] == name:
            if by_name[name][0] != "POSITIONAL_OR_KEYWORD":
                found.append(f"takes {name} as {by_name[name][0]}")
            if default is not None and by_name[name][1] is None:
                found.append(f"has no default for {name}")
        elif not takes_more:
            found.append(f"does not take {name} in place {place}")
    wanted = {name for name, _, _ in theirs["parameters"]}
    for name, kind, default in ours["parameters"]:
        if name not in wanted and default is None and not kind.startswith("VAR_"):
            found.append(f"wants {name}")
    return found


def vllm_imports(tree: ast.Module) -> list[tuple[str, str]]:
    """What is imported from vLLM when the code runs, as (module, name), unless its absence is caught."""
    found: list[tuple[str, str]] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Try) and any(
            handler.type is not None and "ImportError" in ast.unparse(handler.type)
            for handler in node.handlers
        ):
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found.extend((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            found.extend((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(tree)
    return found

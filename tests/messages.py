"""Every message that an operator can see, with the place in the code: ``python -m tests.messages [KIND]``.

Read from the source, so that a new message is in the list by itself. ``…`` stands for a value.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "kvconnect"
VALUE = "…"

_LOGGED = {"warning", "error", "exception", "info", "log"}
_WARNED = {"warn": 1, "complain": 1, "_log": 2, "count_misuse": 3}
"""Functions that warn, with the position of the text among their arguments."""
_RAISED = {"ConfigError", "LayoutError", "PeerError", "EngineError", "FolderHeld"}
_FOUND = {"failure", "failure_if", "warning", "warning_if"}


class Message(NamedTuple):
    """``kind``: ``warning`` or ``info`` of the log, ``reason``, ``error``, or ``finding`` of the doctor.

    ``about``: the cause of a reason, the class of an error, or the subject of a finding.
    """

    kind: str
    about: str
    text: str
    place: str


def messages() -> list[Message]:
    """All messages of the package, in the order of its files."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        shown = str(path.relative_to(PACKAGE))
        for scope, call in _calls(tree, {}):
            line = f"{shown}:{call.lineno}"
            found += [Message(kind, about, text, line) for kind, about, text in _message(call, scope)]
    return found


def _message(call: ast.Call, scope: Mapping[str, list[str]]) -> Iterator[tuple[str, str, str]]:
    function, arguments = ast.unparse(call.func), call.args
    owner, _, name = function.rpartition(".")
    if "log" in owner and name in _LOGGED:
        level = "info" if name == "info" else "warning"
        if name == "log":
            if not any(word in ast.unparse(arguments[0]) for word in ("WARNING", "ERROR", "level")):
                return
            arguments = arguments[1:]
        yield from ((level, "", text) for text in _texts(arguments[0], scope))
    elif name in _WARNED and len(arguments) > _WARNED[name]:
        about = ast.unparse(arguments[0]).strip("'\"")
        yield from (("warning", about, text) for text in _texts(arguments[_WARNED[name]], scope))
    elif function in _RAISED and arguments:
        yield from (("error", function, text) for text in _texts(arguments[0], scope))
    elif owner == "Cause" and name.isupper() and arguments:
        yield from (("reason", name, text) for text in _texts(arguments[0], scope))
    elif function in _FOUND and len(arguments) > 2:
        first = 1 if function.endswith("_if") else 0
        about = " | ".join(_texts(arguments[first], scope))
        for text in _texts(arguments[first + 1], scope):
            yield "finding", about, text


def _calls(
    node: ast.AST, scope: Mapping[str, list[str]]
) -> Iterator[tuple[Mapping[str, list[str]], ast.Call]]:
    """The calls below a node, each with the texts that its function assigns to names."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        scope = dict(scope)
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
                scope.setdefault(part.targets[0].id, []).extend(_texts(part.value, {}))
    if isinstance(node, ast.Call):
        yield scope, node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, scope)


def _texts(node: ast.expr, scope: Mapping[str, list[str]]) -> list[str]:
    """The texts that an expression may have."""
    match node:
        case ast.Constant(value=str(text)):
            return [text.replace("%s", VALUE).replace("%d", VALUE).replace("%g", VALUE)]
        case ast.JoinedStr(values=parts):
            return ["".join(part.value if isinstance(part, ast.Constant) else VALUE for part in parts)]  # type: ignore[misc]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [first + last for first in _texts(left, scope) for last in _texts(right, scope)]
        case ast.IfExp(body=one, orelse=other):
            return [*_texts(one, scope), *_texts(other, scope)]
        case ast.Name(id=name) if scope.get(name):
            return scope[name]
        case _:
            return [VALUE]


if __name__ == "__main__":
    for message in messages():
        if sys.argv[1:] in ([], [message.kind]):
            print(f"{message.place}  {message.kind} {message.about}: {message.text}")

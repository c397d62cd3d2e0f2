"""Every message that an operator can see, with the place in the code: ``python -m tests.messages [KIND]``.

Read from the source, so that a new message is in the list by itself. ``…`` stands for a value.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "kvconnect"
VALUE = "…"

Names = Mapping[str, list[str]]

_LOGGED = ("warning", "error", "exception", "info", "log")
_COUNTED = "(further ones are only counted, as …)"
_WARNED = {
    "warn": (1, f"{{}} {_COUNTED}"),
    "complain": (1, f"side channel: turned away {{}} {_COUNTED}"),
    "warn_first": (2, f"{{}} … … {_COUNTED}"),
    "_log": (2, "offload, …: it {} (further ones are only counted)"),
    "misused": (1, f"a message of … was dropped: {{}} {_COUNTED}"),
}
"""Functions that warn: the position of the text among their arguments, and what they make of it."""
_RAISED = ("ConfigError", "LayoutError", "PeerError", "EngineError", "FolderHeld")
_FOUND = ("failure", "failure_if", "warning", "warning_if")
_PLACE = re.compile(r"%(?:\.\d)?[srdgfx]")
_RAW = (ast.List, ast.ListComp, ast.Set, ast.SetComp, ast.Dict, ast.DictComp, ast.Tuple)


class Message(NamedTuple):
    """``kind``: ``warning`` or ``info`` of the log, ``reason``, ``error``, or ``finding`` of the doctor.

    ``about``: the cause of a reason, the class of an error, the subject of a finding, or the label of a
    counted warning. ``raw``: a collection is shown as Python writes it.
    """

    kind: str
    about: str
    text: str
    place: str
    raw: bool


@functools.cache
def messages() -> list[Message]:
    """All messages of the package, in the order of its files."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    constants: dict[str, list[str]] = {}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.Assign):
                _learn(node, constants)
    found = []
    for path, tree in trees.items():
        for names, call in _calls(tree, constants):
            place = f"{path.relative_to(PACKAGE)}:{call.lineno}"
            found += [Message(*one, place, _is_raw(call)) for one in _message(call, names)]
    return found


def _message(call: ast.Call, names: Names) -> Iterator[tuple[str, str, str]]:
    function, arguments = ast.unparse(call.func), call.args
    owner, _, name = function.rpartition(".")
    if name in _LOGGED and "log" in owner:
        if name == "log" and not re.search("level|WARNING", ast.unparse(arguments[0])):
            return
        at = int(name == "log")
        kind = "info" if name == "info" else "warning"
        yield from ((kind, "", text) for text in _texts(arguments[at], names))
    elif name in _WARNED and len(arguments) > _WARNED[name][0]:
        at, shown = _WARNED[name]
        for about in _texts(arguments[0], names):
            yield from (("warning", about, shown.format(text)) for text in _texts(arguments[at], names))
    elif function in _RAISED and arguments:
        yield from (("error", function, text) for text in _texts(arguments[0], names))
    elif owner == "Cause" and name.isupper() and arguments:
        yield from (("reason", name, text) for text in _texts(arguments[0], names))
    elif function in _FOUND and len(arguments) > 2:
        first = int(function.endswith("_if"))
        about = " or ".join(_texts(arguments[first], names))
        yield from (("finding", about, text) for text in _texts(arguments[first + 1], names))


def _calls(node: ast.AST, names: Names) -> Iterator[tuple[Names, ast.Call]]:
    """The calls below a node, each with the texts that a name may stand for there."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        own: dict[str, list[str]] = {}
        for part in ast.walk(node):
            if isinstance(part, ast.Assign):
                _learn(part, own)
        names = {**names, **own}
    if isinstance(node, ast.Call):
        yield names, node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, names)


def _learn(node: ast.Assign, names: dict[str, list[str]]) -> None:
    if isinstance(node.targets[0], ast.Name):
        name, value = node.targets[0].id, node.value
        found = value.values if isinstance(value, ast.Dict) else [value]
        names.setdefault(name, []).extend(text for one in found for text in _texts(one, {}))


def _texts(node: ast.expr, names: Names) -> list[str]:
    """The texts that an expression may have."""
    match node:
        case ast.Constant(value=str(text)):
            return [_PLACE.sub(VALUE, text)]
        case ast.JoinedStr(values=parts):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [first + last for first in _texts(left, names) for last in _texts(right, names)]
        case ast.IfExp(body=one, orelse=other):
            return [*_texts(one, names), *_texts(other, names)]
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if names.get(name):
            return names[name]
        case _:
            return [VALUE]


def _is_raw(call: ast.Call) -> bool:
    values = (node.value for node in ast.walk(call) if isinstance(node, ast.FormattedValue))
    return any(
        isinstance(value, _RAW)
        or (isinstance(value, ast.Call) and ast.unparse(value.func) in ("sorted", "set", "dict"))
        for value in values
    )


if __name__ == "__main__":
    for message in messages():
        if sys.argv[1:] in ([], [message.kind]):
            print(f"{message.place}  {message.kind} {message.about}: {message.text}")

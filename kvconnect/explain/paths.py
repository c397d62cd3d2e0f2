"""Which paths are open from one rank to another, and all reasons why the others are closed. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvconnect.errors import LayoutError
from kvconnect.plan.align import TableAlignment, TableCard, align_tables, card_refusal
from kvconnect.plan.wire import Wire, align_wire

_PREFIX = "the two caches cannot be matched: "
_LAYER_REASON = re.compile(r"layer '([^']*)': (.*)")
_NEXT_REASON = re.compile(r"; (?=layer '|cache group \d)")


@dataclass(frozen=True)
class PathEnd:
    """What of a rank opens or closes paths: its setting ``path``, its slots, and its table."""

    path: str
    has_slots: bool
    card: TableCard


@dataclass(frozen=True)
class Paths:
    """The alignment of each path, None where the tables have none; ``closed`` has the reasons by path."""

    link: TableAlignment | None
    wire: Wire | None
    closed: dict[str, list[str]]


def paths_between(source: PathEnd, target: PathEnd, *, convert: bool) -> Paths:
    """Line up two ranks by both paths. A table may be any that a peer sent."""
    closed: dict[str, list[str]] = {"direct": [], "packed": []}
    link, wire = None, None
    for name, end in (("source", source), ("target", target)):
        if end.path != "auto":
            other = "packed" if end.path == "direct" else "direct"
            closed[other].append(f"the {name}'s path is {end.path!r}")
        if end.path != "direct" and not end.has_slots:
            closed["packed"].append(f"the {name} has no slots: num_slots is 0")
    if refusals := [refusal for end in (source, target) if (refusal := card_refusal(end.card))]:
        return Paths(None, None, {path: reasons + refusals for path, reasons in closed.items()})
    with reasons_in(closed["direct"]):
        link = align_tables(source.card, target.card)
    with reasons_in(closed["packed"]):
        wire = align_wire(source.card, target.card, convert=convert)
    return Paths(link, wire, closed)


@contextlib.contextmanager
def reasons_in(closed: list[str]) -> Iterator[None]:
    """Add the reasons of a ``LayoutError`` to those for which a path is closed."""
    try:
        yield
    except LayoutError as error:
        closed.extend(_reasons_of(error))


def _reasons_of(error: LayoutError) -> list[str]:
    """The reasons that an error lists, layers with the same one together."""
    found: dict[str, list[str]] = {}
    for reason in _NEXT_REASON.split(str(error).removeprefix(_PREFIX)):
        if of_layer := _LAYER_REASON.fullmatch(reason):
            found.setdefault(of_layer[2], []).append(of_layer[1])
        else:
            found.setdefault(reason, [])
    lines = []
    for reason, layers in found.items():
        many = f"layers {layers[0]} to {layers[-1]} ({len(layers)}): " if len(layers) > 1 else ""
        lines.append((many or "".join(f"layer {layer}: " for layer in layers)) + reason)
    return lines

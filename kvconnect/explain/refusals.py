"""Whether the caches of two ranks fit, and all reasons why they do not. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from kvconnect.errors import LayoutError
from kvconnect.plan.align import TableCard, card_refusal
from kvconnect.plan.wire import Wire, align_wire

_PREFIX = "the two caches cannot be matched: "
_LAYER_REASON = re.compile(r"layer '([^']*)': (.*)")
_NEXT_REASON = re.compile(r"; (?=layer '|cache group \d)")


def wire_between(source: TableCard, target: TableCard, *, convert: bool) -> tuple[Wire | None, list[str]]:
    """What two ranks send each other, and all reasons why they cannot. Tables may be any that peers sent."""
    refusals = [refusal for card in (source, target) if (refusal := card_refusal(card))]
    wire = None
    if not refusals:
        with reasons_in(refusals):
            wire = align_wire(source, target, convert=convert)
    return wire, refusals


@contextlib.contextmanager
def reasons_in(refusals: list[str]) -> Iterator[None]:
    """Add the reasons of a ``LayoutError`` to those for which two ranks do not fit."""
    try:
        yield
    except LayoutError as error:
        refusals.extend(_reasons_of(error))


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

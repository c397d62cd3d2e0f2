"""The reasons in a ``LayoutError``: one line for all layers that have the same one."""

from __future__ import annotations

import re

from kvconnect.errors import LayoutError

_PREFIX = "the two caches cannot be matched: "
_LAYER_REASON = re.compile(r"layer '([^']*)': (.*)")
_NEXT_REASON = re.compile(r"; (?=layer '|cache group \d)")


def reasons(error: LayoutError) -> list[str]:
    """The reasons that such an error lists, layers with the same one together."""
    found: dict[str, list[str]] = {}
    for reason in _NEXT_REASON.split(str(error).removeprefix(_PREFIX)):
        of_layer = _LAYER_REASON.fullmatch(reason)
        if of_layer:
            found.setdefault(of_layer[2], []).append(of_layer[1])
        else:
            found.setdefault(reason, [])
    return [_named(layers, reason) for reason, layers in found.items()]


def _named(layers: list[str], reason: str) -> str:
    if not layers:
        return reason
    if len(layers) == 1:
        return f"layer {layers[0]}: {reason}"
    return f"layers {layers[0]} to {layers[-1]} ({len(layers)}): {reason}"

"""Formats numbers and texts for a terminal."""

from __future__ import annotations

import textwrap

WIDTH = 80


def size(length_bytes: float) -> str:
    """Bytes as text, in the largest binary unit that keeps them at 1 or more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if length_bytes < 1024:
            return f"{length_bytes:.4g} {unit}"
        length_bytes /= 1024
    return f"{length_bytes:.4g} TiB"


def duration(duration_s: float) -> str:
    """Whole seconds, minutes, hours or days."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if duration_s >= length_s:
            return f"{duration_s / length_s:.0f}{unit}"
    return f"{max(duration_s, 0):.0f}s"


def printable(text: str) -> str:
    """Text of a peer or client without control characters, which could steer the terminal."""
    return "".join(one if one.isprintable() else " " for one in text)


def paragraph(head: str, text: str, indent: int) -> str:
    """A head and a text, made printable, in lines of ``WIDTH`` columns; the further ones are indented."""
    between = " " * indent
    return textwrap.fill(printable(text), WIDTH, initial_indent=printable(head), subsequent_indent=between)

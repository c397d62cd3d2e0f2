"""Identities of made-up nodes."""

from __future__ import annotations

from kvconnect.cache.identity import Identity


def named(model: str = "m", weights: str = "", **more: str) -> Identity:
    """Of a model and, if it has a name, of weights from files."""
    return Identity.of({"model": model, "weights": {"files": weights} if weights else {}, **more})

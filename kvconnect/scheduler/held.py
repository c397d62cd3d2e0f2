"""The requests that P holds, and what D is told of each.

A serving stack makes several requests of one where several answers are wanted, and the router hears of one of
them, whichever ends last. They have the same prompt: the first that ends is held, and the others are answered
with its parameters. Pure bookkeeping: a lease is forgotten once it was sent.
"""

from __future__ import annotations

from typing import Any


class Held:
    """Leases by request. ``parent`` is what children of one request have in common; others are their own."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._params: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, request_id: str, parent: str, params: dict[str, Any]) -> None:
        """A request is held, and this is what D is told."""
        self._parents[request_id] = parent
        self._params[parent] = params

    def params(self, parent: str) -> dict[str, Any] | None:
        """What D is told of a request with this parent that is held now."""
        params = self._params.get(parent)
        return None if params is None else dict(params)

    def reset(self) -> None:
        """What is held now is of no use to children that end later."""
        self._params.clear()

    def sent(self, request_id: str) -> None:
        """A lease is over."""
        parent = self._parents.pop(request_id, None)
        if parent is not None:
            self._params.pop(parent, None)

"""The transfers that a router announced to P: whose they are, from the request's arrival to its end.

A transfer id is good for one request at a time: a second one that names it is computed, and holds
nothing. Pure bookkeeping, bounded by what may be held, empty when idle.
"""

from __future__ import annotations


class Promises:
    """Handles of transfer ids that are in use, by the request that owns each."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._handles: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def make(self, request_id: str, handle: str) -> bool:
        """A request arrived that will be fetched under this handle. False: another one owns it."""
        return self._owners.setdefault(handle, request_id) == request_id and (
            self._handles.setdefault(request_id, handle) == handle
        )

    def owner(self, handle: str) -> str:
        """The request that owns a handle; empty where none does."""
        return self._owners.get(handle, "")

    def of(self, request_id: str) -> str | None:
        """The handle that a request owns."""
        return self._handles.get(request_id)

    def end(self, request_id: str) -> None:
        """The request is over: sent, or never held."""
        handle = self._handles.pop(request_id, None)
        if handle is not None:
            del self._owners[handle]

"""Which transfers are about to end, so that a step can wait for them: a seed must run the same every time.

Workers move KV in threads of their own. Of each transfer both sides' orders are known here; once both are
given the rest is a matter of time, and the steps that report it are then drawn from the seed.
"""

from __future__ import annotations

from typing import Any

Key = tuple[str, str]


class Links:
    """Transfers between the engines of one bench, by handle."""

    def __init__(self) -> None:
        self._held: dict[str, Key] = {}
        self._gone: set[str] = set()
        self._unwanted: set[str] = set()
        self._loads: dict[str, dict[str, str]] = {}
        self._awaited: dict[str, set[Key]] = {}
        self._reported: set[tuple[str, str, str]] = set()

    def awaited(self, engine: str) -> set[Key]:
        """What an engine's worker must report before its step is over. A copy."""
        return set(self._awaited.get(engine, ()))

    def ordered(self, engine: str, orders: Any) -> None:
        """A worker got its orders."""
        for withdrawn in orders.withdrawn:
            self._gone.add(withdrawn.handle)
            self._meet(withdrawn.handle)
        for hold in orders.holds:
            self._held[hold.handle] = (engine, hold.request_id)
            self._meet(hold.handle)
            if hold.handle in self._unwanted:
                self._release(hold.handle)
        for load in orders.loads:
            if load.refusal or load.prefix is not None:
                # By name: a source answers without a step of its own.
                self._await(engine, "recving", load.request_id)
            else:
                self._loads.setdefault(load.handle, {})[load.request_id] = engine
                self._meet(load.handle)
        for let_go in orders.let_go:
            self._release(let_go.handle)
        for request_id in orders.aborted:
            # The scheduler may not have heard of it yet.
            if (engine, "recving", request_id) not in self._reported:
                self._await(engine, "recving", request_id)
        for restore in orders.offload.restores:
            self._await(engine, "recving", restore.request_id)

    def ended(self, engine: str, kind: str, request_id: str) -> None:
        """A worker reported."""
        self._awaited.get(engine, set()).discard((kind, request_id))
        self._reported.add((engine, kind, request_id))
        if kind == "recving":
            for handle, loads in self._loads.items():
                if loads.get(request_id) == engine:
                    del loads[request_id]
                    self._release(handle)
                    break

    def _meet(self, handle: str) -> None:
        if handle in self._held or handle in self._gone:
            for request_id, engine in self._loads.get(handle, {}).items():
                self._await(engine, "recving", request_id)

    def _release(self, handle: str) -> None:
        if handle in self._held:
            engine, request_id = self._held.pop(handle)
            self._await(engine, "sending", request_id)
        else:
            self._unwanted.add(handle)

    def _await(self, engine: str, kind: str, request_id: str) -> None:
        self._awaited.setdefault(engine, set()).add((kind, request_id))

"""A request as a simulated serving stack knows it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulator.content import Prompt
from tests.simulator.scenario import SessionPlan

Done = Callable[["Request"], None]


class Stage(enum.Enum):
    """Where a request is. One that has ENDED may still have blocks that a peer touches."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    """One request at one node.

    ``ids`` are its blocks by group and position, ``left`` counts those that left a window. ``computed`` are
    tokens whose KV is in its blocks once ``is_computed``. ``outcome`` is set at its end: ``done``,
    ``failed``, ``aborted``. ``is_strange``: its KV comes from a stranger. ``is_forged``: its handle is of no
    use, and nothing may be loaded by it. ``checkpoints`` are where its state is wanted. ``session`` is what
    is to be done with the KV of its session; ``kv_hints``, ``session_id`` and ``cache_salt`` are what a stack
    that knows them hands on of it.
    """

    request_id: str
    prompt: Prompt
    max_tokens: int
    done: Done
    kv_transfer_params: Mapping[str, Any] | None = None
    stage: Stage = Stage.WAITING
    num_prompt: int = 0
    generated: int = 0
    computed: int = 0
    loaded: bool = False
    ids: list[list[int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    outcome: str = ""
    error: str = ""
    is_computed: Callable[[], bool] = lambda: True
    answer: Mapping[str, Any] | None = None
    is_strange: bool = False
    is_forged: bool = False
    checkpoints: tuple[int, ...] = ()
    session: SessionPlan | None = None
    kv_hints: Any = None
    session_id: str | None = None
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self.num_prompt + self.generated

    def cut(self, count: int) -> int:
        """How many of ``count`` tokens a step may compute, so that it ends where a state is wanted."""
        ends = (end - self.computed for end in self.checkpoints if end > self.computed)
        return min(count, min(ends, default=count))

    def blocks(self) -> tuple[list[int], ...]:
        """A copy of its blocks."""
        return tuple(list(ids) for ids in self.ids)

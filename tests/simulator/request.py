"""A request as a simulated node knows it: the reference node's, with what the simulation knows besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvconnect.node.request import Output, Request
from tests.simulator.memory import Prompt
from tests.simulator.scenario import SessionPlan


class SimRequest(Request):
    """One request at one node, whose tokens say no more than which text they are of.

    ``outcome`` is set at its end: ``done``, ``failed``, ``aborted``. What was computed of it is in its blocks
    once ``is_computed``. ``is_strange``: its KV comes from a stranger. ``is_forged``: its handle is of no
    use, and nothing may be loaded by it. ``session`` is what is to be done with the KV of its session;
    ``kv_hints``, ``session_id`` and ``cache_salt`` are what a stack that knows them hands on of it.
    """

    def __init__(
        self,
        name: str,
        prompt: Prompt,
        max_tokens: int,
        done: Callable[[SimRequest], None],
        params: Mapping[str, Any] | None = None,
        *,
        is_strange: bool = False,
        is_forged: bool = False,
        session: SessionPlan | None = None,
    ) -> None:
        tokens = [prompt.prefix] * min(prompt.prefix_tokens, prompt.num_tokens)
        tokens += [prompt.text] * (prompt.num_tokens - len(tokens))
        super().__init__(name, tokens, max_tokens, self._take, params)
        self.prompt, self.done = prompt, done
        self.is_strange, self.is_forged, self.session = is_strange, is_forged, session
        self.outcome = ""
        self.answer: Mapping[str, Any] | None = None
        self.is_computed: Callable[[], bool] = lambda: True
        self.kv_hints: Any = None
        self.cache_salt = prompt.salt or None
        if session is not None and not session.in_params:
            self.kv_hints, self.session_id = session.envelope, session.session_id

    @property
    def ids(self) -> list[list[int]]:
        return self.blocks.ids

    def end(self, outcome: str, answer: Mapping[str, Any] | None = None) -> None:
        """It has ended so, and whoever asked is told."""
        self.outcome, self.answer = outcome, answer
        self.done(self)

    def _take(self, output: Output) -> None:
        if output.failure is not None:
            self.end("failed")
        elif output.finish_reason is not None:
            done = output.finish_reason == "length"
            self.end("done" if done else "aborted", output.kv_transfer_params)

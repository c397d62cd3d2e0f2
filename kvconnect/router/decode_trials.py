"""Tries what decode nodes take from a prefill node, by giving it to them: a first token, a chat's tokens.

A server samples its own first token if it lacks kvconnect's logits processor, or if its runner takes none, as
vLLM's first runner with speculative decoding. A chat's tokens are taken by vLLM 0.32 and newer.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvconnect.config import FIRST_TOKEN_KEY
from kvconnect.router.bodies import PARAMS, at
from kvconnect.router.pool import NodeState, Pool
from kvconnect.router.upstream import Upstream

logger = logging.getLogger("kvconnect.router")

_PROMPT = [*range(5, 37)]
"""Token ids that every vocabulary has; longer than one block of some nodes."""
_TOKENS = (7, 8)
"""Two tokens: no node samples both after the same prompt unless it is given them."""
_CHAT = [{"role": "user", "content": "a"}]
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a node takes a first token, and whether it takes the tokens of a chat."""

    first_token: bool
    chat_tokens: bool


class DecodeTrials:
    """The verdict on each decode node, tried once each time it enters rotation. Owned by one event loop."""

    def __init__(self, pool: Pool, upstream: Upstream) -> None:
        self._pool = pool
        self._upstream = upstream
        # By URL and number of ejections: a node that returns may be another server.
        self._verdicts: dict[tuple[str, int], Verdict] = {}

    @property
    def take_first_tokens(self) -> bool:
        """Whether all nodes that take requests begin with a given token."""
        return all(verdict is not None and verdict.first_token for verdict in self._current())

    @property
    def take_chat_tokens(self) -> bool:
        """Whether all nodes that take requests spare tokenising a chat whose tokens they are given."""
        return all(verdict is not None and verdict.chat_tokens for verdict in self._current())

    def _current(self) -> list[Verdict | None]:
        nodes = self._pool.in_rotation()
        return [self._verdicts.get((node.url, node.ejections)) for node in nodes] or [None]

    async def run(self) -> None:
        """Test each healthy node without a verdict. Raises nothing."""
        nodes = self._pool.view()
        current = {(node.url, node.ejections): node.state for node in nodes}
        # Nodes that left are forgotten: addresses of a name come and go.
        self._verdicts = {one: passed for one, passed in self._verdicts.items() if one in current}
        due = [
            one for one, state in current.items() if state is NodeState.HEALTHY and one not in self._verdicts
        ]
        await asyncio.gather(*(self._try(*one) for one in due))

    async def _try(self, url: str, ejections: int) -> None:
        models = await self._upstream.ask(url, "/v1/models", timeout_s=_TIMEOUT_S)
        name = at(models, "data", 0, "id")
        if name is None:
            # No answer yet, or no such API: the next run tries again.
            return
        begun = []
        for token in _TOKENS:
            body = {"model": name, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
            body |= {"return_token_ids": True, PARAMS: {FIRST_TOKEN_KEY: token}}
            answer = await self._upstream.ask(url, "/v1/completions", body, timeout_s=_TIMEOUT_S)
            if answer is None:
                return
            begun.append(at(answer, "choices", 0, "token_ids"))
        body = {"model": name, "messages": _CHAT, "max_tokens": 1, PARAMS: {"prompt_token_ids": _PROMPT}}
        chat = await self._upstream.ask(url, "/v1/chat/completions", body, timeout_s=_TIMEOUT_S)
        if chat is None:
            return
        counted = at(chat, "usage", "prompt_tokens")
        verdict = Verdict(begun == [[token] for token in _TOKENS], counted == len(_PROMPT))
        self._verdicts[url, ejections] = verdict
        if not verdict.first_token:
            logger.warning(
                "decode node %s samples a first token of its own: clients get theirs from decode nodes. Is "
                "kvconnect installed beside it? vLLM's first model runner takes no logits processor with "
                "speculative decoding",
                url,
            )

"""Tries what decode nodes take from a prefill node, by giving it to them: a first token, a chat's tokens.

A server samples its own first token if it lacks kvconnect's logits processor, or if its runner takes none, as
vLLM's first runner with speculative decoding. A chat's tokens are taken by vLLM 0.32 and newer.
"""

from __future__ import annotations

import asyncio
import logging

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


FIRST_TOKEN, CHAT_TOKENS = "first token", "chat tokens"
"""What a node may take: a first token to begin with, and the tokens of a chat, which it need not tokenise."""


class DecodeTrials:
    """What each decode node takes, tried once each time it enters rotation. Owned by one event loop."""

    def __init__(self, pool: Pool, upstream: Upstream) -> None:
        self._pool = pool
        self._upstream = upstream
        # By URL and number of ejections: a node that returns may be another server.
        self._taken: dict[tuple[str, int], set[str]] = {}

    def all_take(self, what: str) -> bool:
        """Whether each node in rotation was seen to take this; False without a node."""
        nodes = self._pool.in_rotation()
        return bool(nodes) and all(what in self._taken.get((node.url, node.ejections), ()) for node in nodes)

    async def run(self) -> None:
        """Try each healthy node that was not tried. Raises nothing."""
        nodes = self._pool.view()
        current = {(node.url, node.ejections): node.state for node in nodes}
        # Nodes that left are forgotten: addresses of a name come and go.
        self._taken = {one: taken for one, taken in self._taken.items() if one in current}
        healthy = [one for one, state in current.items() if state is NodeState.HEALTHY]
        due = [one for one in healthy if one not in self._taken]
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
        takes = {
            FIRST_TOKEN: begun == [[token] for token in _TOKENS],
            CHAT_TOKENS: at(chat, "usage", "prompt_tokens") == len(_PROMPT),
        }
        self._taken[url, ejections] = {what for what, is_taken in takes.items() if is_taken}
        if not takes[FIRST_TOKEN]:
            logger.warning(
                "decode node %s samples a first token of its own: clients get theirs from decode nodes. Is "
                "kvconnect installed beside it? vLLM's first model runner takes no logits processor with "
                "speculative decoding",
                url,
            )

"""Policy ``prefix``: the cost of a request at each node, by how much of its prompt the node has.

The pool takes the node with the least sum of this cost and its outstanding work, so that load outweighs a
short prefix. Where the tokens of a prompt are unknown, requests go to the least loaded node.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvconnect.addresses import join_address
from kvconnect.router import bodies
from kvconnect.router.pool import Pool
from kvconnect.router.prefix_index import ExtraKeys, Hit, PrefixIndex
from kvconnect.router.router_metrics import RouterMetrics
from kvconnect.router.upstream import Headers, Upstream, UpstreamError, UpstreamRequest

_TOKENIZE_S = 2.0
_RESTORED = 0.15
"""Cost of a token that a node restores from below its device, relative to a computed one: a host tier
restored 8 700 tokens in 40 ms on an H200, which computes them in 300 ms."""
_PULLED = 0.2
"""The same for a token pulled from a peer."""
_MOST_SESSIONS, _LONGEST_SESSION = 1 << 16, 256
_LEAST_PULLED = 256
"""Fewer tokens are not worth a pull from a peer."""


@dataclass(frozen=True)
class NodeChoice:
    """How much of a request's prompt each node is known to have.

    ``num_tokens`` is the prompt's length and ``hits`` the tokens that each node has. ``sources`` are the
    known side-channel addresses by node. ``last`` is the node that served the ``session`` before, if any.
    """

    num_tokens: int = 0
    hits: Mapping[str, Hit] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    session: str = ""
    last: str = ""

    @property
    def work(self) -> Mapping[str, float]:
        best = max((self.hits[node].num_tokens for node in self.sources if node in self.hits), default=0)
        return {node: self._work(hit, best) for node, hit in self.hits.items()}

    def _work(self, hit: Hit, best: int) -> float:
        pulled = best - hit.num_tokens if best - hit.num_tokens >= _LEAST_PULLED else 0
        restored = hit.num_tokens - hit.device_tokens
        return self.num_tokens - hit.num_tokens - pulled + _RESTORED * restored + _PULLED * pulled

    def params(self, chosen: str, broken: Collection[str] = ()) -> dict[str, Any]:
        """Parameters that name to the chosen node a peer with more of the prompt, and not a broken one."""
        own = self.hits.get(chosen, Hit()).num_tokens
        known = [node for node in self.sources if node in self.hits and node not in broken]
        others = {node: self.hits[node].num_tokens for node in known}
        best = max(others, key=others.__getitem__, default=chosen)
        if best == chosen or others[best] - own < _LEAST_PULLED:
            return {}
        return {"kv_sources": [self.sources[best]]}


class Placing:
    """Finds the tokens of requests, and how much of them each node of a pool has."""

    def __init__(self, index: PrefixIndex, upstream: Upstream) -> None:
        self.index, self.sources, self._upstream = index, dict[str, str](), upstream
        # Each session's last node, least recently used first.
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def learn(self, node: str, channel: bodies.SideChannel) -> None:
        """A node's answer named its side channel."""
        self.sources[node] = join_address(channel.host, channel.port)

    def forget(self, node: str) -> None:
        """Drop the blocks and the side channel known of a node."""
        self.index.forget(node)
        self.sources.pop(node, None)
        self._metrics.known_blocks.set(len(self.index))

    def keep(self, session: str, node: str) -> None:
        """Record the node of a session, if there is a session."""
        if session:
            self._sessions[session] = node
            self._sessions.move_to_end(session)
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)

    async def place(self, pool: Pool, headers: Headers, body: Mapping[str, Any]) -> NodeChoice:
        """A choice for the request; without hits for several prompts or unknown tokens."""
        tokens = await self._tokens(pool, headers, body)
        named = [value for key, value in headers if key.lower() == "x-session-id"]
        session = str(body.get("session_id") or (named[0] if named else ""))[:_LONGEST_SESSION]
        last = self._sessions.get(session, "")
        if not tokens:
            self._metrics.placements.labels("load").inc()
            return NodeChoice(session=session, last=last)
        hits = self.index.hits(pool.urls, tokens, self._extra_keys(body))
        best = max((hit.num_tokens for hit in hits.values()), default=0)
        self._metrics.placements.labels("prefix" if best else "load").inc()
        return NodeChoice(len(tokens), hits, self.sources, session, last)

    @property
    def _metrics(self) -> RouterMetrics:
        return self._upstream.metrics

    def _extra_keys(self, body: Mapping[str, Any]) -> Sequence[ExtraKeys]:
        """Extra keys as vLLM publishes them: the adapter of every block, and a salt of the first."""
        # The router does not refuse invalid values: the node does, and no block matches them.
        model, salt = (
            value.encode(errors="replace").decode() if isinstance(value := body.get(key), str) else ""
            for key in ("model", "cache_salt")
        )
        adapter = [model] if model in self.index.adapters else []
        return [[*adapter, salt], adapter] if salt else [adapter] if adapter else []

    async def _tokens(self, pool: Pool, headers: Headers, body: Mapping[str, Any]) -> Sequence[int]:
        prompt = body.get("prompt", body.get("token_ids"))
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, list):
            is_tokens = all(isinstance(token, int) and 0 <= token < 1 << 31 for token in prompt)
            return prompt if is_tokens else ()
        asked = {key: value for key, value in body.items() if key in _OF_TOKENIZE}
        if isinstance(prompt, str):
            asked["prompt"] = prompt
        if "prompt" not in asked and "messages" not in asked:
            return ()
        try:
            return await asyncio.wait_for(self._tokenized(pool, headers, asked), _TOKENIZE_S)
        except (UpstreamError, asyncio.TimeoutError, ValueError):
            # A node without /tokenize is no error.
            return ()

    async def _tokenized(self, pool: Pool, headers: Headers, asked: Mapping[str, Any]) -> Sequence[int]:
        request = UpstreamRequest("POST", "/tokenize", bodies.identity_encoding(headers), asked)
        async with self._upstream.send(pool, request, retry=False) as answer:
            if answer.head.status != 200:
                return ()
            return msgspec.json.decode(await self._upstream.read_whole(answer), type=_Tokens).tokens


class _Tokens(msgspec.Struct):
    tokens: list[int]


_OF_TOKENIZE = frozenset(
    {
        *("model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "mm_processor_kwargs"),
    }
)
"""Fields of a request that its tokens depend on, and that /tokenize takes."""

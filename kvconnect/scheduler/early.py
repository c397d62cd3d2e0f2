"""Loads that may get their blocks on D before P holds what they fetch.

Where a router asks both nodes at once, a load that has its blocks when P has computed the first chunk saves
time. It also holds blocks of D while it waits for blocks of P, and every other request does the opposite: P
holds blocks for it while it waits for blocks of D. Unbounded, both pools fill, and each waits for the other.

Why no cycle remains. A load is early if it was ordered before P was known to hold its KV, and the reserve is
what the longest request needs. Early loads never take the reserve, nor the last place among the loads that a
worker fetches at one time. So all that P holds is fetched in the end: D's blocks, those of early loads apart,
are of requests that run, or that fetch what P holds, and these end without P; then the reserve is enough for
any one request, so that the first in D's queue gets its blocks, and its load a place. What was fetched is
free again on P, and what waits there, prefills of early loads too, gets it in its turn: prefills that run on
P wait for each other only, and are preempted. A request that may not begin early waits in D's queue without a
block, which closes no cycle, until P holds its KV or never will; P is asked for that when it first has to
wait.

That is so between nodes that prefill and nodes that decode. Two that do both for each other have one pool for
both ends; there a wait may last until a lease is over.
"""

from __future__ import annotations

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.scheduler.stack import LongestRequest


class EarlyLoads:
    """The loads under way that P did not hold when they were ordered, and the room for more of them.

    Args:
        cache: all groups share one pool, its blocks and the null block.
        longest: what the reserve is for; None where the stack does not say: nothing is reserved.
        max_loads: how many a worker fetches at one time.
    """

    def __init__(self, cache: KVCacheConfig, longest: LongestRequest | None, max_loads: int) -> None:
        self._groups = [group for group in cache.groups if group.has_cache]
        reserve = self._blocks(longest.num_tokens, longest.step_tokens) if longest is not None else 0
        self._most_blocks = max(0, cache.num_blocks - 1 - reserve)
        self._most_loads = max(0, max_loads - 1)
        self._blocks_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._blocks_of)

    def may_begin(self, num_tokens: int) -> bool:
        """Whether there is room for a request of so many tokens."""
        blocks = sum(self._blocks_of.values()) + self._blocks(num_tokens)
        return len(self._blocks_of) < self._most_loads and blocks <= self._most_blocks

    def begin(self, request_id: str, num_tokens: int) -> None:
        """An early load is ordered."""
        self._blocks_of[request_id] = self._blocks(num_tokens)

    def end(self, request_id: str) -> None:
        """A load is over."""
        self._blocks_of.pop(request_id, None)

    def _blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Blocks of a request of so many tokens, at most."""
        return sum(group.most_blocks(num_tokens, step_tokens) for group in self._groups)

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

from collections.abc import Iterable, Sequence

from kvconnect.cache.specs import KVCacheGroup
from kvconnect.scheduler.stack import LongestRequest


class EarlyLoads:
    """How many loads are under way that P did not hold yet, and which handles P has settled since.

    Args:
        num_blocks: of the pool that all groups share, with its null block.
        longest: what the reserve is for; None where the stack does not say: nothing is reserved.
        max_loads: how many a worker fetches at one time.
    """

    def __init__(
        self, groups: Sequence[KVCacheGroup], num_blocks: int, longest: LongestRequest | None, max_loads: int
    ) -> None:
        self._groups = [group for group in groups if group.has_cache]
        reserve = self._blocks(longest.num_tokens, longest.step_tokens) if longest is not None else 0
        self._most_blocks = max(0, num_blocks - 1 - reserve)
        self._most_loads = max(0, max_loads - 1)
        self._blocks_of: dict[str, int] = {}
        self._settled: set[str] = set()
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        return len(self._blocks_of) + len(self._waiting)

    def may_begin(self, handle: str, num_tokens: int) -> bool:
        """Whether a request of so many tokens may get blocks: P has settled its handle, or there is room."""
        if handle in self._settled:
            return True
        blocks = sum(self._blocks_of.values()) + self._blocks(num_tokens)
        return len(self._blocks_of) < self._most_loads and blocks <= self._most_blocks

    def wait(self, handle: str) -> bool:
        """A request has to wait for P. True: for the first time, and P is to be asked."""
        is_first = handle not in self._waiting
        self._waiting.add(handle)
        return is_first

    def settled(self, handles: Iterable[str]) -> None:
        """P holds what these stand for, or never will."""
        self._settled.update(self._waiting.intersection(handles))

    def begin(self, request_id: str, handle: str, num_tokens: int) -> None:
        """A load is ordered."""
        if handle not in self._settled:
            self._blocks_of[request_id] = self._blocks(num_tokens)
        self.forget(handle)

    def forget(self, handle: str) -> None:
        """No request waits for this handle any more."""
        self._waiting.discard(handle)
        self._settled.discard(handle)

    def end(self, request_id: str) -> None:
        """A load is over."""
        self._blocks_of.pop(request_id, None)

    def _blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Blocks of a request of so many tokens, at most."""
        return sum(group.most_blocks(num_tokens, step_tokens) for group in self._groups)

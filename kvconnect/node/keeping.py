"""What a connector that keeps blocks in other memory asks of each step, and is told of it.

Where prefill chunks end so that states can be kept, and which tokens and blocks a step has added. It knows
nothing of queues or tensors; all calls come from the engine loop thread.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.node.request import Request
from kvconnect.node.step import Step
from kvconnect.orders import RequestView


class KeeperHooks(Protocol):
    """What the scheduler half of such a connector is asked and told besides."""

    def checkpoints(self, request: RequestView) -> Sequence[int]:
        """Numbers of tokens, rising, after which the state of a request is wanted; once it was admitted."""
        ...

    def state_at(self, request_id: str, group: int, num_tokens: int, block_id: int) -> None:
        """Until the next step a block holds the state after exactly so many tokens."""
        ...

    @property
    def due(self) -> Mapping[str, int]:
        """By request the number of tokens from which ``computed`` is of interest without new blocks."""
        ...

    def computed(
        self,
        request_id: str,
        num_computed_tokens: int,
        new_block_ids: Sequence[Sequence[int]] | None,
    ) -> None:
        """A request has so many tokens now, and got these blocks since its admission or the last call."""
        ...

    def is_restored(self, request_id: str) -> bool:
        """Whether what is, or was last, loaded for this request comes from memory of this node."""
        ...


def align_tokens(config: KVCacheConfig) -> int:
    """The least number of tokens that is a whole number of blocks in every group that keeps tokens."""
    sizes = [group.block_size for group in config.groups if group.has_cache and not group.is_state]
    return math.lcm(*sizes)


class Keeping:
    """Talks to ``keeper`` about the requests of a node with this cache."""

    def __init__(self, keeper: KeeperHooks, config: KVCacheConfig) -> None:
        self.keeper = keeper
        self._states = [index for index, group in enumerate(config.groups) if group.is_state]
        self._align = align_tokens(config)

    def admit(self, request: Request, count: int) -> int:
        """A request was admitted: find out where its chunks end. Returns the tokens of the first."""
        if not self._states:
            return count
        request.checkpoints = tuple(self.keeper.checkpoints(request))
        return self.cut(request, request.num_computed_tokens, count)

    def cut(self, request: Request, computed: int, count: int) -> int:
        """How many of ``count`` tokens after ``computed`` the next chunk may take."""
        places = request.checkpoints
        index = bisect_right(places, computed)
        return count if index == len(places) else min(count, places[index] - computed)

    def tell(self, step: Step, find: Callable[[str], Request | None]) -> None:
        """A step was computed, and nobody was given other blocks since."""
        given, due = dict([*step.new_rows, *step.grown_rows]), self.keeper.due
        for chunk in step.chunks:
            end = chunk.start + len(chunk.token_ids)
            added = given.get(chunk.row)
            if self._states and end % self._align == 0:
                request = find(chunk.request_id)
                assert request is not None
                assert request.blocks is not None
                for group in self._states:
                    self.keeper.state_at(chunk.request_id, group, end, request.blocks.ids[group][-1])
            if added is not None or end >= due.get(chunk.request_id, 0):
                self.keeper.computed(chunk.request_id, end, added)

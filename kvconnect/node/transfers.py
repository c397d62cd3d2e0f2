"""The node's side of the connector's contract, and the blocks that transfers keep alive."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.node.request import EngineStep, Request
from kvconnect.outcome import Reason
from kvconnect.transfer import stack
from kvconnect.transfer.orders import Results
from kvconnect.transfer.stack import Computed, SchedulerHooks, StateBlock

logger = logging.getLogger(__name__)


def align_tokens(config: KVCacheConfig) -> int:
    """The least number of tokens that is a whole number of blocks in every group that keeps tokens."""
    return math.lcm(*(group.block_size for group in config.groups if group.has_cache and not group.is_state))


class Transfers:
    """The requests whose blocks a transfer keeps: loads under way, and finished prefills not yet sent."""

    def __init__(self, hooks: SchedulerHooks, config: KVCacheConfig, *, recompute_failed_loads: bool) -> None:
        self.hooks = hooks
        self._states = [index for index, group in enumerate(config.groups) if group.is_state]
        self._align = align_tokens(config)
        self.recompute_failed_loads = recompute_failed_loads
        self._has_warned = False
        # Loads under way, those among them whose request was aborted, and ended requests to be fetched.
        self.loading: dict[str, Request] = {}
        self.abandoned: dict[str, Request] = {}
        self.unsent: dict[str, Request] = {}

    @property
    def num_outstanding(self) -> int:
        """Requests that a result is awaited for."""
        return len(self.loading) + len(self.abandoned) + len(self.unsent)

    def first_chunk(self, request: Request, count: int) -> int:
        """A request was admitted: find out where its chunks end. Returns the tokens of the first."""
        if self._states:
            request.checkpoints = tuple(self.hooks.checkpoints(request))
        return self.cut(request, request.num_computed_tokens, count)

    def cut(self, request: Request, computed: int, count: int) -> int:
        """How many of ``count`` tokens after ``computed`` the next chunk may take."""
        places = request.checkpoints
        index = bisect_right(places, computed)
        return count if index == len(places) else min(count, places[index] - computed)

    def launched(self, step: EngineStep, requests: Mapping[str, Request]) -> None:
        """A step of these requests was computed, and its blocks are still theirs."""
        due = self.hooks.due
        if not due:
            return
        added, computed, states = dict([*step.new_rows, *step.grown_rows]), [], []
        for chunk in step.chunks:
            end, new_block_ids = chunk.start + len(chunk.token_ids), added.get(chunk.row)
            if chunk.request_id not in due:
                continue
            if self._states and end % self._align == 0:
                request = requests[chunk.request_id]
                assert request.blocks is not None
                for group in self._states:
                    block_id = request.blocks.ids[group][-1]
                    states.append(StateBlock(chunk.request_id, group, end, block_id))
            if new_block_ids is not None or end >= due[chunk.request_id]:
                computed.append(Computed(chunk.request_id, end, new_block_ids))
        self.hooks.launched(stack.Step(computed, states))

    def end(
        self, request: Request, block_ids: tuple[list[int], ...], *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Notify the connector that a request ended. Returns if its blocks are free now, and parameters."""
        keep, params = self.hooks.request_finished(request, block_ids, delivered=delivered)
        if self.loading.pop(request.request_id, None) is not None:
            self.abandoned[request.request_id] = request
            return False, params
        if keep:
            self.unsent[request.request_id] = request
        return not keep, params

    def settle(self, results: Results) -> tuple[list[Request], list[tuple[Request, Reason | None]]]:
        """Requests whose blocks are free now, and loads that ended: those that failed, with the reason."""
        self.hooks.update_results(results)
        freed, ended, unknown = [], [], []
        for request_id in results.sent:
            if request_id in self.unsent:
                freed.append(self.unsent.pop(request_id))
            else:
                unknown.append(request_id)
        for request_id in results.received:
            if request_id in self.abandoned:
                freed.append(self.abandoned.pop(request_id))
            elif request_id in self.loading:
                ended.append((self.loading.pop(request_id), results.failed.get(request_id)))
            else:
                unknown.append(request_id)
        if unknown and not self._has_warned:
            self._has_warned = True
            logger.error("the connector reported requests that nothing is awaited for: %s", unknown)
        return freed, ended

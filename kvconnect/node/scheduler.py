"""Decides which requests run, wait or load, the tokens of each step, and the outputs for clients.

Requests are served in order of arrival with a token budget per step. When blocks run out, the latest running
request is preempted and recomputed later. All calls come from one thread.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvconnect.cache.specs import KVCacheGroup
from kvconnect.errors import KVConnectError, LocalError
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.node.block_manager import BlockManager, CacheHit
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import EngineStep, Failure, Output, Request, RequestState, ScheduledChunk
from kvconnect.transfer import stack
from kvconnect.transfer.orders import Results
from kvconnect.transfer.stack import Computed, StateBlock

logger = logging.getLogger(__name__)


def align_tokens(groups: Sequence[KVCacheGroup]) -> int:
    """The least number of tokens that is a whole number of blocks in every group that keeps tokens."""
    return math.lcm(*(group.block_size for group in groups if group.has_cache and not group.is_state))


@dataclass
class Counts:
    """Totals since the start."""

    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Scheduler:
    """Plans steps with blocks from ``manager``, and asks and tells the connector by its ``hooks``."""

    def __init__(
        self,
        options: NodeOptions,
        manager: BlockManager,
        hooks: SchedulerHalf,
        *,
        recompute_failed_loads: bool,
    ) -> None:
        self.options = options
        self.manager = manager
        self.hooks = hooks
        self._recompute_failed_loads = recompute_failed_loads
        self._states = [index for index, group in enumerate(manager.groups) if group.is_state]
        self._align = align_tokens(manager.groups)
        self.counts = Counts()
        # Requests without a final answer, by id.
        self.requests: dict[str, Request] = {}
        # Ended requests whose blocks a transfer still reads or writes, by id.
        self.kept: dict[str, Request] = {}
        # Outputs for clients, in order; the engine empties it.
        self.outputs: list[tuple[Request, Output]] = []
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_rows = list(range(options.max_num_seqs))[::-1]

    # --- coming and going -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``LocalError`` if its id is in use."""
        if request.request_id in self.requests or request.request_id in self.kept:
            raise LocalError(f"request id {request.request_id!r} is already in use")
        request.blocks = self.manager.new_request(request.cache_salt or "")
        self.requests[request.request_id] = request
        self.hooks.new_request(request)
        try:
            request.truncate(self.hooks.prefill_tokens(request))
        except KVConnectError as error:
            self._fail(request, Failure(400, str(error)))
            return
        self.counts.prompt_tokens += request.num_prompt_tokens
        if request.num_prompt_tokens == 0:
            # A one-token prompt of a recurrent model: the decode node computes all of it.
            self._end(request, Output(finish_reason="length"))
            return
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request without an answer; a request that has ended is ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._leave_queues(request)
            self.counts.aborted += 1
            self._end(request, Output(finish_reason="abort"), delivered=False)

    def fail_all(self, failure: Failure) -> None:
        """Fail every request without a report to the connector: the engine loop has ended."""
        self.outputs.extend((request, Output(failure=failure)) for request in self.requests.values())
        self.requests.clear()
        self.waiting.clear()
        self.running.clear()

    def by_state(self) -> dict[str, int]:
        """The number of requests in each state, without ended ones that hold no blocks."""
        counts = Counter(request.state for request in (*self.requests.values(), *self.kept.values()))
        return {state.value: counts[state] for state in RequestState if state is not RequestState.FINISHED}

    def _fail(self, request: Request, failure: Failure) -> None:
        self.counts.failed += 1
        self._end(request, Output(failure=failure), delivered=False)

    def _end(self, request: Request, output: Output, *, delivered: bool = True) -> None:
        """Settle the request's blocks with the connector, then queue its last output.

        ``delivered``: the request has all its tokens.
        """
        del self.requests[request.request_id]
        self.counts.finished += delivered
        keep, params = self.hooks.request_finished(request, request.blocks.snapshot(), delivered=delivered)
        if request.state is RequestState.WAITING_FOR_KV:
            request.state = RequestState.ABORTED_WHILE_LOADING
        else:
            request.state = RequestState.WAITING_TO_BE_FETCHED if keep else RequestState.FINISHED
        if request.state is RequestState.FINISHED:
            self.manager.free(request.blocks)
        else:
            self.kept[request.request_id] = request
        given = params if delivered else None
        last = replace(output, kv_transfer_params=given, cached_tokens=request.cached_tokens)
        self.outputs.append((request, last))

    def _leave_queues(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._release_row(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)

    def _release_row(self, request: Request) -> None:
        assert request.row is not None
        self._free_rows.append(request.row)
        request.row = None

    # --- one step ---------------------------------------------------------------------------------

    def schedule(self) -> EngineStep:
        """Plan the next step's tokens and allocate their blocks."""
        step = EngineStep()
        budget = self.options.max_num_batched_tokens
        preempted = self.counts.preemptions
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = self._chunk_tokens(request, budget)
            if not self._grow_running(request, count, step):
                break
            self._add_chunk(request, count, step)
            budget -= count
            index += 1
        if self.counts.preemptions == preempted:
            self._admit(budget, step)
        return step

    def _chunk_tokens(self, request: Request, budget: int) -> int:
        """How many further tokens a step computes, at most ``budget``."""
        computed, places = request.num_computed_tokens, request.checkpoints
        following = bisect_right(places, computed)
        return min(request.num_tokens, computed + budget, *places[following : following + 1]) - computed

    def _add_chunk(self, request: Request, count: int, step: EngineStep) -> None:
        assert request.row is not None
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        token_ids, samples = request.token_ids[start:end], end == request.num_tokens
        step.chunks.append(ScheduledChunk(request.request_id, request.row, start, token_ids, samples))

    def _grow_running(self, request: Request, count: int, step: EngineStep) -> bool:
        """Allocate a running request's next blocks, preempting later requests. False: preempted itself."""
        assert request.row is not None
        computed = request.num_computed_tokens
        while (grown := self.manager.grow(request.blocks, None, computed, computed + count)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if any(grown.new_ids):
            step.grown_rows.append((request.row, grown.new_ids))
        step.new_block_ids_to_zero += grown.new_block_ids_to_zero
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release_row(request)
        self._begin_anew(request)
        request.preemptions += 1
        self.counts.preemptions += 1
        self.waiting.appendleft(request)

    def _begin_anew(self, request: Request) -> None:
        self.manager.free(request.blocks)
        request.num_computed_tokens = 0
        request.loaded = False
        request.state = RequestState.WAITING
        self.hooks.preempted(request.request_id)

    def _admit(self, budget: int, step: EngineStep) -> None:
        """Start waiting requests in order.

        When one does not fit, only requests with loaded blocks may overtake it: they need no more blocks, and
        if they waited behind it, both could wait for ever.
        """
        blocked = False
        for request in list(self.waiting):
            if budget <= 0 or not self._free_rows:
                return
            if blocked and not request.loaded:
                continue
            taken = self._admit_one(request, budget, step)
            if taken is None:
                blocked = True
            else:
                budget -= taken

    def _admit_one(self, request: Request, budget: int, step: EngineStep) -> int | None:
        """Start or load one request. Returns the budget tokens that it takes; None: it does not fit now."""
        hit: CacheHit | None = None
        external: int | None = 0
        computed = request.num_computed_tokens
        if computed == 0 and not request.loaded:
            hit = self.manager.find_hit(request.blocks, request.token_ids)
            computed = hit.num_tokens
            external = self._ask_connector(request, hit)
            if external is None:
                step.deferred = step.deferred or request.state is RequestState.WAITING
                return 0
        if external:
            return self._start_load(request, hit, external, step)
        count = min(request.num_tokens - computed, budget)
        # Room for all its tokens is required, so that a long prompt does not start only to be preempted.
        if hit is not None and not self.manager.fits_whole(request.blocks, hit, request.num_tokens):
            return None
        grown = self.manager.grow(request.blocks, hit, computed, computed + count)
        if grown is None:
            return None
        self.waiting.remove(request)
        self.running.append(request)
        request.state = RequestState.RUNNING
        request.row = self._free_rows.pop()
        request.num_computed_tokens = computed
        if hit is not None:
            self._count_cached(request, computed)
        block_ids = request.blocks.snapshot()
        step.new_rows.append((request.row, block_ids))
        step.new_block_ids_to_zero += grown.new_block_ids_to_zero
        self.hooks.update_after_alloc(request, block_ids, 0)
        if self._states:
            request.checkpoints = tuple(self.hooks.checkpoints(request))
        # A chunk may end early at a checkpoint; the next chunk uses the spare blocks.
        count = self._chunk_tokens(request, count)
        self._add_chunk(request, count, step)
        return count

    def _ask_connector(self, request: Request, hit: CacheHit) -> int | None:
        """Tokens that can be loaded beyond the hit. None: not known yet, or the request failed."""
        try:
            external, _ = self.hooks.matched_tokens(request, hit.num_tokens)
        except KVConnectError as error:
            self.waiting.remove(request)
            self._fail(request, Failure(400, str(error)))
            return None
        notices = self.hooks.notices
        if external is not None and notices and request.request_id in notices:
            external, kept = self.hooks.settle_notice(request, hit.num_tokens, external)
            request.truncate(kept)
            request.max_tokens = 1
        return external

    def _start_load(
        self, request: Request, hit: CacheHit | None, external: int, step: EngineStep
    ) -> int | None:
        """Allocate a request's blocks and let the connector fill them. None: they do not fit now."""
        loaded = (hit.num_tokens if hit else 0) + external
        if loaded > request.num_tokens:
            raise LocalError(
                f"the connector offers {loaded} tokens of request {request.request_id!r}, "
                f"which has {request.num_tokens}"
            )
        # The last token is computed here, so a window must reach back from it. Blocks for all tokens, so that
        # a loaded request never waits for a block.
        computed = min(loaded, request.num_tokens - 1)
        grown = self.manager.grow(request.blocks, hit, computed, request.num_tokens, num_loaded=loaded)
        if grown is None:
            return None
        self.waiting.remove(request)
        request.state = RequestState.WAITING_FOR_KV
        request.num_computed_tokens = computed
        self._count_cached(request, computed)
        step.new_block_ids_to_zero += grown.new_block_ids_to_zero
        self.hooks.update_after_alloc(request, request.blocks.snapshot(), external)
        return 0

    def _count_cached(self, request: Request, num_tokens: int) -> None:
        """Record a request's cached tokens, unless it was preempted: then its hits include its own tokens."""
        if request.preemptions == 0:
            self.counts.cached_tokens += num_tokens - request.cached_tokens
            request.cached_tokens = num_tokens

    # --- what happened ----------------------------------------------------------------------------

    def update(self, step: EngineStep, sampled: dict[str, tuple[int, int | None]]) -> None:
        """Take a computed step; ``sampled`` has the new token and draft token by request."""
        self._report(step)
        for chunk in step.chunks:
            request = self.requests[chunk.request_id]
            request.num_computed_tokens = chunk.start + len(chunk.token_ids)
            self.manager.remember(request.blocks, request, request.num_computed_tokens)
            if not chunk.samples:
                continue
            token, draft = sampled[chunk.request_id]
            if (first := request.first_token) is not None:
                token = first
            request.token_ids.append(token)
            self.counts.generated_tokens += 1
            drafts = None if draft is None else (draft,)
            if request.num_generated_tokens >= request.max_tokens:
                self._leave_queues(request)
                self._end(request, Output((token,), drafts, finish_reason="length"))
            else:
                self.outputs.append((request, Output((token,), drafts)))

    def _report(self, step: EngineStep) -> None:
        """Tell the connector of a computed step whose requests still own their blocks."""
        due = self.hooks.due
        if not due:
            return
        added, computed, states = dict([*step.new_rows, *step.grown_rows]), [], []
        for chunk in step.chunks:
            end, new_block_ids = chunk.start + len(chunk.token_ids), added.get(chunk.row)
            if chunk.request_id not in due:
                continue
            if end % self._align == 0:
                blocks = self.requests[chunk.request_id].blocks
                for group in self._states:
                    states.append(StateBlock(chunk.request_id, group, end, blocks.ids[group][-1]))
            if new_block_ids is not None or end >= due[chunk.request_id]:
                computed.append(Computed(chunk.request_id, end, new_block_ids))
        self.hooks.launched(stack.Step(computed, states))

    def update_results(self, results: Results) -> None:
        """Take ended transfers: free, resume or fail their requests."""
        self.hooks.update_results(results)
        loaded = []
        for name in (*results.sent, *results.received):
            request = self.requests.get(name)
            if request is not None and request.state is RequestState.WAITING_FOR_KV:
                loaded.append(request)
            elif (ended := self.kept.pop(name, None)) is not None:
                self.manager.free(ended.blocks)
            else:
                logger.error("internal error: the connector reported %s, of which no report is awaited", name)
        for request in reversed(loaded):
            name = request.request_id
            problem = results.failed.get(name)
            request.state = RequestState.WAITING
            if problem is None:
                request.loaded = True
                if name in results.ragged:
                    self.manager.leave_out_windows(request.blocks, request.num_computed_tokens)
                self.manager.remember(request.blocks, request, request.num_computed_tokens)
                self.waiting.appendleft(request)
                continue
            self._count_cached(request, 0)
            if self._recompute_failed_loads or self.hooks.is_restored(name):
                # The worker has logged why.
                logger.debug("loading %s failed, it is computed here: %s", name, problem)
                self._begin_anew(request)
                self.waiting.appendleft(request)
            else:
                self._fail(request, Failure(502, problem.text))

"""Reads vLLM's scheduler output once a step, and reports it to the scheduler half one step later.

By then the step has been launched. vLLM hands a step's connector metadata to workers beside the step, not
after it, and a new request may hit prefix-cache blocks that another one computes in the same step.
Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvconnect.cache.specs import KVCacheGroup
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.transfer.orders import OffloadReport
from kvconnect.transfer.stack import Computed, StateBlock, Step

WAIT_S = 5.0
"""For how long after the start a worker may report no change. Later changes come with the first requests."""


class Steps:
    """The previous step of all live requests.

    Args:
        is_zeroed_first: the worker zeroes new blocks before it carries out a step's orders.
        windows: loaded blocks that no other request may reuse.
    """

    def __init__(self, is_zeroed_first: bool, windows: PartlyFilled | None = None) -> None:
        self.is_zeroed_first, self.windows = is_zeroed_first, windows or PartlyFilled()
        self._requests: dict[str, Any] = {}
        # Requests whose blocks were reported.
        self._known: set[str] = set()
        self._computed: dict[str, Computed] = {}
        self._states: dict[str, list[StateBlock]] = {}

    def begin(self, request: Any) -> None:
        """Register vLLM's request object, which later reports read."""
        self._requests[request.request_id] = request

    def admitted(self, request_id: str) -> None:
        """A request gets a new block table. Steps before its preemption belong to its old table.

        vLLM preempts and admits a request within one ``schedule`` when its caches are reset under load.
        """
        self._computed.pop(request_id, None)
        self._states.pop(request_id, None)
        self._known.discard(request_id)

    def end(self, half: SchedulerHalf, request_id: str) -> None:
        """A request ends, and vLLM is about to free its blocks: report the rest of its steps."""
        if request_id in self._computed or request_id in self._states:
            half.launched(self._launched([request_id]))
        request = self._requests.pop(request_id, None)
        if request is not None and request_id in self._known:
            num_tokens = _certain(request, request.num_computed_tokens)
            half.launched(Step([Computed(request_id, num_tokens, None)]))
        self.admitted(request_id)
        self.windows.end(request_id)

    def tell(self, half: SchedulerHalf, scheduler_output: Any) -> None:
        """Report the previous step to the half, and remember this one."""
        self.windows.step()
        if self._computed or self._states:
            half.launched(self._launched(self._computed.keys() | self._states.keys()))
        due, preempted = half.due, scheduler_output.preempted_req_ids or ()
        if not (due or preempted):
            return
        self._computed, self._states = _computed(scheduler_output, due), _states(scheduler_output)
        for request_id in preempted:
            # A request that was admitted again since has entries here, which stay.
            self._known.discard(request_id)
            half.preempted(request_id)
        if self.is_zeroed_first and (overwritten := _overwritten(scheduler_output)):
            half.overwritten(overwritten)

    def _launched(self, request_ids: Iterable[str]) -> Step:
        """The last step of these requests, without those that have ended."""
        all_computed: list[Computed] = []
        all_states: list[StateBlock] = []
        for request_id in request_ids:
            computed, states = self._computed.pop(request_id, None), self._states.pop(request_id, ())
            request = self._requests.get(request_id)
            if request is None:
                continue
            all_states.extend(states)
            if computed is not None:
                if computed.new_block_ids is not None:
                    self._known.add(request_id)
                num_tokens = _certain(request, computed.num_tokens)
                all_computed.append(computed._replace(num_tokens=num_tokens))
        return Step(all_computed, all_states)


class PartlyFilled:
    """Window blocks that a load may have filled in part, which vLLM's prefix cache must not keep.

    A peer whose blocks end elsewhere has no KV of the tokens just before a window, so the first loaded block
    may be incomplete (ragged). vLLM caches a load's full blocks when its request goes on. A hit that ends
    with a block that the request filled itself reads only tokens that this request read too. This class
    remembers loaded blocks by request as long as vLLM may cache them, and the ragged ones.
    """

    def __init__(self, groups: Sequence[KVCacheGroup] = ()) -> None:
        self._groups = [
            index
            for index, group in enumerate(groups)
            if group.has_cache and group.retention.by_position and not group.retention.sees_all
        ]
        self.pool: Any = None
        self._loaded: dict[str, frozenset[int]] = {}
        self._ragged: dict[str, frozenset[int]] = {}

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self.pool = pool

    def admitted(self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """A request got blocks for a load, or goes on: then vLLM has just cached the loaded blocks."""
        if num_external_tokens and self._groups:
            ids = (block for group in self._groups for block in block_ids[group] if block)
            self._loaded[request_id] = frozenset(ids)
        elif request_id in self._ragged:
            self.end(request_id)

    def reported(self, ragged: Iterable[str]) -> None:
        """These loads end now, and their windows may begin with an incomplete block."""
        for request_id in ragged:
            if request_id in self._loaded:
                self._ragged[request_id] = self._loaded.pop(request_id)

    def step(self) -> None:
        """A step was scheduled: evict ragged blocks that vLLM may have cached since."""
        for blocks in self._ragged.values():
            self.pool.evict_blocks(blocks)

    def end(self, request_id: str) -> None:
        """A request ends and its blocks are about to be freed, or its loaded blocks were just cached."""
        self._loaded.pop(request_id, None)
        if (blocks := self._ragged.pop(request_id, None)) is not None:
            self.pool.evict_blocks(blocks)


class Recovery:
    """How long an idle vLLM must step so that its scheduler receives the workers' first reports.

    First reports are the recovered contents of lower tiers, and row sizes where another connector has the
    handshake. vLLM carries reports with steps only, and steps only while it has work: without this class the
    first prompts after a restart would find no kept KV.
    """

    def __init__(self, *, expects: bool, clock: Callable[[], float]) -> None:
        self._expects = expects
        self._clock = clock
        self._until: float | None = None

    def expect(self, *, expects: bool) -> None:
        """An expected report arrived; ``expects`` another one."""
        self._expects, self._until = expects, None

    def reported(self, reports: Sequence[OffloadReport]) -> None:
        """A step's reports. A tier may recover more slowly than an idle vLLM steps."""
        self._expects = any(report.is_recovering for report in reports)
        if not self._expects or any(report.changes for report in reports):
            self._until = None

    @property
    def is_under_way(self) -> bool:
        """Whether the next step may carry more reports."""
        if self._expects:
            if self._until is None:
                self._until = self._clock() + WAIT_S
            self._expects = self._clock() < self._until
        return self._expects


def _computed(scheduler_output: Any, due: Mapping[str, int]) -> dict[str, Computed]:
    """By request, the tokens computed after a step. In most steps most decoding requests are not due."""
    counts = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    computed = {
        new.req_id: Computed(new.req_id, new.num_computed_tokens + counts[new.req_id], new.block_ids)
        for new in scheduler_output.scheduled_new_reqs
        if new.req_id in due
    }
    for request_id, before, new_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        due_at = due.get(request_id)
        if due_at is None:
            continue
        num_tokens = before + counts[request_id]
        if new_ids is not None or num_tokens >= due_at:
            computed[request_id] = Computed(request_id, num_tokens, new_ids)
    return computed


def _states(scheduler_output: Any) -> dict[str, list[StateBlock]]:
    """By request, states that a step leaves in blocks of their own.

    vLLM hands a block off when the block gets its hash. The block is not held, and may go to another
    request within the same ``schedule``: the step then overwrites the state, which is left out here.
    """
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    handed_off: Mapping[str, Any] = (state and state.boundary_state_offloads) or {}
    if not handed_off:
        return {}
    cached = scheduler_output.scheduled_cached_reqs
    given = {new.req_id: new.block_ids for new in scheduler_output.scheduled_new_reqs}
    given |= {name: ids for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids}
    owner = {block_id: request_id for request_id, entries in handed_off.items() for _, block_id, _ in entries}
    lost = {
        block_id
        for request_id, groups in given.items()
        for block_ids in groups
        for block_id in owner.keys() & block_ids
        if owner[block_id] != request_id
    }
    return {
        request_id: [
            StateBlock(request_id, int(group), int(num_tokens), int(block_id), is_chosen=True)
            for group, block_id, num_tokens in entries
            if block_id and block_id not in lost
        ]
        for request_id, entries in handed_off.items()
    }


def _overwritten(scheduler_output: Any) -> set[int]:
    """Blocks that a step zeroes, or copies other blocks to."""
    copies = getattr(scheduler_output, "kv_cache_block_copies", None) or ()
    zeroed = getattr(scheduler_output, "new_block_ids_to_zero", None) or ()
    return {*zeroed, *(copy.dst_block_id for copy in copies)}


def _certain(request: Any, num_computed_tokens: int) -> int:
    """The tokens of a request whose KV is final.

    Of a draft model's tokens only accepted ones count, and the next step computes the last token.
    """
    known = max(request.num_prompt_tokens, request.num_tokens - 1)
    return min(num_computed_tokens, int(known))

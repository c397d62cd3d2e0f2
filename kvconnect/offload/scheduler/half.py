"""The scheduler half of the offload: it owns the index of host memory, and decides what is in it.

It alone decides which content is in which row, what is stored, what is restored, and what makes room; worker
ranks carry that out and report. In the terms of vLLM's contract, for one thread; no I/O, no wait, no clock of
its own. Hooks raise nothing over what a client or a worker sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvconnect.cache.specs import KVCacheGroup
from kvconnect.config import OffloadConfig
from kvconnect.offload.index.budgets import plan_for
from kvconnect.offload.index.lower_index import LowerIndex
from kvconnect.offload.index.tier_index import IndexEvents, TierIndex
from kvconnect.offload.scheduler.failures import FailureCounts
from kvconnect.offload.scheduler.hit_requirements import HitRequirements, hit_groups
from kvconnect.offload.scheduler.host import Hashes, Host
from kvconnect.offload.scheduler.jobs import Jobs
from kvconnect.offload.scheduler.prefix_lookup import PrefixLookup
from kvconnect.offload.scheduler.reports import Reports
from kvconnect.offload.scheduler.requests import NEVER, OffloadRequest
from kvconnect.offload.scheduler.restores import Restores
from kvconnect.offload.scheduler.stores import Stores
from kvconnect.orders import OffloadOrders, Results, TierChange
from kvconnect.scheduler.stack import BlockIdsByGroup, RequestView, Step

HOST = "host"
"""What host memory is called where hits are reported by where they came from."""

JOB_TIMEOUT_S = 60.0
"""How long a job of the workers may take before no request waits for it any more."""

_MOST_FAILURES = 3
"""Restores that may fail one after the other before none is promised for ``_PAUSE_S``."""

_PAUSE_S = 30.0

_MOST_OFFLOAD_TOKENS = "max_offload_tokens"

_NOTHING = OffloadOrders()


class OffloadScheduler:
    """Keeps blocks of requests in host memory, and promises them to later requests of the same prefix.

    Hooks with a name of ``scheduler.stack.SchedulerHooks`` keep its contract.

    Args:
        config: the ``offload`` settings.
        groups: the cache groups as the serving stack has them; only those in ``row_bytes`` are kept.
        hashes: the content hashes of a request's full blocks of so many tokens, from the first on, as far as
            its tokens are known for sure; asked often, so a view rather than a list made anew. Asked for
            the block sizes of groups, and for ``align_tokens`` where a group keeps states.
        align_tokens: hits end at multiples of this, which is a multiple of every block size but that of
            state groups.
        row_bytes: bytes of a row, by group, as the workers have them.
        draft_groups: groups with layers of a draft model that read one token ahead.
        num_ranks: worker ranks; each of them reports each job.
        lower_tiers: the tiers below host memory, nearest first.
        clock: any clock that does not go back, in seconds.
        lag_tokens: tokens that the stack may have begun to compute beyond what ``launched`` was given.
        job_timeout_s: how long a job of the workers may take before no request waits for it any more.

    Raises:
        ConfigError: block sizes are not aligned, or the memory does not suffice for a single hit.
    """

    def __init__(
        self,
        config: OffloadConfig,
        groups: Sequence[KVCacheGroup],
        *,
        hashes: Hashes,
        align_tokens: int,
        row_bytes: Mapping[int, int],
        draft_groups: Iterable[int] = (),
        num_ranks: int = 1,
        lower_tiers: Sequence[str] = (),
        clock: Callable[[], float],
        lag_tokens: int = 0,
        job_timeout_s: float = JOB_TIMEOUT_S,
    ) -> None:
        self._config, self._clock = config, clock
        kept = hit_groups(groups, row_bytes, align_tokens, draft_groups)
        requirements = HitRequirements(kept, align_tokens)
        self.plan = plan_for(config, groups, row_bytes, requirements.least_rows(config.min_tokens))
        self.host = host = Host(
            requirements,
            TierIndex(self.plan),
            LowerIndex(num_ranks),
            Jobs(num_ranks, job_timeout_s),
            FailureCounts(),
            hashes,
        )
        self._lookup = PrefixLookup(host, config, lower_tiers)
        self._stores = Stores(
            host,
            most_tokens=requirements.most_tokens(self.plan.limits),
            lag_tokens=lag_tokens,
            decoded=config.decoded,
            keep=bool(lower_tiers),
        )
        self._restores = Restores(host)
        self._reports = Reports(host, self._lookup)
        self._state_groups = {group.group: group for group in requirements.groups if group.is_state}
        self._requests: dict[str, OffloadRequest] = {}
        self._clear = False
        self._failed_in_a_row = 0
        self._resumes_at = 0.0

    # The life of a request

    def new_request(self, request: RequestView, *, reads: bool = True, writes: bool = True) -> None:
        params: object = request.kv_transfer_params
        most = params.get(_MOST_OFFLOAD_TOKENS) if isinstance(params, Mapping) else None
        if most is None:
            most = NEVER
        elif not isinstance(most, int) or isinstance(most, bool) or most < 0:
            self.host.failures.count("offload_parameters_refused")
            most = NEVER
        self._requests[request.request_id] = OffloadRequest(request, reads, writes, most)
        self._stores.due[request.request_id] = 0

    @property
    def due(self) -> Mapping[str, int]:
        return self._stores.due

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        # What was promised stays in host memory until the request is admitted, or ends.
        record = self._record(request)
        now = self._clock()
        if (
            not record.reads
            or record.restore_failed
            or request.request_id in self._restores
            or now < self._resumes_at
        ):
            return 0, False
        count = self._lookup.find(record, num_computed_tokens, now)
        return count, bool(count)

    def withdraw(self, request_id: str) -> None:
        """What was promised to a request is not wanted: it gets its blocks from elsewhere."""
        if (record := self._requests.get(request_id)) is not None:
            self._lookup.release(record)

    def offers(self, request_id: str) -> bool:
        """Whether a request was promised something that it has not taken yet."""
        record = self._requests.get(request_id)
        return record is not None and record.offer is not None and record.offer.length > 0

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        # Of a state group only the last block counts: it is the one that the state is restored to.
        record = self._record(request)
        record.is_admitted = True
        record.lose_blocks()
        record.lay_out(self.host.requirements, self._config.checkpoint_tokens)
        self._stores.due[request.request_id] = 0
        if num_external_tokens > 0:
            self._restores.begin(record, record.offer, block_ids, num_external_tokens)
        self._lookup.release(record)

    def checkpoints(self, request: RequestView) -> tuple[int, ...]:
        record = self._requests.get(request.request_id)
        if record is None or not record.writes or not self._state_groups:
            return ()
        return self._record(request).checkpoints(self.host.requirements)

    def launched(self, step: Step) -> None:
        for state in step.states:
            record, group = self._requests.get(state.request_id), self._state_groups.get(state.group)
            if record is not None and group is not None:
                self._stores.collect_state(record, group, state)
        # Taken together: the index is much faster with many contents at once.
        grown: dict[str, OffloadRequest] = {}
        for request_id, num_tokens, new_block_ids in step.computed:
            record = self._requests.get(request_id)
            if record is None:
                continue
            if request_id in grown:
                self._stores.collect(grown.values())
                grown = {}
            if new_block_ids is not None:
                record.add_blocks(self.host.requirements.groups, new_block_ids)
            record.computed_before, record.computed_tokens = record.computed_tokens, num_tokens
            if num_tokens >= self._stores.due[request_id]:
                grown[request_id] = record
        if grown:
            self._stores.collect(grown.values())

    def preempted(self, request_id: str) -> None:
        # The blocks of earlier steps may still be read until the next orders are carried out.
        record = self._requests.get(request_id)
        if record is not None:
            record.lose_blocks()
            record.known_tokens = record.view.num_tokens
            self._stores.due[request_id] = 0

    def request_finished(self, request: RequestView, block_ids: BlockIdsByGroup) -> None:
        """A request ended; ``block_ids`` may be read until the next orders are carried out."""
        record = self._requests.pop(request.request_id, None)
        if record is None:
            return
        del self._stores.due[request.request_id]
        self._lookup.release(record)
        if request.request_id in self._restores:
            return
        record.block_ids = {
            group.group: list(block_ids[group.group])
            for group in self.host.requirements.groups
            if not group.is_state
        }
        self._stores.collect_last(record)
        for group in self.host.requirements.whole:
            # So that of a prompt the end makes room first: without its beginning it would be of no use.
            end = record.next_position.get(group.group, 0)
            if end:
                names = self.host.names(request, group, (range(end),))
                self.host.index.touch(group.group, names)

    def overwritten(self, block_ids: Collection[int]) -> None:
        self._stores.overwritten(block_ids)

    def sources(self, request_id: str, num_external_tokens: int) -> dict[str, int]:
        """Of so many tokens that a request takes, how many came from which tier."""
        record = self._requests.get(request_id)
        found: dict[str, int] = {}
        left = num_external_tokens
        for tier, count in (record.sources if record is not None else {}).items():
            if taken := min(count, left):
                found[tier] = taken
                left -= taken
        if left > 0:
            found[HOST] = left
        return found

    # Once per step

    def build_orders(self) -> OffloadOrders:
        self._reports.check_deadlines(self._clock())
        fetches, seeks = self._lookup.take()
        stores = self._stores.take()
        restores = self._restores.take()
        if not (fetches or seeks or stores or restores or self._clear):
            return _NOTHING
        clear, self._clear = self._clear, False
        return OffloadOrders(stores, restores, fetches, seeks, clear)

    def update_results(self, results: Results) -> None:
        for report in results.offload:
            self._reports.settle(report)
        for request_id in results.received:
            failed = request_id in results.failed
            if self._restores.end(request_id, failed=failed):
                self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
                if failed:
                    self._restore_failed(request_id)

    def _restore_failed(self, request_id: str) -> None:
        """What was to be restored has been dropped: no request is promised it any more, this one nothing."""
        self.host.failures.count("offload_restore_failed")
        for record in self._requests.values():
            self._lookup.withdraw(record)
        if request_id in self._requests:
            self._requests[request_id].restore_failed = True
        if self._failed_in_a_row >= _MOST_FAILURES:
            self.host.failures.count("offload_restores_paused")
            self._resumes_at = self._clock() + _PAUSE_S

    def clear(self) -> None:
        """Forget everything, and have lower tiers do so. Nothing is kept of requests that have blocks now.

        Rows that are under way to a request arrive there.
        """
        self._clear = True
        self._stores.clear()
        for record in self._requests.values():
            self._lookup.release(record)
            if record.is_admitted:
                record.writes = False
        self.host.jobs.invalidate()
        self.host.index.clear()
        self.host.lower.clear()

    def take_events(self) -> tuple[IndexEvents, tuple[TierChange, ...]]:
        """What host memory has got and lost since the last call, and what lower tiers of rank 0 have."""
        return self.host.index.take_events(), self._reports.take_changes()

    def take_failures(self) -> tuple[str, ...]:
        """What went wrong since the last call, by reason, to be counted."""
        return self.host.failures.take()

    @property
    def pending(self) -> bool:
        """Whether workers are to report something yet that a request may wait for."""
        return bool(len(self._restores) or self.host.jobs.num_awaited or len(self._stores) or self._clear)

    def state(self) -> dict[str, int]:
        """Counts of what is under way. All zero when idle."""
        return {
            "offload_requests": len(self._requests),
            "offload_jobs": len(self.host.jobs),
            "offload_restoring": len(self._restores),
            "offload_outgoing": len(self._stores),
            "offload_awaited": len(self._lookup),
        }

    def usage(self) -> dict[str, Any]:
        """What there is to see that stays when idle."""
        return {
            "host": {str(group): asdict(counts) for group, counts in self.host.index.counts().items()},
            "lower": self.host.lower.counts(),
            "totals": dict(self.host.failures.totals),
        }

    def _record(self, request: RequestView) -> OffloadRequest:
        """The record of a request that is looked at, made where there is none."""
        if request.request_id not in self._requests:
            self.new_request(request)
        record = self._requests[request.request_id]
        record.arrive(self.host.requirements, self._config.checkpoint_tokens)
        return record

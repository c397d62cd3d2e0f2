"""The scheduler half of the offload: it owns the index of host memory, and decides which contents are in it.

Worker ranks carry out its orders and report. One thread; no I/O, no blocking, no clock of its own. No hook
raises because of a client's parameters or a worker's report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from kvconnect.config import OffloadConfig
from kvconnect.offload.scheduler.host import NEVER, Host, JobKind, KeptBlocks, OffloadRequest
from kvconnect.offload.scheduler.parking_lot import ParkingLot
from kvconnect.offload.scheduler.prefix_lookup import PrefixLookup
from kvconnect.offload.scheduler.sessions import Notice, Sessions
from kvconnect.offload.scheduler.stores import Stores
from kvconnect.offload.tier import HOST
from kvconnect.plan.blocks import BlockIdsByGroup
from kvconnect.transfer.orders import OffloadOrders, OffloadReport, OrdersDraft, Results
from kvconnect.transfer.stack import RequestView, Step

# After so many failed restores in a row, no restore is promised for a while.
_MOST_FAILURES, _PAUSE_S = 3, 30.0
_MOST_OFFLOAD_TOKENS = "max_offload_tokens"


class OffloadScheduler:
    """Keeps blocks of requests in host memory, and promises them to later requests with the same prefix.

    Hooks named as in ``halves.scheduler_half.SchedulerHalf`` keep its contract.

    Raises ``ConfigError``: the host memory does not suffice for a single hit.
    """

    def __init__(self, config: OffloadConfig, kept: KeptBlocks, draft: OrdersDraft) -> None:
        self._clock, self._row_bytes = kept.clock, kept.row_bytes
        self.host = Host(config, kept, draft)
        self._lookup = PrefixLookup(self.host)
        self.parking = ParkingLot(self.host)
        """KV of requests that wait for blocks."""
        self._sessions = Sessions(self.host, self._lookup)
        self._stores = Stores(self.host, self._lookup)
        self._state_groups = {group.group: group for group in kept.requirements.groups if group.is_state}
        self._requests: dict[str, OffloadRequest] = {}
        self._clear = False
        self._num_clears = 0
        self._failed_in_a_row = 0
        self._resumes_at = 0.0

    def new_request(self, request: RequestView, *, reads: bool = True, writes: bool = True) -> None:
        params: object = request.kv_transfer_params
        most = params.get(_MOST_OFFLOAD_TOKENS) if isinstance(params, Mapping) else None
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            self.host.count("offload_parameters_refused")
            most = None
        most = 0 if not writes else NEVER if most is None else most
        self._requests[request.request_id] = OffloadRequest(self.host, request, reads, most)
        self._stores.due[request.request_id] = 0
        self._sessions.arrive(request, reads=reads)

    @property
    def notices(self) -> Mapping[str, Notice]:
        """The requests that only announce their prompt, by id; empty almost always."""
        return self._sessions.notices

    def settle_notice(self, request: RequestView, num_computed_tokens: int, count: int) -> tuple[int, int]:
        """What a notice loads of ``count`` matched tokens, and how many tokens its prompt is to keep."""
        notice = self._sessions.notices[request.request_id]
        notice.found_tokens = num_computed_tokens + count
        if notice.is_to_host and self.offers(request.request_id):
            # It is in host memory now.
            self.withdraw(request.request_id)
            count = 0
        kept = num_computed_tokens + count + 1 + self.host.requirements.ahead_tokens
        return count, min(request.num_tokens, kept)

    @property
    def due(self) -> Mapping[str, int]:
        return self._stores.due

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        # Promised contents stay pinned in host memory until the request is admitted, or ends.
        record, now = self._record(request), self._clock()
        if not record.reads or request.request_id in self._lookup.restoring or now < self._resumes_at:
            return 0, False
        count = self._lookup.find(record, num_computed_tokens, now)
        return count, bool(count)

    def withdraw(self, request_id: str) -> None:
        """Take back the promise to a request, which gets its KV from elsewhere."""
        if (record := self._requests.get(request_id)) is not None:
            self._lookup.release(record)
            record.sources = None

    def is_restored(self, request_id: str) -> bool:
        record = self._requests.get(request_id)
        return record is not None and record.sources is not None

    def offers(self, request_id: str) -> bool:
        record = self._requests.get(request_id)
        return record is not None and record.lookup is not None and record.lookup.length > 0

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        # In a state group only the last block counts: the state is restored into it.
        record = self._record(request)
        record.is_admitted = True
        record.lose_blocks()
        record.lay_out()
        self._stores.due[request.request_id] = 0
        if num_external_tokens > 0:
            self._lookup.restore(record, block_ids, num_external_tokens)
        self._lookup.release(record)

    def checkpoints(self, request: RequestView) -> tuple[int, ...]:
        record = self._requests.get(request.request_id)
        if record is None or not record.most_tokens or not self._state_groups:
            return ()
        return self._record(request).checkpoints()

    def launched(self, step: Step) -> None:
        for state in step.states:
            record, group = self._requests.get(state.request_id), self._state_groups.get(state.group)
            if record is not None and group is not None:
                self._stores.collect_state(record, group, state)
        for request_id, num_tokens, new_block_ids in step.computed:
            record = self._requests.get(request_id)
            if record is None:
                continue
            record.computed(num_tokens, new_block_ids)
            if num_tokens >= self._stores.due[request_id]:
                self._stores.collect(record)

    def preempted(self, request_id: str) -> None:
        # Workers may read the blocks of earlier steps until they carry out the next orders.
        record = self._requests.get(request_id)
        if record is not None:
            record.lose_blocks()
            record.known_tokens, record.ragged_tokens = record.view.num_tokens, 0
            self._stores.due[request_id] = 0

    def request_finished(self, request: RequestView, block_ids: BlockIdsByGroup) -> dict[str, Any] | None:
        """Returns the outcomes of the request's session hints; None if it had none."""
        # Workers may read the blocks until they carry out the next orders.
        record = self._requests.pop(request.request_id, None)
        if record is None:
            return None
        del self._stores.due[request.request_id]
        self._lookup.release(record)
        if request.request_id not in self._lookup.restoring:
            self._stores.collect_last(record, block_ids)
        return self._sessions.finished(request.request_id, record.final_tokens(), self._clock())

    def overwritten(self, block_ids: Collection[int]) -> None:
        self._stores.overwritten(block_ids)

    def sources(self, request_id: str, num_external_tokens: int) -> dict[str, int]:
        """By tier, how many of a request's ``num_external_tokens`` restored tokens came from it."""
        record = self._requests.get(request_id)
        brought = {} if record is None else record.sources or {}
        found, left = dict[str, int](), num_external_tokens
        for tier, count in brought.items():
            if taken := min(count, left):
                found[tier] = taken
                left -= taken
        return {**found, HOST: left} if left > 0 else found

    def restore_of(self, request_id: str) -> tuple[int, str]:
        """The bytes, on all ranks, of a restore under way, and the hex digest of its contents' names."""
        digest, total_bytes = hashlib.blake2b(digest_size=16), 0
        for group, names in sorted(self._lookup.restoring.get(request_id, {}).items()):
            total_bytes += len(names) * self._row_bytes[group] * self.host.jobs.num_ranks
            digest.update(b"".join((group.to_bytes(4, "little"), *names)))
        return total_bytes, digest.hexdigest()

    def build_orders(self) -> OffloadOrders:
        for job in self.host.jobs.tick(self._clock()):
            # A load has a deadline of its own.
            if job.kind is not JobKind.PARK:
                self.host.count("offload_overdue")
            if job.kind is JobKind.SEEK:
                # A seek has no rows, so its late answer can be ignored.
                self._lookup.found(job)
        clear, self._clear = self._clear, False
        self._num_clears += clear
        asked = self._sessions.orders(self._clock())
        orders = OffloadOrders(self._stores.take(), *self.host.take(), clear, **asked)
        return msgspec.structs.replace(orders, held_rows=self.host.index.held_rows()) if orders else orders

    def update_results(self, results: Results) -> None:
        for report in results.offload:
            self._settle(report)
        for request_id in results.ragged:
            if (record := self._requests.get(request_id)) is not None:
                record.ragged_tokens = record.known_tokens
        for request_id in results.received:
            failed = request_id in results.failed
            self.parking.restored(request_id, failed=failed)
            if self._lookup.restored(request_id, failed=failed):
                self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
                if failed:
                    self._restore_failed(request_id)

    def _settle(self, report: OffloadReport) -> None:
        """Apply a rank's report. Unknown jobs are over already, or were never ordered."""
        if not 0 <= report.rank < self.host.jobs.num_ranks:
            self.host.count("offload_unknown_rank")
            return
        ends = {
            JobKind.STORE: self._stores.settle,
            JobKind.FETCH: self._lookup.fetched,
            JobKind.SEEK: self._lookup.found,
            JobKind.PARK: self.parking.ended,
        }
        # Changes from before the last order to clear are void. The others come before the jobs: a fetch may
        # drop contents again that this rank has read and another rank missed.
        if report.cleared == self._num_clears and not self._clear:
            self.host.lower.update(report.rank, report.changes)
        for job in self.host.jobs.report(report):
            ends[job.kind](job)
            if job.kind is not JobKind.SEEK and not self.host.jobs.is_open(job):
                # No tier will store its contents any more.
                self.host.forget_names(job.group, job.hashes)

    def _restore_failed(self, request_id: str) -> None:
        """A failed restore dropped its contents: withdraw all promises, and promise this request no more."""
        self.host.count("offload_restore_failed")
        for record in self._requests.values():
            self._lookup.withdraw(record)
        if request_id in self._requests:
            self._requests[request_id].reads = False
        if self._failed_in_a_row >= _MOST_FAILURES:
            self.host.count("offload_restores_paused")
            self._resumes_at = self._clock() + _PAUSE_S

    def reset(self) -> None:
        # Lower tiers are cleared too. Requests that have blocks now store none of them. Restores under way
        # still reach their requests.
        self._clear = True
        self._stores.clear()
        for record in self._requests.values():
            self._lookup.release(record)
            if record.is_admitted:
                record.most_tokens = 0
        self.host.pins.clear()
        self.host.jobs.invalidate()
        self.host.index.clear()
        self.host.lower.clear()

    def take_events(self) -> Sequence[Any]:
        """Events of contents that tiers stored or removed, as many as suit one step; the rest stays."""
        return () if self.host.events is None else self.host.events.take()

    @property
    def pending(self) -> bool:
        """Whether orders or events are left, or a request or an event waits for reports of workers."""
        waits = self._lookup.restoring or self.parking.restoring or self.host.jobs.num_awaited
        waits = waits or len(self._stores) or self._clear
        is_heard = self.host.events is not None and (self.host.events or self.host.jobs.are_due)
        return bool(waits or is_heard)

    def state(self) -> dict[str, int]:
        return {
            "offload_requests": len(self._requests),
            "offload_notices": len(self._sessions.notices),
            "offload_jobs": len(self.host.jobs),
            "offload_restoring": len(self._lookup.restoring),
            "offload_outgoing": len(self._stores),
            "offload_awaited": len(self._lookup),
            "offload_parked": len(self.parking),
            "offload_described": 0 if self.host.events is None else self.host.events.num_described,
        }

    def usage(self) -> dict[str, Any]:
        return {
            "host": {str(group): asdict(counts) for group, counts in self.host.index.counts().items()},
            "lower": self.host.lower.counts(),
            "pinned": {" ".join(map(str, place)): n for place, n in self.host.pins.counts().items()},
        }

    def _record(self, request: RequestView) -> OffloadRequest:
        if request.request_id not in self._requests:
            self.new_request(request)
        record = self._requests[request.request_id]
        if not record.prompt_tokens:
            # First lookup: the prompt is final now.
            record.prompt_tokens = request.num_tokens
            record.lay_out()
            record.pin = self._sessions.begin(request, is_kept=record.most_tokens > 0)
        return record

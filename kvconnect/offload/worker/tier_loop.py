"""The thread of a worker's tiers, and the calls to device and tiers that are under way.

The thread carries out orders, waits for copies of the device, and drives the tiers below host memory. A late
call is reported failed, but its rows stay held until it ends, so that late reads or writes of a device or
tier harm no other job. The module does not decide which contents are kept.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from kvconnect.errors import ConfigError
from kvconnect.metrics import OffloadMetrics
from kvconnect.offload.copies.copier import Copier, CopyTicket
from kvconnect.offload.copies.rows import RowArena
from kvconnect.offload.tier import DISK, HOST, Content, LowerTier, TierRow, TierUpdate
from kvconnect.offload.worker.jobs import RankJob, RankJobs, Report
from kvconnect.transfer.orders import CHANGES_AT_ONCE, OffloadOrders, RowCopies, TierChange

logger = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUTS_S = {"store": 60.0, "restore": 60.0, "write": 60.0, "read": 20.0, "seek": 20.0}
"""Timeouts by verb: copies from the device (store) and to it (restore); writes, reads, seeks of a tier."""

CPU = "cpu"
"""The name of host memory in metrics."""

_MEMORY = 0.8
"""The decay, per read, of older reads in the measured disk speed."""
_DEVICE = "offload"
"""The owner of copies in failure counts."""

_LONGEST_SLEEP_S = 1.0
_SHORT_NAP_S = 200e-6
_LONG_NAP_S = 1e-3
_SHORT_NAPS = 50
_LAST_COPIES_S = 5.0
_CLOSE_TIMEOUT_S = 20.0

_Key = tuple[str, str, int]
"""A call: its owner (a tier's name, or ``_DEVICE``), its verb, and the number of its first job."""


@dataclass(eq=False)
class _Call:
    """A call to the device or to one tier for some jobs; ``restored`` has the copies of a restore."""

    jobs: Sequence[RankJob]
    began_s: float
    deadline_s: float
    restored: Sequence[RowCopies] = ()
    given_up: bool = False


class TierLoop:
    """All calls under way, and the thread that ends them and alone writes ``metrics``.

    ``tiers`` are nearest first, and written in this order. The thread's end closes them, copier and arena.
    """

    def __init__(
        self,
        copier: Copier,
        arena: RowArena,
        tiers: Sequence[LowerTier],
        jobs: RankJobs,
        metrics: OffloadMetrics,
        device: torch.device,
    ) -> None:
        self.tiers = tiers
        self._copier, self._arena, self._jobs, self._metrics = copier, arena, jobs, metrics
        self.held_rows: Sequence[int] = ()
        """Rows in use in host memory, by class, as stated in the scheduler half's last orders."""
        self.timeouts_s = dict(TIMEOUTS_S)
        self.calls: dict[_Key, _Call] = {}
        """Calls that have not ended, including those given up."""
        self.tickets: dict[_Key, CopyTicket] = {}
        """The tickets of the device's calls."""
        self.next_deadline_s = math.inf
        self._logged: set[tuple[str, str]] = set()
        self.disk_bytes_per_s = 0.0
        """The recent read speed of the disk; 0 until measured."""
        self._read_lately, self._read_until_s = (0.0, 0.0), -math.inf
        self._orders: deque[tuple[Callable[[float], None], RankJob | None]] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._naps = 0
        self._thread = threading.Thread(
            target=self._run, args=(device,), name="kvconnect-offload", daemon=True
        )
        self._listen()

    # For any thread

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wake(self) -> None:
        self._wake.set()

    def order(self, call: Callable[..., None], *given: Any, job: RankJob | None = None) -> None:
        """Have the thread run ``call(*given, now)``; if the call raises, ``job`` fails. Thread-safe."""
        self._orders.append((partial(call, *given), job))
        self.wake()

    def replace(self, make: Callable[[], Sequence[LowerTier]]) -> None:
        """Have the thread close the lower tiers, clear everything, and use the tiers from ``make``."""

        def replace(now: float) -> None:
            self.close_tiers(now, with_changes=False)
            self.clear(now)
            try:
                self.tiers = make()
            except ConfigError as error:
                self._metrics.failures.labels("offload_tiers_lost").inc()
                logger.error("disk and store are not used from now on, until a restart: %s", error)
            self._listen()

        self.order(replace)

    def tier_states(self) -> dict[str, dict[str, Any]]:
        """The state of each tier, nearest first: see ``LowerTier.state``."""
        held = list(zip(self._arena.plan.classes, self.held_rows, strict=False))
        host = {
            "records": sum(count for _, count in held),
            "taken_bytes": sum(rows.row_bytes * count for rows, count in held),
            "limit_bytes": self._arena.plan.length_bytes,
        }
        return {HOST: host} | {tier.name: tier.state() for tier in self.tiers}

    def on_disk(self, contents: Sequence[Content]) -> Sequence[bool]:
        """For each content whether this rank has it on disk now."""
        disk = next((tier for tier in self.tiers if tier.name == DISK), None)
        return [False] * len(contents) if disk is None else disk.has(contents)

    def close(self) -> None:
        self._is_stopping = True
        self.wake()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self.is_alive:
            # Closing what a running thread uses would crash it; the process is ending anyway.
            logger.error(
                "the thread of the tiers did not stop within %g s, and is left behind", _CLOSE_TIMEOUT_S
            )

    def _listen(self) -> None:
        for tier in self.tiers:
            tier.on_update(self.wake)
        # Assume so until the thread has polled the tiers.
        self._jobs.is_recovering = bool(self.tiers)

    # The thread itself

    def step(self, now: float) -> float:
        """Carry out orders and end calls. Returns how many seconds to sleep unless woken."""
        progress = bool(self._orders)
        while self._orders:
            carry_out, job = self._orders.popleft()
            try:
                carry_out(now)
            except Exception as error:
                self._count_bug()
                if job is not None:
                    self._jobs.fail(job, f"it could not be carried out: {error}")
        progress |= self.advance(now)
        if progress:
            self._export()
            self._naps = 0
            return 0.0
        if self.tickets:
            self._naps += 1
            return _SHORT_NAP_S if self._naps < _SHORT_NAPS else _LONG_NAP_S
        self._naps = 0
        return min(max(self.next_deadline_s - now, 1e-3), _LONGEST_SLEEP_S)

    def _run(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while not self._is_stopping:
            sleep_s = self._step()
            if sleep_s > 0 and self._wake.wait(sleep_s):
                self._wake.clear()
        # Shutdown: wait for copies, close tiers, and fail jobs that are still open.
        give_up_s = time.monotonic() + _LAST_COPIES_S
        self._step()
        while self.tickets and time.monotonic() < give_up_s:
            time.sleep(_SHORT_NAP_S)
            self._step()
        self.close_tiers(time.monotonic())
        self._jobs.fail_all("the worker was closed")
        self._export()
        self._copier.close()
        self._arena.close()

    def _step(self) -> float:
        try:
            return self.step(time.monotonic())
        except Exception:
            # A bug of ours: failures of tiers do not raise. Jobs end by their deadlines.
            self._count_bug()
            return 0.1

    def _count_bug(self) -> None:
        self._metrics.failures.labels("internal").inc()
        logger.exception("internal error in the thread of the tiers")

    def _export(self) -> None:
        for kind, count in self._jobs.counts().items():
            self._metrics.open[kind].set(count)
        self._metrics.held_rows.set(len(self._jobs.held))
        for name, state in self.tier_states().items():
            if name in self._metrics.taken:
                self._metrics.taken[name].set(state["taken_bytes"])
                self._metrics.limit[name].set(state["limit_bytes"])

    # Orders

    def begun(self, ticket: CopyTicket, jobs: Sequence[RankJob], began_s: float, _: float) -> None:
        """A snapshot of the blocks of these jobs to their rows has begun."""
        self.tickets[self._open(_DEVICE, "store", jobs, began_s)] = ticket

    def restore(
        self, job: RankJob, copies: Sequence[RowCopies], after: object, began_s: float, _: float
    ) -> None:
        """Copy rows to the blocks of a request."""
        ticket = self._copier.restore(copies, after)
        self.tickets[self._open(_DEVICE, "restore", [job], began_s, copies)] = ticket

    def fetch(self, job: RankJob, name: str, now: float) -> None:
        """Have a tier read contents into rows; the job ends once the tier writes the rows no more."""
        tier = self._tier(job, name)
        if tier is not None and not job.named:
            self._jobs.end(job, Report.FETCHED, job.refused)
        elif tier is not None:
            self._begin(tier, "read", job, self._memory(job), now)

    def seek(self, job: RankJob, name: str, now: float) -> None:
        """Ask a tier which of a job's contents it has; the job ends with the answer."""
        tier = self._tier(job, name)
        if tier is not None:
            self._begin(tier, "seek", job, [(job.copies.group, hash_) for hash_ in job.hashes], now)

    def pin(self, pins: Sequence[tuple[int, bytes, bool]], _: float) -> None:
        """Pin or unpin contents in all tiers."""
        for tier in self.tiers:
            self._safely(tier, "pin", partial(tier.pin, pins))

    def count(self, orders: OffloadOrders, _: float) -> None:
        """Count session actions by outcome, and set the bytes that sessions pin in each tier."""
        for action, outcome, times in orders.actions:
            self._metrics.session_actions.labels(action, outcome).inc(times)
        for tier, total_bytes in orders.pinned:
            self._metrics.pinned[tier].set(total_bytes)

    def clear(self, now: float) -> None:
        """Clear the tiers, and keep them from getting the snapshots under way."""
        for key in self.tickets:
            for job in self.calls[key].jobs:
                job.is_void = True
        # Disk reads for peers since the order to clear was given have contents that are cleared now.
        self._jobs.forget_names(only_lent=True)
        for tier in self.tiers:
            self._safely(tier, "clear", tier.clear)
            # Changes from before are void: the scheduler half knows that all contents are gone.
            self._take(tier, self._poll(tier), now, with_changes=False)
        self._jobs.forget_changes()

    def close_tiers(self, now: float, *, with_changes: bool = True) -> None:
        """Close and drop all tiers. Their unfinished calls fail."""
        for tier in self.tiers:
            is_quiescent = self._safely(tier, "close", tier.close) is True
            self._take(tier, self._poll(tier), now, with_changes=with_changes)
            for key in [key for key in self.calls if key[0] == tier.name]:
                self._give_up(key, "closed")
                call = self.calls.pop(key)
                if is_quiescent:
                    self._release(call)
        self.tiers = ()

    # Ends

    def advance(self, now: float) -> bool:
        """Process calls that ended, and give up late ones; returns whether there were any."""
        # Copies first: rows that they fill are written to the tiers in the same step.
        done = [key for key, ticket in self.tickets.items() if ticket.done]
        for key in done:
            self._copied(key, now)
        progress = bool(done)
        is_recovering = False
        for tier in self.tiers:
            update = self._poll(tier)
            is_recovering |= update.is_recovering
            if update:
                progress = True
                self._take(tier, update, now)
        # Only after the last changes were taken.
        self._jobs.is_recovering = is_recovering
        if now >= self.next_deadline_s:
            progress = True
            for key in [key for key, call in self.calls.items() if now >= call.deadline_s]:
                limit_s = self.timeouts_s[key[1]]
                self._log(*key[:2], f"did not end a {key[1]} within {limit_s:g} s: its rows stay out of use")
                self._give_up(key, "late" if key[0] == _DEVICE else "timeout")
            self.next_deadline_s = min((call.deadline_s for call in self.calls.values()), default=math.inf)
        return progress

    def _copied(self, key: _Key, now: float) -> None:
        call, ticket, verb = self.calls.pop(key), self.tickets.pop(key), key[1]
        if verb == "store":
            self._metrics.wait_seconds.labels("staging").inc(ticket.waited_s)
        if call.given_up:
            self._release(call)
            return
        for job in call.jobs:
            if ticket.error is not None:
                self._fail_copy(job, f"offload_{verb}", ticket.error)
                continue
            try:
                if verb == "store":
                    copied = [(job.copies.group, len(job.copies.rows))]
                    self._moved("stored", CPU, copied, now - call.began_s)
                    self._stored(job, now)
                else:
                    copied = [(copies.group, len(copies.rows)) for copies in call.restored]
                    self._moved("restored", CPU, copied, now - call.began_s)
                    self._jobs.end(job, Report.RECEIVED)
            except Exception as error:
                # Reports that the job sent before this stand.
                self._fail_copy(job, "internal", f"an error of our own: {error}")

    def _stored(self, job: RankJob, now: float) -> None:
        """Write the rows of a store to all tiers; the job ends once none of them reads the rows any more."""
        self._jobs.end(job, Report.STORED, job.refused)
        if job.is_void:
            self._jobs.fail(job, "cleared")
        elif not self.tiers or not job.named:
            self._jobs.end(job, Report.KEPT)
        elif job.owed:
            job.num_writing = len(self.tiers)
            rows = self._memory(job)
            for tier in self.tiers:
                self._begin(tier, "write", job, rows, now)

    def _take(self, tier: LowerTier, update: TierUpdate, now: float, *, with_changes: bool = True) -> None:
        for reason, times in update.failures.items():
            self._metrics.failures.labels(reason).inc(times)
        # Changes before answers, which may end jobs: event origins of contents are dropped with their job.
        if with_changes and update.changes:
            self._jobs.change(_changes(tier.name, update))
        for verb, answers in update.done.items():
            for number, contents in answers.items():
                self._answered((tier.name, verb, number), contents, now)

    def _answered(self, key: _Key, contents: Iterable[Content], now: float) -> None:
        name, verb, number = key
        call = self.calls.pop(key, None)
        if call is None:
            self._log(name, "answer", f"answered job {number}, which it was not given: an internal error")
            return
        if call.given_up:
            self._release(call)
            return
        (job,) = call.jobs
        group, named_by_tier = job.copies.group, set(contents)
        named = [hash_ for hash_ in job.named if (group, hash_) in named_by_tier]
        if verb == "seek":
            self._jobs.end(job, Report.FOUND, named)
            return
        good, bad = ("kept", "unkept") if verb == "write" else ("fetched", "missed")
        self._moved(good, name, [(group, len(job.named) - len(named))], now - call.began_s)
        self._moved(bad, name, [(group, len(named))])
        if verb == "write":
            self._written(job)
        else:
            if name == DISK:
                self._measure(group, len(job.named) - len(named), call.began_s, now)
            self._jobs.end(job, Report.FETCHED, (*named, *job.refused))

    def _written(self, job: RankJob) -> None:
        job.num_writing -= 1
        if not job.num_writing:
            self._jobs.end(job, Report.KEPT)

    # Calls

    def _open(
        self, owner: str, verb: str, jobs: Sequence[RankJob], now: float, restored: Sequence[RowCopies] = ()
    ) -> _Key:
        key, deadline_s = (owner, verb, jobs[0].number), now + self.timeouts_s[verb]
        self.calls[key] = _Call(jobs, now, deadline_s, restored)
        self.next_deadline_s = min(self.next_deadline_s, deadline_s)
        return key

    def _begin(self, tier: LowerTier, verb: str, job: RankJob, given: Sequence[object], now: float) -> None:
        key = self._open(tier.name, verb, [job], now)
        try:
            getattr(tier, verb)(job.number, given)
        except Exception:
            # The tier may have begun the call: hold the rows until it answers or is closed.
            self._log(tier.name, verb, f"met an internal error in {verb}", exc_info=True)
            self._give_up(key, "refused")

    def _give_up(self, key: _Key, why: str) -> None:
        """Fail a call. Its rows are held before the failure is reported."""
        call, (owner, verb, _) = self.calls[key], key
        call.deadline_s = math.inf
        if call.given_up:
            return
        # The device may still write the blocks of a late restore, so its job stays open.
        call.given_up = verb != "restore"
        self._metrics.failures.labels(f"{owner}_{verb}_{why}").inc(len(call.jobs))
        for job in call.jobs if call.given_up else ():
            self._jobs.hold(job)
            if verb == "write":
                self._written(job)
            else:
                self._jobs.fail(job, why)

    def _release(self, call: _Call) -> None:
        for job in call.jobs:
            self._jobs.release(job)

    def _fail_copy(self, job: RankJob, reason: str, error: str) -> None:
        self._metrics.failures.labels(reason).inc()
        self._log(_DEVICE, reason, f"failed to copy blocks, which counts as a miss: {error}")
        self._jobs.fail(job, error)

    def _moved(
        self, move: str, name: str, counts: Sequence[tuple[int, int]], took_s: float | None = None
    ) -> None:
        plan = self._arena.plan
        length_bytes = sum(count * plan.row_class(group).row_bytes for group, count in counts)
        self._metrics.moved(move, name, sum(count for _, count in counts), length_bytes, took_s)

    def _measure(self, group: int, num_rows: int, began_s: float, now: float) -> None:
        """Update the disk's speed. Reads queue, so one counts from the end of the one before."""
        total_bytes, seconds = (_MEMORY * before for before in self._read_lately)
        total_bytes += num_rows * self._arena.plan.row_class(group).row_bytes
        seconds += now - max(began_s, self._read_until_s)
        self._read_lately, self._read_until_s = (total_bytes, seconds), now
        self.disk_bytes_per_s = total_bytes / max(seconds, 1e-6)

    def _poll(self, tier: LowerTier) -> TierUpdate:
        update = self._safely(tier, "poll", tier.poll)
        return TierUpdate() if update is None else update

    def _safely(self, tier: LowerTier, verb: str, call: Callable[[], T]) -> T | None:
        """The result of a tier's method; None if it raises, which is a bug, logged once and counted."""
        try:
            return call()
        except Exception:
            self._log(tier.name, verb, f"met an internal error in {verb}", exc_info=True)
            self._metrics.failures.labels(f"{tier.name}_internal").inc()
            return None

    def _tier(self, job: RankJob, name: str) -> LowerTier | None:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        self._log(name, "unknown", "has orders, and does not exist: an internal error")
        self._metrics.failures.labels("offload_unknown_tier").inc()
        self._jobs.fail(job, "there is no such tier")
        return None

    def _log(self, name: str, kind: str, text: str, *, exc_info: bool = False) -> None:
        """Log an error, once for each owner and kind; later ones are only counted."""
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            owner = "the device" if name == _DEVICE else name
            logger.error("offload, %s: it %s (further ones are only counted)", owner, text, exc_info=exc_info)

    def _memory(self, job: RankJob) -> list[TierRow]:
        group = job.copies.group
        return [
            TierRow(group, hash_, self._arena.row(group, row), job.footers.get(hash_, b""))
            for hash_, row in zip(job.named, job.copies.rows, strict=True)
        ]


def _changes(name: str, update: TierUpdate) -> Iterator[TierChange]:
    """The contents that a tier lost and gained, by group, in pieces that fit in a report."""
    for is_added in (False, True):
        by_group: dict[int, list[bytes]] = {}
        for group, hash_ in update.changed(is_added):
            by_group.setdefault(group, []).append(hash_)
        for group, hashes in by_group.items():
            for first in range(0, len(hashes), CHANGES_AT_ONCE):
                part = tuple(hashes[first : first + CHANGES_AT_ONCE])
                if not is_added:
                    yield TierChange(name, group, (), part)
                    continue
                footers = tuple(update.footers.get((group, name), b"") for name in part)
                yield TierChange(name, group, part, (), footers if any(footers) else ())

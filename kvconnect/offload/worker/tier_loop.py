"""The thread of a worker's tiers, and the calls to device and tiers that are under way.

The thread carries out orders, waits for copies of the device, and drives the tiers below host memory. A call
that is late stays under way, and its job open, so that its rows are not used for anything else: the scheduler
half bounds how long requests wait. The module does not decide which contents are kept.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kvconnect.errors import ConfigError
from kvconnect.metrics import OffloadMetrics
from kvconnect.offload.copies.copier import Copier, CopyTicket
from kvconnect.offload.copies.rows import RowArena
from kvconnect.offload.lower_tier import LowerTier
from kvconnect.offload.tier import DISK, HOST, Content, Kind, TierCall, TierRow, TierUpdate
from kvconnect.offload.worker.jobs import RankJob, RankJobs
from kvconnect.transfer.orders import CHANGES_AT_ONCE, OffloadOrders, RowCopies, TierChange

logger = logging.getLogger(__name__)

PEER_READ_TIMEOUT_S = 20.0
"""How long a peer's fetch waits for what is read from disk for it."""

CPU = "cpu"
"""The name of host memory in metrics."""

_MEMORY = 0.8
"""The decay, per read, of older reads in the measured disk speed."""
_DEVICE = "offload"
"""The owner of copies in failure counts."""

_LONGEST_SLEEP_S = 1.0
_NAP_S = 500e-6
_LAST_COPIES_S = 5.0
_CLOSE_TIMEOUT_S = 20.0


class _Copy(NamedTuple):
    """A copy for some jobs; ``restored`` has what a restore copies, and is None for a snapshot."""

    ticket: CopyTicket
    jobs: Sequence[RankJob]
    began_s: float
    restored: Sequence[RowCopies] | None = None


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
        self.copies: list[_Copy] = []
        """Copies of the device that have not ended."""
        self._for_peers: deque[tuple[float, RankJob]] = deque()
        self._logged: set[tuple[str, str]] = set()
        self.disk_bytes_per_s = 0.0
        """The recent read speed of the disk; 0 until measured."""
        self._read_lately, self._read_until_s = (0.0, 0.0), -math.inf
        self._orders: deque[tuple[Callable[[float], None], RankJob | None]] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
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
            self.close_tiers(now)
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
        return next((tier.has(contents) for tier in self.tiers if tier.name == DISK), [False] * len(contents))

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
            tier.tracker.wake = self.wake
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
            return 0.0
        # Nobody wakes the thread when a device has copied.
        return _NAP_S if self.copies else _LONGEST_SLEEP_S

    def _run(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while not self._is_stopping:
            sleep_s = self._step()
            if sleep_s > 0 and self._wake.wait(sleep_s):
                self._wake.clear()
        # Shutdown: wait for copies, and close tiers. The worker fails jobs that are still open.
        give_up_s = time.monotonic() + _LAST_COPIES_S
        self._step()
        while self.copies and time.monotonic() < give_up_s:
            time.sleep(_NAP_S)
            self._step()
        self.close_tiers(time.monotonic())
        self._copier.close()
        self._arena.close()

    def _step(self) -> float:
        try:
            return self.step(time.monotonic())
        except Exception:
            # A bug of ours: failures of tiers do not raise.
            self._count_bug()
            return 0.1

    def _count_bug(self) -> None:
        self._metrics.failures.labels("internal").inc()
        logger.exception("internal error in the thread of the tiers")

    def _export(self) -> None:
        for kind, count in self._jobs.counts().items():
            self._metrics.open[kind].set(count)
        for name, state in self.tier_states().items():
            if name in self._metrics.taken:
                self._metrics.taken[name].set(state["taken_bytes"])
                self._metrics.limit[name].set(state["limit_bytes"])

    # Orders

    def begun(self, ticket: CopyTicket, jobs: Sequence[RankJob], began_s: float, _: float) -> None:
        """A snapshot of the blocks of these jobs to their rows has begun."""
        self.copies.append(_Copy(ticket, jobs, began_s))

    def restore(
        self, job: RankJob, copies: Sequence[RowCopies], after: object, began_s: float, _: float
    ) -> None:
        """Copy rows to the blocks of a request."""
        self.copies.append(_Copy(self._copier.restore(copies, after), [job], began_s, copies))

    def ask(self, kind: Kind, job: RankJob, name: str, now: float) -> None:
        """Have a tier read contents into rows, or find contents; the job ends with the tier's answer."""
        tier = next((tier for tier in self.tiers if tier.name == name), None)
        if tier is None:
            self._log(name, "unknown", "has orders, and does not exist: an internal error")
            self._metrics.failures.labels("offload_unknown_tier").inc()
            self._jobs.fail(job, "there is no such tier")
            return
        if job.key is None:
            self._for_peers.append((now + PEER_READ_TIMEOUT_S, job))
        self._begin(tier, kind, job, now)

    def pin(self, pins: Sequence[tuple[int, bytes, bool]], _: float) -> None:
        """Pin or unpin contents in all tiers."""
        for tier in self.tiers:
            self._safely(tier, "pin", pins)

    def count(self, orders: OffloadOrders, _: float) -> None:
        """Count session actions by outcome, and set the bytes that sessions pin in each tier."""
        for action, outcome, times in orders.actions:
            self._metrics.session_actions.labels(action, outcome).inc(times)
        for tier, total_bytes in orders.pinned:
            self._metrics.pinned[tier].set(total_bytes)

    def clear(self, now: float) -> None:
        """Clear the tiers, and keep them from getting the snapshots under way."""
        for job in (job for copy in self.copies for job in copy.jobs):
            job.is_void = True
        # Disk reads for peers since the order to clear was given have contents that are cleared now.
        self._jobs.forget_names(only_lent=True)
        for tier in self.tiers:
            self._safely(tier, "clear")
            self._take(tier, self._poll(tier), now)
        # Changes from before are void: the scheduler half knows that all contents are gone.
        self._jobs.forget_changes()

    def close_tiers(self, now: float) -> None:
        """Close and drop all tiers. Jobs of which a tier hangs stay open: it may still use their rows."""
        for tier in self.tiers:
            self._safely(tier, "close")
            self._take(tier, self._poll(tier), now)
        self.tiers = ()

    # Ends

    def advance(self, now: float) -> bool:
        """Process copies and calls that ended; returns whether there were any."""
        # Copies first: rows that they fill are written to the tiers in the same step.
        done = [copy for copy in self.copies if copy.ticket.done]
        for copy in done:
            self.copies.remove(copy)
            self._copied(copy, now)
        progress = bool(done)
        is_recovering = False
        for tier in self.tiers:
            # Before the poll, which takes all that was added until then; after it, if a recovery began since.
            is_recovering |= tier.tracker.is_recovering
            update = self._poll(tier)
            is_recovering |= tier.tracker.is_recovering
            if update:
                progress = True
                self._take(tier, update, now)
        # Only after the last changes were taken.
        self._jobs.is_recovering = is_recovering
        while self._for_peers and self._for_peers[0][0] <= now:
            _, job = self._for_peers.popleft()
            if job.owed:
                text = f"did not end a read within {PEER_READ_TIMEOUT_S:g} s: its rows stay out of use"
                self._log(DISK, "read", text)
                self._metrics.failures.labels("disk_read_timeout").inc()
                self._jobs.lose_names(job)
        return progress

    def _copied(self, copy: _Copy, now: float) -> None:
        ticket, jobs, began_s, restored = copy
        if restored is None:
            self._metrics.wait_seconds.labels("staging").inc(ticket.waited_s)
        for job in jobs:
            if ticket.error is not None:
                self._fail_copy(job, "offload_store" if restored is None else "offload_restore", ticket.error)
                continue
            try:
                each = [job.copies] if restored is None else restored
                copied = [(copies.group, len(copies.rows)) for copies in each]
                self._moved("stored" if restored is None else "restored", CPU, copied, now - began_s)
                if restored is None:
                    self._stored(job, now)
                else:
                    self._jobs.end(job)
            except Exception as error:
                # Reports that the job sent before this stand.
                self._fail_copy(job, "internal", f"an error of our own: {error}")

    def _stored(self, job: RankJob, now: float) -> None:
        """Write the rows of a store to all tiers; the job ends once none of them reads the rows any more."""
        self._jobs.end(job)
        if job.is_void:
            self._jobs.fail(job, "cleared")
        elif not self.tiers:
            self._jobs.end(job)
        elif job.owed:
            job.num_writing = len(self.tiers)
            for tier in self.tiers:
                self._begin(tier, "write", job, now)

    def _take(self, tier: LowerTier, update: TierUpdate, now: float) -> None:
        for reason, times in update.failures.items():
            self._metrics.failures.labels(reason).inc(times)
        # Changes before answers, which may end jobs: event origins of contents are dropped with their job.
        if update.changes:
            self._jobs.change(_changes(tier.name, update))
        for call in update.done:
            self._ended(tier.name, call, now)

    def _ended(self, name: str, call: TierCall, now: float) -> None:
        job: RankJob = call.job
        group, named, verb = job.copies.group, [hash_ for _, hash_ in call.named], call.kind
        if verb == "seek":
            self._jobs.end(job, named)
            return
        good, bad = ("kept", "unkept") if verb == "write" else ("fetched", "missed")
        self._moved(good, name, [(group, len(job.hashes) - len(named))], now - call.began_s)
        self._moved(bad, name, [(group, len(named))])
        if verb == "write":
            job.num_writing -= 1
            if not job.num_writing:
                self._jobs.end(job)
        else:
            if name == DISK:
                self._measure(group, len(job.hashes) - len(named), call.began_s, now)
            self._jobs.end(job, named)

    def _begin(self, tier: LowerTier, kind: Kind, job: RankJob, now: float) -> None:
        group = job.copies.group
        if kind == "seek":
            rows = [TierRow(group, hash_) for hash_ in job.hashes]
        else:
            rows = [
                TierRow(group, hash_, self._arena.row(group, row), job.footers.get(hash_, b""))
                for hash_, row in zip(job.hashes, job.copies.rows, strict=True)
            ]
        # If it raises, it may have begun the call all the same.
        self._safely(tier, "begin", TierCall(kind, rows, job, now))

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
        update: TierUpdate | None = self._safely(tier, "poll")
        return TierUpdate() if update is None else update

    def _safely(self, tier: LowerTier, verb: str, *given: Any) -> Any:
        """The result of a tier's method; None if it raises, which is a bug, logged once and counted."""
        try:
            return getattr(tier, verb)(*given)
        except Exception:
            self._log(tier.name, verb, f"met an internal error in {verb}", exc_info=True)
            self._metrics.failures.labels(f"{tier.name}_internal").inc()
            return None

    def _log(self, name: str, kind: str, text: str, *, exc_info: bool = False) -> None:
        """Log an error, once for each owner and kind; later ones are only counted."""
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            owner = "the device" if name == _DEVICE else name
            logger.error("offload, %s: it %s (further ones are only counted)", owner, text, exc_info=exc_info)


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

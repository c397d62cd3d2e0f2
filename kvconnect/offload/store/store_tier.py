"""The shared tier: a Mooncake Store, in which a node finds KV that other nodes keep.

Values are records as on disk: a header with names and checksums, then the bytes of a row. This node has no
index of the store: a seek asks it. The store's library runs in a process of its own, and values pass through
memory shared with it, so that no late write of the library can reach a row.

A store that is unreachable or late counts as empty. The next job tries to reach it again, with growing pauses
while that fails.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvconnect.addresses import own_address, split_address
from kvconnect.cache.specs import div_ceil
from kvconnect.config import OffloadConfig
from kvconnect.engine.store_process import Order, Settings, StoreMemory, StoreProcess, Verb
from kvconnect.errors import KVConnectError
from kvconnect.offload.namespace import Namespace
from kvconnect.offload.record import HEADER_BYTES, Flaw, RecordFormat
from kvconnect.offload.tier import MAX_HASH_BYTES, CompletionTracker, Content, Kind, LowerTier, TierRow

logger = logging.getLogger(__name__)

MOST = 1 << 17
"""The most contents announced to routers; of more, the least recently used are reported as removed."""


class Announced(CompletionTracker):
    """Reports the ``most`` contents written or read last as changes, for events; with 0, none."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._seen_lock = threading.Lock()
        self._seen: OrderedDict[Content, None] = OrderedDict()

    def there(self, contents: Iterable[Content]) -> None:
        """The store has contents. Report known ones too: the scheduler half forgets what any rank missed."""
        if not self.most:
            return
        with self._seen_lock:
            there = list(contents)
            for content in there:
                self._seen[content] = None
                self._seen.move_to_end(content)
            self.add(there)
            over = max(0, len(self._seen) - self.most)
            self.remove([self._seen.popitem(last=False)[0] for _ in range(over)])

    def gone(self, contents: Iterable[Content]) -> None:
        """The store answered that it does not have these contents."""
        with self._seen_lock:
            known = [content for content in contents if content in self._seen]
            for content in known:
                del self._seen[content]
            self.remove(known)

    def lost(self, reason: str) -> None:
        """The store cannot be reached: report all announced contents as removed."""
        with self._seen_lock:
            self.remove(list(self._seen))
            self._seen.clear()
        self.fail(reason)

    def forget_changes(self) -> None:
        """The owner cleared the store: forget announced contents, and report none as removed."""
        with self._seen_lock:
            super().forget_changes()
            self._seen.clear()


UNREACHABLE_CODES = range(-999, -899)
"""Codes of the library for a master that does not answer."""
_GOODBYE_S = 3.0
_LONGEST_WAIT_S = 5.0


class LinkState(enum.Enum):
    """The state of the store's process; only in ``UP`` it takes orders."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class StoreLink:
    """Starts the store's process, and restarts it after a failure.

    Args:
        start: makes a process; called on the link's thread, which ends last. Raises ``EngineError``.
        changed: guards the link's state and its owner's; notified whenever ``state`` changes.
        on_failure: called with a reason when the process was lost, on any thread.
        call_timeout_s, retry_s, says_goodbye: see ``StoreTier``.
    """

    def __init__(
        self,
        start: Callable[[], StoreProcess],
        changed: threading.Condition,
        on_failure: Callable[[str], None],
        *,
        call_timeout_s: float,
        retry_s: tuple[float, float],
        says_goodbye: bool = True,
    ) -> None:
        self._start, self._changed, self._on_failure = start, changed, on_failure
        self._call_timeout_s, self._retry_s, self._says_goodbye = call_timeout_s, retry_s, says_goodbye
        self.state = LinkState.STARTING
        self._process: StoreProcess | None = None
        self._is_wanted = True
        self._pause_s, self._retry_at = retry_s[0], 0.0
        self._is_logged = False
        self._num_asking = 0
        self._thread = threading.Thread(target=self._run, name="kvconnect-store", daemon=True)
        self._thread.start()

    def want(self) -> None:
        """A job needs the store: restart its process if it is down. The caller holds ``changed``."""
        if self.state is LinkState.DOWN and not self._is_wanted:
            self._is_wanted = True
            self._changed.notify_all()

    def ask(self, lane: int, order: Order) -> Sequence[int] | None:
        """Send the process an order and wait for its codes; None: process and order are lost."""
        with self._changed:
            process = self._process
            if self.state is not LinkState.UP or process is None:
                return None
            self._num_asking += 1
        codes: Sequence[int] | None = None
        trouble = "an error of our own"
        try:
            codes = process.ask(lane, order, self._call_timeout_s)
            trouble = "its master does not answer" if any(code in UNREACHABLE_CODES for code in codes) else ""
        except KVConnectError as error:
            trouble = str(error)
        finally:
            if trouble:
                # Kill the process before this order's memory is reused, so that no late write can reach it.
                process.kill()
            with self._changed:
                self._num_asking -= 1
                self._changed.notify_all()
                if not trouble:
                    self._pause_s = self._retry_s[0]
                elif self._process is process and self.state is LinkState.UP:
                    self._lose(trouble)
        return None if trouble else codes

    def lose(self, why: str) -> None:
        """Stop using the process, because the store failed."""
        with self._changed:
            if self.state is LinkState.UP:
                self._lose(why)

    def close(self, timeout_s: float) -> bool:
        """End the process; returns whether it has ended, so that its shared memory is quiescent."""
        with self._changed:
            self.state = LinkState.CLOSED
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _lose(self, why: str) -> None:
        self.state = LinkState.DOWN
        self._is_wanted = False
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._retry_s[1])
        self._changed.notify_all()
        self._on_failure("store_unreachable")
        if not self._is_logged:
            self._is_logged = True
            logger.warning(
                "the store cannot be used, and keeps nothing until it can; look at offload.store and its "
                "master: %s",
                why,
            )

    def _run(self) -> None:
        is_closed = False
        while not is_closed:
            self._start_once()
            with self._changed:
                while not self._must_act():
                    pause_s = self._retry_at - time.monotonic() if self._is_wanted else _LONGEST_WAIT_S
                    self._changed.wait(min(max(pause_s, 0.01), _LONGEST_WAIT_S))
                process, self._process = self._process, None
                is_closed = self.state is LinkState.CLOSED
                if is_closed:
                    self._changed.wait_for(lambda: not self._num_asking, _GOODBYE_S)
            if process is not None:
                if is_closed and self._says_goodbye and not self._num_asking:
                    # Let the store unregister this process's memory, rather than detect the loss.
                    with contextlib.suppress(KVConnectError):
                        process.ask(0, Order(Verb.CLOSE), _GOODBYE_S)
                process.close()

    def _must_act(self) -> bool:
        """Whether the link is closed, or the next process is due and no order is under way."""
        if self.state is LinkState.CLOSED:
            return True
        is_due = self.state is LinkState.DOWN and self._is_wanted and time.monotonic() >= self._retry_at
        return is_due and not self._num_asking

    def _start_once(self) -> None:
        process: StoreProcess | None = None
        why = ""
        try:
            process = self._start()
        except KVConnectError as error:
            why = str(error)
        except Exception as error:
            logger.exception("internal error in the start of the store's process")
            why = f"{type(error).__name__}: {error}"
        with self._changed:
            self._process = process
            if self.state is LinkState.CLOSED:
                return
            if process is None:
                self._lose(why)
                return
            self.state = LinkState.UP
            self._changed.notify_all()
            if self._is_logged:
                self._is_logged = False
                logger.info("the store can be used again")


_BATCH_BYTES = 16 << 20
_BATCH_KEYS = 4096
_ALIGN_BYTES = 64
_CALL_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 15.0
_CLOSE_TIMEOUT_S = 5.0
_RETRY_S = (1.0, 60.0)

_NOT_THERE = -704
_REASONS = {-200: "store_full", -600: "store_wrong_size"}
"""The reasons that the library's codes count as."""

LANES: tuple[Kind, ...] = ("write", "read", "seek")
"""Each lane has a thread here and one in the store's process, and the name of its jobs' kind."""


class _Item(NamedTuple):
    """One content of a job; ``memory`` is the row's, and empty for a seek."""

    job: int
    epoch: int
    content: Content
    memory: memoryview = memoryview(b"")

    @property
    def record_bytes(self) -> int:
        """The bytes of the record in shared memory; 0 for a seek."""
        return _record_bytes(len(self.memory)) if self.memory else 0


class StoreTier(LowerTier):
    """Rows in a store that nodes share.

    Three threads write, read and seek; a fourth starts the store's process.

    Args:
        start: makes the process that uses the store, with a lane for each of ``LANES``.
        namespace: the namespace's digest in hexadecimal.
        max_queued_bytes: most bytes of rows that wait to be written.
        batch_bytes: most bytes of records under way in each direction; a longer record is not kept.
        call_timeout_s: how long the store may take for a batch; after that its process is killed.
        retry_s: first and longest pause before the process is started again, doubled each time.
        says_goodbye: whether the store is notified when the process ends, which takes a second.
    """

    name = "store"

    def __init__(
        self,
        start: Callable[[StoreMemory], StoreProcess],
        namespace: str,
        *,
        max_queued_bytes: int,
        batch_bytes: int = _BATCH_BYTES,
        call_timeout_s: float = _CALL_TIMEOUT_S,
        retry_s: tuple[float, float] = _RETRY_S,
        says_goodbye: bool = True,
    ) -> None:
        self._prefix = f"kvconnect/{namespace}/"
        self._format = RecordFormat(namespace)
        self._max_queued_bytes, self._batch_bytes = max_queued_bytes, batch_bytes
        self._memory = memory = StoreMemory(2 * batch_bytes)
        self.tracker: Announced = Announced()
        self._changed = threading.Condition()
        self._waiting: dict[Kind, deque[_Item]] = {lane: deque() for lane in LANES}
        self._queued_bytes = 0
        self._epoch = self._cleared = 0
        self._is_writing = False
        self._link = StoreLink(
            lambda: start(memory),
            self._changed,
            self.tracker.lost,
            call_timeout_s=call_timeout_s,
            retry_s=retry_s,
            says_goodbye=says_goodbye,
        )
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"kvconnect-store-{lane}", daemon=True)
            for lane in LANES
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the owner's thread

    def announce(self) -> None:
        """Report contents that jobs find or miss in the store as changes. Call it before the first job."""
        self.tracker.most = MOST

    def write(self, job: int, rows: Sequence[TierRow]) -> None:
        self.tracker.open("write", job, len(rows))
        taken: list[_Item] = []
        refused: dict[str, list[Content]] = {}
        left_bytes = self._max_queued_bytes - self._queued_bytes
        for row in rows:
            length = len(row.memory)
            if not 0 < len(row.hash) <= MAX_HASH_BYTES or not length:
                refused.setdefault("store_bad_row", []).append(row.content)
            elif length > left_bytes:
                refused.setdefault("store_queue_full", []).append(row.content)
            elif _record_bytes(length) > self._batch_bytes:
                refused.setdefault("store_too_large", []).append(row.content)
            else:
                left_bytes -= length
                taken.append(_Item(job, self._epoch, row.content, row.memory))
        for reason, contents in refused.items():
            self.tracker.fail(reason, times=len(contents))
            self.tracker.settle("write", job, len(contents), contents)
        self._submit("write", taken)

    def read(self, job: int, rows: Sequence[TierRow]) -> None:
        self.tracker.open("read", job, len(rows))
        items = [_Item(job, self._epoch, row.content, row.memory) for row in rows]
        large = [item for item in items if item.record_bytes > self._batch_bytes]
        self._settle("read", large, [])
        self._submit("read", [item for item in items if item.record_bytes <= self._batch_bytes])

    def seek(self, job: int, contents: Sequence[Content]) -> None:
        self.tracker.open("seek", job, len(contents))
        self._submit("seek", [_Item(job, self._epoch, content) for content in contents])

    def clear(self) -> None:
        """Remove this namespace's contents from the store, whichever node wrote them. Later jobs wait."""
        with self._changed:
            self._epoch += 1
            self.tracker.forget_changes()
            self._link.want()
            self._changed.notify_all()

    def close(self) -> bool:
        """Stop. Written records stay in the store, except those in memory that this rank gave to it."""
        is_over = self._link.close(_CLOSE_TIMEOUT_S)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)
        is_quiescent = not any(thread.is_alive() for thread in self._threads)
        if is_over and is_quiescent:
            self._memory.close()
        # A process that is left behind can reach the shared memory, but no row.
        return is_quiescent

    def state(self) -> dict[str, Any]:
        return {
            "link": self._link.state.value,
            "queued_bytes": self._queued_bytes,
            "jobs": self.tracker.open_jobs(),
        }

    def _submit(self, lane: Kind, items: Sequence[_Item]) -> None:
        with self._changed:
            if lane == "write":
                self._queued_bytes += sum(len(item.memory) for item in items)
            is_closed = self._link.state is LinkState.CLOSED
            if not is_closed:
                self._waiting[lane] += items
                self._link.want()
                self._changed.notify_all()
        if is_closed:
            # The threads may have ended, so fail the items here.
            self._settle(lane, items, [])

    # ---- the threads

    def _run(self, lane: Kind) -> None:
        """Process the items of a lane until the tier is closed and the lane is empty."""
        work = {"write": self._write, "read": self._read, "seek": self._ask}[lane]
        while (found := self._next(lane)) is not None:
            batch, is_lost = found
            good: list[_Item] = []
            try:
                if batch and not is_lost:
                    good = work(batch)
                    self._announce(lane, batch, good)
                elif not batch:
                    self._clear()
            except Exception:
                logger.exception("internal error in the store tier, which goes on")
                self.tracker.fail("store_internal")
            self._settle(lane, batch, good)
            if lane == "write":
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _next(self, lane: Kind) -> tuple[list[_Item], bool] | None:
        """The next batch, and whether it fails untried; an empty batch means to clear, None to end."""
        with self._changed:
            while True:
                waiting, state = self._waiting[lane], self._link.state
                if waiting and (lane == "write" and waiting[0].epoch < self._epoch):
                    return self._take(waiting, self._epoch - 1), True
                if waiting and state in (LinkState.DOWN, LinkState.CLOSED):
                    return self._take(waiting, self._epoch), True
                if state is LinkState.CLOSED:
                    return None
                if state is LinkState.UP:
                    if lane == "seek" and self._cleared < self._epoch and not self._is_writing:
                        return [], False
                    if waiting and waiting[0].epoch <= self._cleared:
                        self._is_writing = self._is_writing or lane == "write"
                        return self._take(waiting, self._cleared), False
                self._changed.wait()

    def _take(self, waiting: deque[_Item], last_epoch: int) -> list[_Item]:
        """Take the next items, up to an epoch, that fit in one batch."""
        batch: list[_Item] = []
        left_bytes = self._batch_bytes
        while waiting and len(batch) < _BATCH_KEYS and waiting[0].epoch <= last_epoch:
            left_bytes -= waiting[0].record_bytes
            if batch and left_bytes < 0:
                break
            batch.append(waiting.popleft())
        return batch

    def _write(self, batch: list[_Item]) -> list[_Item]:
        offsets, lengths = _places(batch, 0)
        view = self._memory.view
        for item, offset in zip(batch, offsets, strict=True):
            start = offset + HEADER_BYTES
            row = view[start : start + len(item.memory)]
            row[:] = item.memory
            # The checksum is of the copied bytes: the record stays consistent if the row changes meanwhile.
            view[offset:start] = self._format.header(item.content, row)
        codes = self._link.ask(0, Order(Verb.PUT, self._keys(batch), offsets, lengths))
        for code in codes or ():
            if code < 0:
                self._fail_code(code)
        return [item for item, code in zip(batch, codes or (), strict=False) if code >= 0]

    def _read(self, batch: list[_Item]) -> list[_Item]:
        offsets, lengths = _places(batch, self._batch_bytes)
        codes = self._link.ask(1, Order(Verb.GET, self._keys(batch), offsets, lengths))
        good, spoilt = [], []
        for item, code, offset, length in zip(batch, codes or (), offsets, lengths, strict=False):
            if code != length:
                self._fail_code(code)
                continue
            header = self._memory.view[offset : offset + HEADER_BYTES]
            row = self._memory.view[offset + HEADER_BYTES : offset + length]
            flaw = self._format.flaw(header, item.content, row)
            if flaw is None:
                item.memory[:] = row
                good.append(item)
            else:
                self.tracker.fail("store_foreign" if flaw is Flaw.FOREIGN else "store_corrupt")
                spoilt.append(item)
        if spoilt:
            # Remove bad records, so that a later store can write them again.
            self._link.ask(1, Order(Verb.REMOVE, self._keys(spoilt)))
        return good

    def _ask(self, batch: list[_Item]) -> list[_Item]:
        codes = self._link.ask(2, Order(Verb.EXIST, self._keys(batch)))
        return [item for item, code in zip(batch, codes or (), strict=False) if code == 1]

    def _clear(self) -> None:
        epoch = self._epoch
        codes = self._link.ask(2, Order(Verb.CLEAR, (self._prefix,)))
        if codes is None:
            return
        if any(code < 0 for code in codes):
            self.tracker.fail("store_not_cleared")
            # No job may find cleared contents, so the store counts as unreachable until it can be cleared.
            self._link.lose(f"it could not be cleared: code {min(codes)}")
            return
        with self._changed:
            self._cleared = epoch
            self._changed.notify_all()

    def _announce(self, lane: Kind, batch: Sequence[_Item], good: Sequence[_Item]) -> None:
        # Before the job is reported, which drops event origins of its contents. Contents of a seek have none.
        done = set(map(id, good))
        with self._changed:
            if self._link.state is LinkState.UP:
                current = [item for item in batch if item.epoch == self._epoch]
                if lane != "seek":
                    self.tracker.there(item.content for item in current if id(item) in done)
                if lane != "write":
                    self.tracker.gone(item.content for item in current if id(item) not in done)

    def _settle(self, lane: Kind, batch: Sequence[_Item], good: Sequence[_Item]) -> None:
        """Settle the items of a batch, whose rows are quiescent now."""
        done = set(map(id, good))
        if lane == "write":
            with self._changed:
                self._queued_bytes -= sum(len(item.memory) for item in batch)
        by_job: dict[int, list[_Item]] = {}
        for item in batch:
            by_job.setdefault(item.job, []).append(item)
        for job, items in by_job.items():
            # Writes and reads name the failed contents, seeks the found ones.
            named = [item.content for item in items if (id(item) in done) == (lane == "seek")]
            self.tracker.settle(lane, job, len(items), named)

    def _fail_code(self, code: int) -> None:
        """Count one of the library's codes as a failure, unless it means that a key is absent."""
        if code != _NOT_THERE:
            self.tracker.fail(
                _REASONS.get(code, "store_wrong_size" if code >= 0 else "store_io"), f"code {code}"
            )

    def _keys(self, batch: Sequence[_Item]) -> tuple[str, ...]:
        return tuple(f"{self._prefix}{item.content[0]}/{item.content[1].hex()}" for item in batch)


def _record_bytes(row_bytes: int) -> int:
    return div_ceil(HEADER_BYTES + row_bytes, _ALIGN_BYTES) * _ALIGN_BYTES


def _places(batch: Sequence[_Item], start: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets of a batch's records in shared memory, from ``start`` on, and their lengths in bytes."""
    offsets, lengths = [], []
    for item in batch:
        offsets.append(start)
        lengths.append(HEADER_BYTES + len(item.memory))
        start += item.record_bytes
    return tuple(offsets), tuple(lengths)


def open_store_tier(
    config: OffloadConfig,
    namespace: Namespace,
    *,
    most_row_bytes: int,
    call_timeout_s: float = _CALL_TIMEOUT_S,
) -> StoreTier:
    """The store tier of one rank, as configured."""
    master = split_address(config.store)
    assert master is not None, "check_offload has refused it"

    def start(memory: StoreMemory) -> StoreProcess:
        settings = Settings(
            master=config.store,
            metadata=config.store_metadata,
            protocol=config.store_protocol,
            host=own_address(*master),
            segment_bytes=config.store_bytes,
        )
        return StoreProcess(settings, memory, len(LANES), start_timeout_s=_START_TIMEOUT_S)

    return StoreTier(
        start,
        namespace.digest.hex(),
        max_queued_bytes=config.max_queued_bytes,
        batch_bytes=max(_BATCH_BYTES, _record_bytes(most_row_bytes)),
        call_timeout_s=call_timeout_s,
        # The store must unregister memory that this rank gave to it; else other nodes go on reading there.
        says_goodbye=config.store_bytes > 0,
    )

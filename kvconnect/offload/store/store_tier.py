"""The shared tier: a Mooncake Store, in which nodes find what other nodes keep.

Values are records as on disk: a header that names what they belong to, with checksums, and the bytes of a
row. The store keeps no index here: it must be asked. Its library lives in a process of its own, and values go
through memory that is shared with it, so nothing that the library does late can reach a row.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvconnect.addresses import own_address, split_address
from kvconnect.cache.specs import div_ceil
from kvconnect.config import OffloadConfig
from kvconnect.engine.store_process import Order, Settings, StoreMemory, StoreProcess, Verb
from kvconnect.errors import ConfigError
from kvconnect.offload.completion_tracker import Kind
from kvconnect.offload.namespace import Namespace
from kvconnect.offload.record import HEADER_BYTES, Flaw, RecordFormat
from kvconnect.offload.store.announced import MOST, Announced
from kvconnect.offload.store.link import LinkState, StoreLink
from kvconnect.offload.tier import MAX_HASH_BYTES, Content, TierRow, TierUpdate

logger = logging.getLogger(__name__)

_BATCH_BYTES = 16 << 20
_BATCH_KEYS = 4096
_ALIGN_BYTES = 64
_CALL_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 15.0
_CLOSE_TIMEOUT_S = 5.0
_RETRY_S = (1.0, 60.0)

_NOT_THERE = -704
_REASONS = {-200: "store_full", -600: "store_wrong_size"}
"""What the library's codes are counted as."""

LANES: tuple[Kind, ...] = ("written", "read", "found")
"""A lane has a thread here and one in the store's process, and is named for what its jobs report."""


class _Item(NamedTuple):
    """One content of a job; without memory of a row it is only looked for."""

    job: int
    epoch: int
    content: Content
    memory: memoryview = memoryview(b"")

    @property
    def record_bytes(self) -> int:
        """What it takes in shared memory."""
        return _record_bytes(len(self.memory)) if self.memory else 0


class StoreTier:
    """Rows in a store that is shared with others. A ``LowerTier``.

    Three threads, one each for writing, reading and asking; a fourth starts the store's process.

    Args:
        start: makes the process that uses the store, with a lane for each of ``LANES``.
        namespace: the digest of what the rows depend on beside their content, in hexadecimal.
        max_queued_bytes: most bytes of rows that wait to be written.
        batch_bytes: most bytes of values that are under way each way; a longer one is not kept.
        call_timeout_s: how long the store may take for a batch; then its process is killed.
        retry_s: how long it is left alone once it could not be used, the first time and at most.
        says_goodbye: whether the store is notified when the process ends, which takes a second.
    """

    name = "store"
    indexed = False

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
        self._completions = Announced()
        self._changed = threading.Condition()
        self._waiting: dict[Kind, deque[_Item]] = {lane: deque() for lane in LANES}
        self._queued_bytes = 0
        self._epoch = self._cleared = 0
        self._is_writing = False
        self._logged: set[str] = set()
        self._link = StoreLink(
            lambda: start(memory),
            self._changed,
            self._completions.lost,
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

    # ---- what its owner calls

    def announce(self) -> None:
        """Report what it is seen to have, and to have no more. Before anything is asked of it."""
        self._completions.most = MOST

    def on_update(self, wake: Callable[[], None]) -> None:
        self._completions.on_update(wake)

    def write(self, job: int, rows: Sequence[TierRow]) -> None:
        self._completions.open("written", job, len(rows))
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
            self._fail(reason, times=len(contents))
            self._completions.settle("written", job, len(contents), contents)
        self._submit("written", taken)

    def read(self, job: int, rows: Sequence[TierRow]) -> None:
        self._completions.open("read", job, len(rows))
        items = [_Item(job, self._epoch, row.content, row.memory) for row in rows]
        large = [item for item in items if item.record_bytes > self._batch_bytes]
        self._settle("read", large, [])
        self._submit("read", [item for item in items if item.record_bytes <= self._batch_bytes])

    def seek(self, job: int, contents: Sequence[Content]) -> None:
        self._completions.open("found", job, len(contents))
        self._submit("found", [_Item(job, self._epoch, content) for content in contents])

    def poll(self) -> TierUpdate:
        return self._completions.take()

    def clear(self) -> None:
        """Forget what this namespace has in the store, by whichever node it was written. Later jobs wait."""
        with self._changed:
            self._epoch += 1
            self._completions.forget_changes()
            self._link.want()
            self._changed.notify_all()

    def close(self) -> bool:
        """Stop. What was written stays, as far as it is not in memory of ours."""
        is_over = self._link.close(_CLOSE_TIMEOUT_S)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)
        is_quiescent = not any(thread.is_alive() for thread in self._threads)
        if is_over and is_quiescent:
            self._memory.close()
        # A process that is left behind has the shared memory, and no row.
        return is_quiescent

    def state(self) -> dict[str, Any]:
        return {
            "link": self._link.state.value,
            "queued_bytes": self._queued_bytes,
            "jobs": self._completions.open_jobs(),
        }

    def _submit(self, lane: Kind, items: Sequence[_Item]) -> None:
        with self._changed:
            if lane == "written":
                self._queued_bytes += sum(len(item.memory) for item in items)
            is_closed = self._link.state is LinkState.CLOSED
            if not is_closed:
                self._waiting[lane] += items
                self._link.want()
                self._changed.notify_all()
        if is_closed:
            # The threads end once nothing waits.
            self._settle(lane, items, [])

    # ---- the threads

    def _run(self, lane: Kind) -> None:
        """Do what waits in a lane, until it is closed and nothing waits any more."""
        work = {"written": self._write, "read": self._read, "found": self._ask}[lane]
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
                logger.exception("the store tier goes on after an error of its own")
                self._fail("store_internal")
            self._settle(lane, batch, good)
            if lane == "written":
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _next(self, lane: Kind) -> tuple[list[_Item], bool] | None:
        """A batch, and whether it is lost without being tried. An empty one is to clear; None is the end."""
        with self._changed:
            while True:
                waiting, state = self._waiting[lane], self._link.state
                if waiting and (lane == "written" and waiting[0].epoch < self._epoch):
                    return self._take(waiting, self._epoch - 1), True
                if waiting and state in (LinkState.DOWN, LinkState.CLOSED):
                    return self._take(waiting, self._epoch), True
                if state is LinkState.CLOSED:
                    return None
                if state is LinkState.UP:
                    if lane == "found" and self._cleared < self._epoch and not self._is_writing:
                        return [], False
                    if waiting and waiting[0].epoch <= self._cleared:
                        self._is_writing = self._is_writing or lane == "written"
                        return self._take(waiting, self._cleared), False
                self._changed.wait()

    def _take(self, waiting: deque[_Item], last_epoch: int) -> list[_Item]:
        """The next of them, up to an epoch, that fit in one batch."""
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
            # Over the copied bytes: the record stays consistent if the row changes meanwhile.
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
                self._fail("store_foreign" if flaw is Flaw.FOREIGN else "store_corrupt")
                spoilt.append(item)
        if spoilt:
            # So that another request can write it anew.
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
            self._fail("store_not_cleared")
            # What should be gone must not be found: as if the store were not there, until it can be cleared.
            self._link.lose(f"it could not be cleared: code {min(codes)}")
            return
        with self._changed:
            self._cleared = epoch
            self._changed.notify_all()

    def _announce(self, lane: Kind, batch: Sequence[_Item], good: Sequence[_Item]) -> None:
        # Before the job is reported: until then it is known what a content stands for, of one sought never.
        done = set(map(id, good))
        with self._changed:
            if self._link.state is LinkState.UP:
                current = [item for item in batch if item.epoch == self._epoch]
                if lane != "found":
                    self._completions.there(item.content for item in current if id(item) in done)
                if lane != "written":
                    self._completions.gone(item.content for item in current if id(item) not in done)

    def _settle(self, lane: Kind, batch: Sequence[_Item], good: Sequence[_Item]) -> None:
        """These are dealt with. No thread touches their rows any more."""
        done = set(map(id, good))
        if lane == "written":
            with self._changed:
                self._queued_bytes -= sum(len(item.memory) for item in batch)
        by_job: dict[int, list[_Item]] = {}
        for item in batch:
            by_job.setdefault(item.job, []).append(item)
        for job, items in by_job.items():
            # Writing and reading report what failed, asking what was found.
            named = [item.content for item in items if (id(item) in done) == (lane == "found")]
            self._completions.settle(lane, job, len(items), named)

    def _fail_code(self, code: int) -> None:
        """Count one of the library's codes. What is not there is not wrong."""
        if code != _NOT_THERE:
            self._fail(_REASONS.get(code, "store_wrong_size" if code >= 0 else "store_io"), f"code {code}")

    def _fail(self, reason: str, about: str = "", *, times: int = 1) -> None:
        """Count what went wrong, and log the first of its kind."""
        self._completions.fail(reason, times)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("the store does not do everything, counted from now on: %s %s", reason, about)

    def _keys(self, batch: Sequence[_Item]) -> tuple[str, ...]:
        return tuple(f"{self._prefix}{item.content[0]}/{item.content[1].hex()}" for item in batch)


def _record_bytes(row_bytes: int) -> int:
    return div_ceil(HEADER_BYTES + row_bytes, _ALIGN_BYTES) * _ALIGN_BYTES


def _places(batch: Sequence[_Item], start: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the records of a batch are in shared memory, and how long they are."""
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
    """The store tier of one rank, as configured. Raises ``ConfigError``: the master's address is none."""
    master = split_address(config.store)
    if master is None:
        raise ConfigError(
            f"kv_connector_extra_config.offload.store is {config.store!r}, accepted: host:port of a Mooncake "
            "Store master"
        )

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
        # Memory that the store has from us is to be taken out of it; else others go on looking there.
        says_goodbye=config.store_bytes > 0,
    )

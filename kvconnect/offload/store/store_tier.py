"""The shared tier: a Mooncake Store, in which a node finds KV that other nodes keep.

Values are records as on disk: a header with names and checksums, then the bytes of a row. This node has no
index of the store: a seek asks it. The store's library runs in a process of its own, and values pass through
memory shared with it, so that no late write of the library can reach a row.

A store that is unreachable or late counts as empty. It is tried again, with growing pauses while that fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from kvconnect.addresses import own_address, split_address
from kvconnect.cache.specs import div_ceil
from kvconnect.config import OffloadConfig
from kvconnect.engine.store_process import Order, Settings, StoreMemory, StoreProcess, Verb
from kvconnect.errors import KVConnectError
from kvconnect.offload.lower_tier import CLOSE_TIMEOUT_S, LowerTier
from kvconnect.offload.namespace import Namespace
from kvconnect.offload.record import HEADER_BYTES, RecordFormat
from kvconnect.offload.tier import CompletionTracker, Content, Kind, TierRow

logger = logging.getLogger(__name__)

_UNREACHABLE = "store_unreachable"
MOST = 1 << 17
"""The most contents announced to routers; of more, the least recently used are reported as removed."""


class Announced(CompletionTracker):
    """Reports the ``most`` contents written or read last as changes, for events; with 0, none.

    ``StoreLink.changed`` guards what is announced.
    """

    def __init__(self) -> None:
        super().__init__("store")
        self.most = 0
        self._seen: dict[Content, None] = {}

    def there(self, contents: Sequence[Content]) -> None:
        """The store has contents. Report known ones too: the scheduler half forgets what any rank missed."""
        if self.most:
            for content in contents:
                self._seen.pop(content, None)
                self._seen[content] = None
            self.add(contents)
            self.gone(list(islice(self._seen, max(0, len(self._seen) - self.most))))

    def gone(self, contents: Iterable[Content]) -> None:
        """The store does not have these contents, or they are announced no more."""
        self.remove([content for content in contents if self._seen.pop(content, contents) is None])

    def lost(self, why: str) -> None:
        """The store cannot be reached: report all announced contents as removed."""
        self.gone(list(self._seen))
        self.fail(_UNREACHABLE, why)

    def clear(self) -> None:
        super().clear()
        self._seen.clear()


UNREACHABLE_CODES = range(-999, -899)
"""Codes of the library for a master that does not answer."""
_GOODBYE_S = 3.0


class StoreLink:
    """Starts the store's process, and another one some time after it was lost.

    Args:
        start: makes a process; called on the link's thread, which outlives it. Raises ``EngineError``.
        tracker: notified when the process was lost, on any thread.
        on_start: called on the link's thread after each attempt to start a process.
        call_timeout_s: how long the store may take for a batch; after that its process is killed.
        retry_s: first and longest pause before the process is started again, doubled each time.
        says_goodbye: whether the store is notified when the process ends, which takes a second.

    Attributes:
        changed: guards the link's state and its owner's.
        process: None while none takes orders.
    """

    def __init__(
        self,
        start: Callable[[], StoreProcess],
        tracker: Announced,
        on_start: Callable[[], None],
        *,
        call_timeout_s: float = 10.0,
        retry_s: tuple[float, float] = (1.0, 60.0),
        says_goodbye: bool = True,
    ) -> None:
        self.changed = threading.Condition()
        self._start, self._tracker, self._on_start = start, tracker, on_start
        self._call_timeout_s, self._retry_s, self._says_goodbye = call_timeout_s, retry_s, says_goodbye
        self.process: StoreProcess | None = None
        self._has_started = self._is_closed = False
        self._pause_s = retry_s[0]
        self._num_asking = 0
        self._thread = threading.Thread(target=self._run, name="kvconnect-store", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """For operators, and for who would prepare an order that is lost."""
        if self._is_closed:
            return "closed"
        return "up" if self.process is not None else "down" if self._has_started else "starting"

    def ask(self, lane: int, order: Order) -> Sequence[int] | None:
        """Send the process an order and wait for its codes; None: process and order are lost.

        Orders wait for the first start. While the process is down they are lost at once.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._has_started or self._is_closed)
            process = self.process
            if process is None or self._is_closed:
                return None
            self._num_asking += 1
        codes: Sequence[int] = ()
        trouble = "an error of our own"
        try:
            codes = process.ask(lane, order, self._call_timeout_s)
            if any(code in UNREACHABLE_CODES for code in codes):
                trouble = "its master does not answer"
            elif order.verb is Verb.CLEAR and min(codes) < 0:
                self._tracker.fail("store_not_cleared")
                trouble = f"it could not be cleared: code {min(codes)}"
            else:
                trouble = ""
        except KVConnectError as error:
            trouble = str(error)
        finally:
            if trouble:
                # Kill the process before this order's memory is reused, so that no late write can reach it.
                process.kill()
            with self.changed:
                self._num_asking -= 1
                self.changed.notify_all()
                if not trouble:
                    self._pause_s = self._retry_s[0]
                elif self.process is process:
                    self._lose(trouble)
        return None if trouble else codes

    def close(self, timeout_s: float) -> bool:
        """End the process; returns whether it has ended, so that its shared memory is quiescent."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._thread.join(_GOODBYE_S + timeout_s)
        return not self._thread.is_alive()

    def _lose(self, why: str) -> None:
        self.process = None
        self._tracker.lost(why)

    # ---- on the link's thread

    def _run(self) -> None:
        while not self._is_closed:
            process = self._start_once()
            self._on_start()
            with self.changed:
                self.changed.wait_for(lambda: self._is_closed or self.process is None)
                # The next process shares the memory of orders that are under way at a lost one.
                is_lost, most_s = self.process is None, _GOODBYE_S if self._is_closed else None
                is_idle = self.changed.wait_for(lambda: not self._num_asking, most_s)
                self.process = None
            if process is not None:
                if self._says_goodbye and is_idle and not is_lost:
                    # Let the store unregister this process's memory, rather than detect the loss.
                    with contextlib.suppress(KVConnectError):
                        process.ask(0, Order(Verb.CLOSE), _GOODBYE_S)
                process.close()
            with self.changed:
                pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._retry_s[1])
                self.changed.wait_for(lambda: self._is_closed, pause_s)

    def _start_once(self) -> StoreProcess | None:
        process: StoreProcess | None = None
        why = ""
        try:
            process = self._start()
        except KVConnectError as error:
            why = str(error)
        except Exception as error:
            logger.error("internal error in the start of the store's process", exc_info=error)
            why = f"{type(error).__name__}: {error}"
        with self.changed:
            self.process, self._has_started = process, True
            self.changed.notify_all()
            if process is None:
                self._lose(why)
            elif _UNREACHABLE in self._tracker.logged:
                self._tracker.logged.remove(_UNREACHABLE)
                logger.info("the store can be used again")
        return process


_BATCH_BYTES = 16 << 20
_BATCH_KEYS = 4096
_ALIGN_BYTES = 64
_START_TIMEOUT_S = 15.0

_NOT_THERE = -704
_REASONS = {-200: "store_full", -600: "store_wrong_size"}
"""The reasons that the library's codes count as."""

LANES: tuple[Kind, ...] = ("write", "read", "seek")
"""Each kind of call has a thread here and a lane of the store's process."""


class StoreTier(LowerTier):
    """Rows in a store that nodes share.

    Three threads write, read and seek, a batch at a time; a fourth starts the store's process.

    Args:
        start: makes the process that uses the store, with a lane for each of ``LANES``.
        namespace: the namespace's digest in hexadecimal.
        max_queued_bytes: most bytes of rows that wait to be written.
        batch_bytes: most bytes of records under way in each direction; no record is longer.
        link: times, and other settings of ``StoreLink``.
    """

    name = "store"

    def __init__(
        self,
        start: Callable[[StoreMemory], StoreProcess],
        namespace: str,
        *,
        max_queued_bytes: int,
        batch_bytes: int = _BATCH_BYTES,
        **link: Any,
    ) -> None:
        self._prefix = f"kvconnect/{namespace}/"
        self._format = RecordFormat(namespace)
        self._batch_bytes = batch_bytes
        self._memory = memory = StoreMemory(2 * batch_bytes)
        self.tracker: Announced = Announced()
        self._cleared = 0
        super().__init__(self.tracker, dict.fromkeys(LANES, 1), max_queued_bytes)
        self._link = StoreLink(
            lambda: start(memory),
            self.tracker,
            # Other nodes would find what is still to be cleared, though this one has no more calls.
            lambda: self._submit("write", self._clear),
            **link,
        )

    # ---- for the owner's thread

    def announce(self) -> None:
        """Report contents that calls find or miss in the store as changes. Call it before the first one."""
        self.tracker.most = MOST

    def clear(self) -> None:
        """Remove this namespace's contents from the store, whichever node wrote them.

        Writes and clears are done in turn. Until then reads and seeks find nothing.
        """
        with self._link.changed:
            self.tracker.clear()
        self._submit("write", self._clear)

    def close(self) -> bool:
        """Stop. Written records stay in the store, except those in memory that this rank gave to it."""
        is_over = self._link.close(CLOSE_TIMEOUT_S)
        have_ended = super().close()
        if is_over and have_ended:
            self._memory.close()
        # A process that is left behind can reach the shared memory, but no row.
        return have_ended

    def state(self) -> dict[str, Any]:
        return {"link": self._link.state, "queued_bytes": self.queued_bytes}

    # ---- on the lanes' threads

    def _parts(self, kind: Kind, rows: Sequence[TierRow]) -> Iterator[list[TierRow]]:
        batch: list[TierRow] = []
        left_bytes = self._batch_bytes
        for row in rows:
            left_bytes -= _record_bytes(row)
            if left_bytes < 0 or len(batch) == _BATCH_KEYS:
                yield batch
                batch, left_bytes = [], self._batch_bytes - _record_bytes(row)
            batch.append(row)
        if batch:
            yield batch

    def _carry_out(self, kind: Kind, rows: Sequence[TierRow], epoch: int) -> Sequence[bool]:
        if kind == "write":
            is_good = self._write(rows, epoch)
        elif kind == "read":
            is_good = self._read(rows)
        else:
            is_good = [code == 1 for code in self._ask("seek", Verb.EXIST, rows)]
        self._announce(kind, rows, is_good, epoch)
        return is_good

    def _ask(
        self, kind: Kind, verb: Verb, rows: Sequence[TierRow], places: _Places = ((), ())
    ) -> Sequence[int]:
        """The library's codes for rows; none if the store is lost."""
        if self._cleared != self.tracker.epoch:
            return ()
        return self._link.ask(LANES.index(kind), Order(verb, self._keys(rows), *places)) or ()

    def _clear(self) -> bool:
        """On the thread of writes: clear the store if that is due; False: it could not be cleared."""
        epoch = self.tracker.epoch
        if self._cleared != epoch:
            if self._link.ask(LANES.index("write"), Order(Verb.CLEAR, (self._prefix,))) is None:
                return False
            self._cleared = epoch
        return True

    def _write(self, rows: Sequence[TierRow], epoch: int) -> list[bool]:
        if self._link.state == "down" or not self._clear() or epoch < self.tracker.epoch:
            return []
        places, view = _places(rows, 0), self._memory.view
        for row, offset in zip(rows, places[0], strict=True):
            start = offset + HEADER_BYTES
            copied = view[start : start + len(row.memory)]
            copied[:] = row.memory
            # The checksum is of the copied bytes: the record stays whole if the row changes meanwhile.
            view[offset:start] = self._format.header(row.content, copied)
        codes = self._ask("write", Verb.PUT, rows, places)
        for code in codes:
            if code < 0:
                self._fail_code(code)
        return [code >= 0 for code in codes]

    def _read(self, rows: Sequence[TierRow]) -> list[bool]:
        places = _places(rows, self._batch_bytes)
        codes = self._ask("read", Verb.GET, rows, places)
        is_good: list[bool] = []
        spoilt: list[TierRow] = []
        for row, code, offset, length in zip(rows, codes, *places, strict=bool(codes)):
            is_good.append(False)
            if code != length:
                self._fail_code(code)
                continue
            header = self._memory.view[offset : offset + HEADER_BYTES]
            copied = self._memory.view[offset + HEADER_BYTES : offset + length]
            if flaw := self._format.flaw(header, row.content, copied):
                self.tracker.fail(f"store_{flaw}")
                spoilt.append(row)
                continue
            row.memory[:] = copied
            is_good[-1] = True
        if spoilt:
            # Remove bad records, so that a later store can write them again.
            self._ask("read", Verb.REMOVE, spoilt)
        return is_good

    def _announce(self, kind: Kind, rows: Sequence[TierRow], is_good: Sequence[bool], epoch: int) -> None:
        # Before the job is reported, which drops event origins of its contents. Contents of a seek have none.
        with self._link.changed:
            if self._link.process is not None and epoch == self.tracker.epoch:
                each = list(zip(rows, is_good, strict=False))
                if kind != "seek":
                    self.tracker.there([row.content for row, is_well in each if is_well])
                if kind != "write":
                    self.tracker.gone([row.content for row, is_well in each if not is_well])

    def _fail_code(self, code: int) -> None:
        """Count one of the library's codes as a failure, unless it means that a key is absent."""
        if code != _NOT_THERE:
            self.tracker.fail(
                _REASONS.get(code, "store_wrong_size" if code >= 0 else "store_io"), f"code {code}"
            )

    def _keys(self, rows: Sequence[TierRow]) -> tuple[str, ...]:
        return tuple(f"{self._prefix}{row.group}/{row.hash.hex()}" for row in rows)


def _record_bytes(row: TierRow) -> int:
    """The bytes of a row's record in shared memory; 0 for a seek, which has no memory."""
    return div_ceil(HEADER_BYTES + len(row.memory), _ALIGN_BYTES) * _ALIGN_BYTES if row.memory else 0


_Places = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets of a batch's records in shared memory, and their lengths in bytes."""


def _places(rows: Sequence[TierRow], start: int) -> _Places:
    """The places of records from ``start`` on."""
    offsets, lengths = [], []
    for row in rows:
        offsets.append(start)
        lengths.append(HEADER_BYTES + len(row.memory))
        start += _record_bytes(row)
    return tuple(offsets), tuple(lengths)


def open_store_tier(config: OffloadConfig, namespace: Namespace, *, most_row_bytes: int) -> StoreTier:
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
        batch_bytes=max(_BATCH_BYTES, HEADER_BYTES + most_row_bytes + _ALIGN_BYTES),
        # The store must unregister memory that this rank gave to it; else other nodes go on reading there.
        says_goodbye=config.store_bytes > 0,
    )

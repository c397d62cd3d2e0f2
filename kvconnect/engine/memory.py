"""The memory engine: a real double that ships with the package and moves real bytes.

Between two engines of one process bytes are copied inside ``poll``, without threads and on a clock
of the caller's choice, so a simulator can drive it deterministically. Between processes they travel
over TCP (``memory_wire``). Both ways the target checks every range against what it registered.

The controls (``hold``, ``fail_next``, ``cut_next`` ...) let a test produce each way in which a
transfer library can disappoint. It must not know who calls it or why. CPU memory only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from kvconnect.engine.base import Batch, Capabilities, Completion, Span, SpanSet, Verb
from kvconnect.engine.batches import check_batch, local_problem
from kvconnect.engine.memory_wire import MAX_COPIES, MAX_PAYLOAD_BYTES, Job, Link, Server, move
from kvconnect.errors import EngineError

log = logging.getLogger("kvconnect.engine.memory")


class MemoryCard(msgspec.Struct, tag="kvconnect-memory-1", frozen=True):
    """Where an engine is: a process, a random token of the engine, and its TCP address."""

    pid: int
    token: bytes
    host: str
    port: int


@dataclass(slots=True)
class _Faults:
    """What the controls ask of the next batch."""

    error: str = ""
    fail: bool = False
    quiet: bool = True
    delay_s: float = 0.0
    cut_bytes: int | None = None
    flip_byte: int | None = None


@dataclass(slots=True)
class _Flight:
    """A batch that was not answered yet."""

    batch: Batch
    posted: float
    start_at: float
    faults: _Faults
    error: str = ""
    cancelled: bool = False
    job: Job | None = None


@dataclass(slots=True)
class _Peer:
    card: MemoryCard
    link: Link | None = field(default=None)


# Every open engine of this process, by its token: how two of them find each other without a socket.
_fabric: dict[bytes, MemoryEngine] = {}
_fabric_lock = threading.Lock()


class MemoryEngine:
    """An engine over ordinary memory. See ``kvconnect.engine.base.Engine`` for the verbs.

    Args:
        host: the address that other processes reach this one at.
        listen: serve other processes. Without it there is no thread and no socket at all, and only
            engines of this process can be peers.
        clock: seconds, for delays, timeouts and durations of transfers within this process.
        max_copies, max_bytes, max_batches_per_peer: the bounds to announce.

    Raises:
        EngineError: nothing can listen at ``host``.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        listen: bool = True,
        clock: Callable[[], float] = time.monotonic,
        max_copies: int = 16_384,
        max_bytes: int = 64 << 20,
        max_batches_per_peer: int = 8,
    ) -> None:
        if not (0 < max_copies <= MAX_COPIES and 0 < max_bytes <= MAX_PAYLOAD_BYTES):
            raise EngineError(
                f"max_copies={max_copies}, max_bytes={max_bytes}: "
                f"1 to {MAX_COPIES} and 1 to {MAX_PAYLOAD_BYTES} are possible"
            )
        self._capabilities = Capabilities(
            name="memory",
            verbs=frozenset(Verb),
            max_copies=max_copies,
            max_bytes=max_bytes,
            max_batches_per_peer=max_batches_per_peer,
            target_must_poll=False,
            device_memory=False,
            can_renew=True,
        )
        self._clock = clock
        self._spans = SpanSet()
        self._lock = threading.Lock()
        self._token = secrets.token_bytes(16)
        self._peers: dict[str, _Peer] = {}
        self._links: list[Link] = []
        self._flights: dict[int, _Flight] = {}
        self._finished: list[Completion] = []
        self._results: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._held = False
        self._next = _Faults()
        self._late: list[tuple[Batch, bytes]] = []
        self._closed = False
        self._server: Server | None = None
        address = (host, 0)
        if listen:
            try:
                self._server = Server(host, self._token, self._spans, self._lock)
            except OSError as error:
                raise EngineError(f"the memory engine cannot listen at {host!r}: {error}") from error
            address = (self._server.host, self._server.port)
        self._card = MemoryCard(os.getpid(), self._token, *address)
        with _fabric_lock:
            _fabric[self._token] = self

    # ---- the verbs of every engine

    @property
    def capabilities(self) -> Capabilities:
        """The bounds of this engine."""
        return self._capabilities

    def register(self, spans: Sequence[Span]) -> None:
        """Make CPU memory reachable, all or nothing. Raises ``EngineError``."""
        self._check_open()
        for span in spans:
            if span.device != "cpu":
                raise EngineError(f"the memory engine moves CPU memory, not {span.device}")
        with self._lock:
            self._spans.add(spans)

    def unregister(self, spans: Sequence[Span]) -> None:
        """Take spans back; nobody touches them once this returns. Raises ``EngineError``."""
        with self._lock:
            self._spans.remove(spans)

    def renew_registration(self) -> bool:
        """Serve under another token: who knows only the one before reads and writes no more."""
        self._check_open()
        token = secrets.token_bytes(16)
        with _fabric_lock:
            del _fabric[self._token]
            _fabric[token] = self
        if self._server is not None:
            self._server.renew(token)
        self._token = token
        self._card = msgspec.structs.replace(self._card, token=token)
        return True

    def card(self) -> bytes:
        """Process, token, host and port, as msgpack."""
        self._check_open()
        return msgspec.msgpack.encode(self._card)

    def connect(self, peer: str, card: bytes) -> None:
        """Know a peer under a name; batches to who had the name before end as failures."""
        self._check_open()
        try:
            decoded = msgspec.msgpack.decode(card, type=MemoryCard)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the card of peer {peer!r} is not a memory engine's: {error}") from error
        known = self._peers.get(peer)
        if known is not None and known.card == decoded:
            return
        if known is not None:
            self.disconnect(peer)
        self._peers[peer] = _Peer(decoded)

    def submit(self, batch: Batch) -> None:
        """Queue a batch; its bytes move in ``poll``. Raises ``LocalError``."""
        in_flight = [(flight.batch.batch_id, flight.batch.peer) for flight in self._flights.values()]
        check_batch(batch, self._capabilities, self._peers, in_flight)
        faults, self._next = self._next, _Faults()
        now = self._clock()
        flight = _Flight(batch, now, now + faults.delay_s, faults)
        with self._lock:
            flight.error = local_problem(batch, self._spans)
        self._flights[batch.batch_id] = flight

    def poll(self) -> list[Completion]:
        """Move what may move now, and return what ended."""
        for flight in list(self._flights.values()):
            if flight.job is None:
                self._advance(flight)
        on_the_wire = any(flight.job is not None for flight in self._flights.values())
        if on_the_wire and not self._finished and self._results.empty():
            # A caller that polls without a pause would keep the GIL from the thread it waits for.
            time.sleep(50e-6)
        while not self._results.empty():
            job = self._results.get_nowait()
            self._finish(self._flights[job.batch.batch_id], job.error, job.quiet)
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, batch_id: int) -> None:
        """End a batch early. Unknown ids are answered already, and ignored."""
        flight = self._flights.get(batch_id)
        if flight is not None:
            self._interrupt(flight, "cancelled")

    def disconnect(self, peer: str) -> None:
        """Forget a peer; batches in flight to it end as failures."""
        known = self._peers.pop(peer, None)
        for flight in list(self._flights.values()):
            if flight.batch.peer == peer:
                self._interrupt(flight, f"peer {peer!r} was disconnected")
        if known is not None and known.link is not None:
            known.link.close()

    def close(self) -> None:
        """Stop serving and moving. What was in flight ends as failures, for a last ``poll``."""
        if self._closed:
            return
        self._closed = True
        with _fabric_lock:
            _fabric.pop(self._token, None)
        for peer in list(self._peers):
            self.disconnect(peer)
        deadline = time.monotonic() + 2.0
        for link in self._links:
            link.join(max(deadline - time.monotonic(), 0.01))
        if self._server is not None:
            self._server.close()

    # ---- the controls of a test

    def hold(self) -> None:
        """From now on nothing moves and nothing completes (but for timeouts), until ``release``."""
        self._held = True

    def release(self) -> None:
        """End ``hold``: what waited goes on at the next ``poll``."""
        self._held = False

    def fail_next(self, quiet: bool, error: str = "failed on request") -> None:
        """Fail the next submitted batch and move none of its bytes.

        With ``quiet=False`` they can still be landed afterwards by ``land_late``, like the writes of
        a library that reported a failure and went on.
        """
        self._next.fail, self._next.quiet, self._next.error = True, quiet, error

    def delay_next(self, seconds: float) -> None:
        """Let the next submitted batch begin ``seconds`` after its submit, by the clock."""
        self._next.delay_s = seconds

    def cut_next(self, after_bytes: int, quiet: bool = True, error: str = "cut on request") -> None:
        """Move only the first ``after_bytes`` of the next submitted batch, then fail it."""
        self._next.cut_bytes, self._next.quiet, self._next.error = after_bytes, quiet, error

    def corrupt_next(self, byte_offset: int) -> None:
        """Flip one byte of the next submitted batch as it lands, and report that all went well.

        ``byte_offset`` counts in the order of the batch's copies, modulo its size.
        """
        self._next.flip_byte = byte_offset

    def land_late(self) -> int:
        """Move the bytes of every batch that failed without being quiet; returns how many batches.

        Only between engines of one process.
        """
        late, self._late = self._late, []
        for batch, token in late:
            with _fabric_lock:
                target = _fabric.get(token)
            self._copy_here(batch, target)
        return len(late)

    # ---- how a batch ends

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the memory engine is closed")

    def _advance(self, flight: _Flight) -> None:
        batch, faults, now = flight.batch, flight.faults, self._clock()
        if flight.cancelled or (not self._held and flight.error):
            self._finish(flight, flight.error, quiet=True)
        elif now >= flight.posted + batch.timeout_s:
            self._finish(flight, f"timed out after {batch.timeout_s:g} s", quiet=True)
        elif self._held or now < flight.start_at:
            return
        elif faults.fail:
            self._finish(flight, faults.error, faults.quiet)
        elif len(batch.length) == 0 or batch.total_bytes == 0:
            self._finish(flight, "", quiet=True)
        else:
            self._start(flight, _head(batch, faults.cut_bytes))

    def _start(self, flight: _Flight, batch: Batch) -> None:
        peer, faults = self._peers[batch.peer], flight.faults
        if peer.card.pid != os.getpid():
            if peer.link is None:
                peer.link = Link(peer.card.host, peer.card.port, peer.card.token, self._results)
                self._links.append(peer.link)
            left_s = flight.posted + batch.timeout_s - self._clock()
            flight.job = Job(batch, time.monotonic() + left_s, faults.flip_byte)
            peer.link.put(flight.job)
            return
        error = self._copy_here(batch, self._local_target(batch.peer))
        if not error and faults.flip_byte is not None and batch.total_bytes:
            _flip(batch, faults.flip_byte % batch.total_bytes)
        self._finish(flight, error, quiet=True)

    def _local_target(self, peer: str) -> MemoryEngine | None:
        known = self._peers.get(peer)
        with _fabric_lock:
            return None if known is None else _fabric.get(known.card.token)

    def _copy_here(self, batch: Batch, target: MemoryEngine | None) -> str:
        """Copy between two engines of this process; returns the error, empty if it was done."""
        if target is None:
            return f"peer {batch.peer!r} is gone"
        with target._lock:
            index = target._spans.outside(batch.remote, batch.length)
            if index is not None:
                return (
                    f"remote memory is not registered: {int(batch.length[index])} bytes at "
                    f"{int(batch.remote[index]):#x}"
                )
            move(batch.source, batch.target, batch.length)
        return ""

    def _interrupt(self, flight: _Flight, error: str) -> None:
        """End a flight early: at once if nothing of it is on the wire, else through its link."""
        flight.cancelled, flight.error = True, error
        peer = self._peers.get(flight.batch.peer)
        link = peer.link if peer is not None else None
        if flight.job is None:
            self._finish(flight, error, quiet=True)
        else:
            for candidate in self._links if link is None else [link]:
                candidate.interrupt(flight.job)

    def _finish(self, flight: _Flight, error: str, quiet: bool) -> None:
        batch, faults = flight.batch, flight.faults
        if not error and faults.cut_bytes is not None:
            error, quiet = faults.error, faults.quiet
        if error and not quiet:
            # To who it was submitted, whatever that name stands for by then.
            known = self._peers.get(batch.peer)
            self._late.append((batch, known.card.token if known is not None else b""))
            del self._late[:-64]
        if error:
            log.debug("batch %d to %s failed: %s", batch.batch_id, batch.peer, error)
        del self._flights[batch.batch_id]
        if flight.cancelled and flight.error:
            error = error and flight.error
        seconds = max(self._clock() - flight.posted, 0.0)
        self._finished.append(
            Completion(batch.batch_id, not error, quiet or not error, batch.total_bytes, seconds, error)
        )


def _head(batch: Batch, cut_bytes: int | None) -> Batch:
    """The batch without what comes after its first ``cut_bytes``."""
    if cut_bytes is None:
        return batch
    before = np.cumsum(batch.length) - batch.length
    return replace(batch, length=np.clip(cut_bytes - before, 0, batch.length))


def _flip(batch: Batch, offset: int) -> None:
    """Flip the byte that landed at ``offset`` of the batch."""
    ends = np.cumsum(batch.length)
    copy = int(np.searchsorted(ends, offset, side="right"))
    address = int(batch.target[copy] + offset - (ends[copy] - batch.length[copy]))
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 0xFF

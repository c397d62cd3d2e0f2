"""The Mooncake adapter: a listening engine that peers reach, and lanes that send.

Owns registration, the card, the bounds and the deadlines. How a batch runs and comes to rest is in
``mooncake_lanes``. It must not know requests or blocks. No other module of the package may import
``mooncake``.

Observed with mooncake-transfer-engine 0.3.13.post1, which made the code what it is:

- More than 2048 entries to one peer fail at once, more than 1024 unless they drain within a second.
  Batches of at most 1024 go to a peer one at a time, but for the smallest ones over NVLink.
- Registering an overlapping range returns -7. Unregistering a batch with one unknown address leaves
  the others half gone for ever. Over TCP, memory that was never registered is sent gladly. So every
  range is checked against our own ``SpanSet`` first.
- The listening engine binds all interfaces, and lets anybody who reaches its port read and write
  registered memory. Keep it on a private network.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from kvconnect.engine.base import Batch, Capabilities, Completion, Span, SpanSet
from kvconnect.engine.batches import check_batch, source_problem
from kvconnect.engine.mooncake_lanes import Job, LanePool, Outcome, Sender
from kvconnect.engine.mooncake_library import NVLINK, Library, built_for_cuda, load_library
from kvconnect.errors import EngineError

log = logging.getLogger("kvconnect.engine.mooncake")

_MAX_TCP_BYTES = 64 << 20
_MAX_BYTES = 256 << 20

# Over NVLink a call waits for its copies one by one, and the link would idle from one call to the next. Only
# batches of few copies take turns: the library fails when it has more than 1024 to a peer that do not drain.
_NVLINK_SENDERS = 2
_FEW_COPIES = 16

# Threads that the library keeps in a call long after their batch was answered; most per peer.
_MAX_STUCK_SENDERS = 3
_CLOSE_S = 3.0
_YIELD_S = 50e-6


class MooncakeCard(msgspec.Struct, tag="kvconnect-mooncake-2", frozen=True):
    """The session name of the listening engine, ``host:port``, and its protocol."""

    session: str
    protocol: str


@dataclass(slots=True)
class _Peer:
    session: str
    senders: list[Sender] = field(default_factory=list)
    stuck: list[Sender] = field(default_factory=list)


@dataclass(slots=True)
class _Flight:
    """A batch that was not answered yet, and whose thread it is given to.

    ``ended`` says why it must fail, whatever comes of it.
    """

    batch: Batch
    submitted: float
    deadline: float
    job: Job
    sender: Sender | None = None
    ended: str = ""


class MooncakeEngine:
    """An engine over Mooncake. See ``kvconnect.engine.base.Engine`` for the verbs.

    Args:
        host: the address at which peers reach this node.
        protocol: ``"tcp"``, ``"rdma"``, or ``"nvlink"`` between GPUs of one host; another transport than
            this one is never used. ``"auto"`` takes what ``mooncake_library.choose_protocol`` says.
        device_name: the RDMA adapters to use, separated by commas; empty for all.
        settle_s: how long a batch that failed may take to be proven quiet.
        library_timeout_s: when the library gives up a transfer by itself (``MC_TRANSFER_TIMEOUT``).
            What it has not given up cannot be proven quiet.
        max_copies, max_bytes: the bounds to announce; 0 bytes for what suits the protocol.

    Raises:
        EngineError: Mooncake is missing, cannot start, or would use another protocol.
    """

    def __init__(
        self,
        host: str,
        protocol: str = "tcp",
        device_name: str = "",
        *,
        settle_s: float = 5.0,
        library_timeout_s: int = 10,
        max_copies: int = 1024,
        max_bytes: int = 0,
    ) -> None:
        if not 0 < max_copies <= 1024:
            raise EngineError(f"max_copies is {max_copies}: Mooncake takes 1 to 1024 at once to a peer")
        self._library = Library(host, protocol, device_name, library_timeout_s)
        self._settle_s = settle_s
        self._spans = SpanSet()
        self._peers: dict[str, _Peer] = {}
        self._senders: list[Sender] = []
        self._senders_per_peer = _NVLINK_SENDERS if self._library.protocol == NVLINK else 1
        self._flights: dict[int, _Flight] = {}
        self._finished: list[Completion] = []
        self._results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._closed = False
        self._home: Any = self._library.make_engine()
        self._session = self._library.session_of(self._home)
        self._pool = LanePool(self._make_lane, self._enter_device)
        self._capabilities = Capabilities(
            name="mooncake",
            max_copies=max_copies,
            # A batch cannot be called back: over TCP a large one would outlive its deadline.
            max_bytes=max_bytes or (_MAX_TCP_BYTES if self._library.is_tcp else _MAX_BYTES),
            # One for each thread waits here, not in the library: it only spares the gap between two polls.
            max_batches_per_peer=2 * self._senders_per_peer,
            target_must_poll=False,
            device_memory=built_for_cuda(),
            # Tried over TCP with a peer that was stopped in the middle of a write.
            can_renew=self._library.is_tcp,
        )
        log.warning(
            "Mooncake listens on all interfaces, whatever host is, and authenticates no client: close its "
            "ports (15000 to 17000) to all but peers"
        )

    @staticmethod
    def problem() -> str:
        """Why Mooncake does not work here, and what to install; empty if it does."""
        try:
            load_library()
        except EngineError as error:
            return str(error)
        return ""

    @property
    def capabilities(self) -> Capabilities:
        """The bounds of this engine."""
        return self._capabilities

    # ---- memory

    def register(self, spans: Sequence[Span]) -> None:
        """Register memory in one call, all or nothing. Raises ``EngineError``."""
        self._check_open()
        self._library.check_spans(spans)
        known = self._library.ranges(self._spans)
        self._spans.add(spans)
        try:
            fresh = [found for found in self._library.ranges(spans) if found not in known]
            self._library.register(self._home, fresh)
        except EngineError:
            self._spans.remove(spans)
            raise
        if not self._library.is_tcp:
            self._pool.each_engine(lambda engine: self._library.register(engine, fresh))

    def unregister(self, spans: Sequence[Span]) -> None:
        """Take memory back. Raises ``EngineError``."""
        self._check_open()
        self._spans.remove(spans)
        kept = self._library.ranges(self._spans)
        gone = [found for found in self._library.ranges(spans) if found not in kept]
        if not self._library.is_tcp:
            self._pool.each_engine(lambda engine: self._library.unregister(engine, gone))
        self._library.unregister(self._home, gone)

    def renew_registration(self) -> bool:
        """Let another engine listen in place of the one that peers know. Takes some 0.2 s.

        To unregister and register anew would not do: over TCP a peer names addresses and nothing else.
        """
        self._check_open()
        ranges = self._library.ranges(self._spans)
        try:
            self._library.unregister(self._home, ranges)
        except EngineError as error:
            log.warning("the engine that peers knew keeps its memory until it is gone: %s", error)
        self._home = None
        self._home = self._library.make_engine()
        self._session = self._library.session_of(self._home)
        self._library.register(self._home, ranges)
        return True

    # ---- peers

    def card(self) -> bytes:
        """The session name, which stays the same while memory comes and goes, until it is renewed."""
        self._check_open()
        return msgspec.msgpack.encode(MooncakeCard(self._session, self._library.protocol))

    def connect(self, peer: str, card: bytes) -> None:
        """Know a peer under a name; batches to who had the name before end as failures."""
        self._check_open()
        try:
            found = msgspec.msgpack.decode(card, type=MooncakeCard)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the card of peer {peer!r} is not a Mooncake engine's: {error}") from error
        session = found.session
        host, _, port = session.rpartition(":")
        if not host or not port.isdecimal() or len(session) > 256:
            raise EngineError(f"the card of peer {peer!r} names {session[:256]!r}, not host:port")
        if found.protocol != self._library.protocol:
            raise EngineError(
                f"peer {peer!r} uses Mooncake over {found.protocol[:16]}, this node over "
                f"{self._library.protocol}: set the same protocol on both"
            )
        known = self._peers.get(peer)
        if known is not None and known.session == session:
            return
        if known is not None:
            self.disconnect(peer)
        self._peers[peer] = _Peer(session)

    def disconnect(self, peer: str) -> None:
        """Forget a peer; batches in flight to it end as failures."""
        for flight in list(self._flights.values()):
            if flight.batch.peer == peer:
                self._end_early(flight, f"peer {peer!r} was disconnected")
        known = self._peers.pop(peer, None)
        for sender in known.senders if known is not None else ():
            sender.close()

    # ---- batches

    def submit(self, batch: Batch) -> None:
        """Hand a batch to its peer's thread. Raises ``LocalError``."""
        check_batch(batch, self._capabilities, self._peers, [f.batch for f in self._flights.values()])
        peer, now = self._peers[batch.peer], time.monotonic()
        job = Job(batch, peer.session, now + batch.timeout_s, self._settle_s)
        flight = _Flight(batch, now, job.deadline, job)
        self._flights[batch.batch_id] = flight
        problem = source_problem(batch, self._spans)
        peer.stuck = [sender for sender in peer.stuck if sender.alive]
        if not problem and len(peer.stuck) >= _MAX_STUCK_SENDERS and not peer.senders:
            problem = f"Mooncake still hangs in {len(peer.stuck)} earlier transfers to {peer.session}"
        if problem or not batch.total_bytes:
            self._answer(flight, problem, quiet=True)
            return
        flight.sender = self._sender_for(batch, peer)
        flight.sender.put(job)

    def _sender_for(self, batch: Batch, peer: _Peer) -> Sender:
        """The thread that has least to do, of those that a batch of so many copies may go to."""
        if not peer.senders or (
            len(peer.senders) < self._senders_per_peer and len(batch.length) <= _FEW_COPIES
        ):
            peer.senders.append(Sender(self._lane_key(batch.peer), self._pool, self._results))
            self._senders = [sender for sender in self._senders if sender.alive]
            self._senders.append(peer.senders[-1])
        if len(batch.length) > _FEW_COPIES:
            return peer.senders[0]
        busy = [flight.sender for flight in self._flights.values() if flight.sender in peer.senders]
        return min(peer.senders, key=busy.count)

    def poll(self) -> list[Completion]:
        """Collect what threads have done, and answer what had its time."""
        if self._flights and self._results.empty() and not self._finished:
            # A caller that polls without a pause would keep the GIL from the thread it waits for,
            # for 5 ms at a time.
            time.sleep(_YIELD_S)
        while not self._results.empty():
            self._take(self._results.get_nowait())
        now = time.monotonic()
        for flight in list(self._flights.values()):
            if now >= flight.deadline:
                self._overdue(flight, now)
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, batch_id: int) -> None:
        """End a batch early if it is not posted yet, else at its end or after ``settle_s``."""
        flight = self._flights.get(batch_id)
        if flight is not None:
            self._end_early(flight, "cancelled")

    def close(self) -> None:
        """End what is in flight and destroy the engines. What the library does not let go of within
        some seconds is answered as not quiet, and its thread is left to end by itself."""
        if self._closed:
            return
        until = time.monotonic() + _CLOSE_S
        for peer in list(self._peers):
            self.disconnect(peer)
        self._closed = True
        while self._flights and time.monotonic() < until:
            self._finished.extend(self.poll())
            time.sleep(0.005)
        for flight in list(self._flights.values()):
            self._answer(flight, flight.ended or "the engine was closed", quiet=False)
        stuck = [sender for sender in self._senders if not sender.join(until - time.monotonic())]
        if stuck:
            log.warning("Mooncake is still in %d transfers at close", len(stuck))
        self._pool.close()
        try:
            self._library.unregister(self._home, self._library.ranges(self._spans))
        except EngineError as error:
            log.warning("at close: %s", error)
        self._spans.remove(list(self._spans))
        self._home = None

    # ---- how a batch ends

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the Mooncake engine is closed")

    def _take(self, outcome: Outcome) -> None:
        flight = self._flights.get(outcome.job.batch.batch_id)
        if flight is None or flight.job is not outcome.job:
            return  # answered before, as one that is not quiet
        error = flight.ended or outcome.error
        if not error and time.monotonic() >= outcome.job.deadline:
            error = f"ended after its timeout of {flight.batch.timeout_s:g} s"
        self._answer(flight, error, outcome.quiet)

    def _overdue(self, flight: _Flight, now: float) -> None:
        error = flight.ended or f"timed out after {flight.batch.timeout_s:g} s"
        if flight.job.drop():
            self._answer(flight, error, quiet=True)
            self._leave_sender(flight)
        elif now >= flight.deadline + self._settle_s:
            # The library cannot be interrupted. Its thread retires the lane when it returns.
            self._leave_sender(flight)
            self._answer(flight, error, quiet=False)

    def _leave_sender(self, flight: _Flight) -> None:
        """New batches of this peer take another thread: this one hangs in the library."""
        peer, sender = self._peers.get(flight.batch.peer), flight.sender
        if peer is None or sender not in peer.senders or not flight.job.posted:
            return
        assert sender is not None
        sender.close()
        peer.stuck.append(sender)
        peer.senders.remove(sender)
        self._pool.retire_key(self._lane_key(flight.batch.peer))

    def _end_early(self, flight: _Flight, error: str) -> None:
        flight.ended = flight.ended or error
        if flight.job.drop():
            self._answer(flight, error, quiet=True)
        else:
            flight.deadline = min(flight.deadline, time.monotonic())

    def _answer(self, flight: _Flight, error: str, quiet: bool) -> None:
        batch = flight.batch
        del self._flights[batch.batch_id]
        if error:
            log.debug("batch %d to %s failed: %s", batch.batch_id, batch.peer, error)
        seconds = time.monotonic() - flight.submitted
        self._finished.append(Completion(batch.batch_id, not error, quiet, batch.total_bytes, seconds, error))

    # ---- lanes

    def _lane_key(self, peer: str) -> str:
        # Over TCP a lane is cheap and every peer has its own, so that one which falls silent holds up no
        # other. Over RDMA each lane would open every adapter and pin all memory.
        return peer if self._library.is_tcp else ""

    def _make_lane(self) -> Any:
        engine = self._library.make_engine()
        if not self._library.is_tcp:
            self._library.register(engine, self._library.ranges(self._spans))
        return engine

    def _enter_device(self) -> None:
        """The library asks CUDA about memory in whichever thread it is called."""
        device = next((span.device for span in self._spans if span.device != "cpu"), None)
        if device is not None:
            torch.cuda.set_device(device)

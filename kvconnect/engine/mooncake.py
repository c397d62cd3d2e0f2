"""The Mooncake adapter: a listening engine that peers reach, and lanes (``mooncake_lanes``) that send.

Behaviour of mooncake-transfer-engine 0.3.13.post1 that the code works around:

- Registering an overlapping range returns -7. Unregistering a batch with one unknown address leaves the
  other ranges half unregistered for ever. Over TCP, the library sends memory that was never registered. So
  every range is checked against the adapter's ``SpanSet`` first.
- The listening engine binds all interfaces, and lets any client that reaches its port read and write
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

from kvconnect.engine.adapter import Adapter, decode_card, source_problem
from kvconnect.engine.base import Batch, Capabilities, Completion, Span
from kvconnect.engine.mooncake_lanes import LaneJob, LanePool, NativeSender
from kvconnect.engine.mooncake_library import NVLINK, Library, load_library
from kvconnect.errors import EngineError

log = logging.getLogger("kvconnect.engine.mooncake")

_MAX_TCP_BYTES = 64 << 20
_MAX_BYTES = 256 << 20

# With one sender an NVLink would idle between two calls.
_NVLINK_SENDERS = 2

# The most threads per peer that may hang in the library after their batch was completed.
_MAX_STUCK_SENDERS = 3
_CLOSE_S = 3.0
_YIELD_S = 50e-6


class MooncakeCard(msgspec.Struct, tag="kvconnect-mooncake-2", frozen=True):
    """The session name (``host:port``) and the protocol of a listening engine."""

    session: str
    protocol: str


@dataclass(slots=True)
class _Peer:
    session: str
    senders: list[NativeSender] = field(default_factory=list)
    stuck: list[NativeSender] = field(default_factory=list)


class MooncakeEngine(Adapter):
    """An engine over Mooncake. See ``kvconnect.engine.base.Engine`` for the verbs.

    Args:
        host: the address at which peers reach this node.
        protocol: ``"tcp"``, ``"rdma"``, or ``"nvlink"`` between GPUs of one host; no other transport is
            used. ``"auto"``: see ``mooncake_library.choose_protocol``.
        device_name: the RDMA adapters to use, separated by commas; empty for all.
        settle_s: how long to wait for the proof that a failed batch is quiescent.
        library_timeout_s: when the library gives up a transfer by itself (``MC_TRANSFER_TIMEOUT``), at
            least 5 s. Before that, a transfer cannot be proven quiescent.
        max_bytes: ``Capabilities.max_bytes``; 0 for a value that suits the protocol.

    Raises ``EngineError``: Mooncake is missing, cannot start, or would use another protocol.
    """

    _peers: dict[str, _Peer]
    _flights: dict[int, LaneJob]
    _load = staticmethod(load_library)

    def __init__(
        self,
        host: str,
        protocol: str = "tcp",
        device_name: str = "",
        *,
        settle_s: float = 5.0,
        library_timeout_s: int = 10,
        max_bytes: int = 0,
    ) -> None:
        self._library = Library(host, protocol, device_name, library_timeout_s)
        is_tcp = self._library.is_tcp
        self._senders_per_peer = _NVLINK_SENDERS if self._library.protocol == NVLINK else 1
        super().__init__(
            Capabilities(
                name="mooncake",
                # A batch cannot be cancelled: over TCP a large one would outlive its deadline.
                max_bytes=max_bytes or (_MAX_TCP_BYTES if is_tcp else _MAX_BYTES),
                # Each thread runs one batch and has one queued, so that it does not idle until a poll.
                max_batches_per_peer=2 * self._senders_per_peer,
                target_must_poll=False,
                lane=" ".join(filter(None, (self._library.protocol, device_name))),
                carries=self._library.carries,
                may_be_bypassed=protocol == "auto",
            )
        )
        self._settle_s = settle_s
        self._senders: list[NativeSender] = []
        self._results: queue.SimpleQueue[LaneJob] = queue.SimpleQueue()
        self._home: Any = self._library.make_engine()
        self._session = self._library.session_of(self._home)
        # Over TCP a lane is cheap: every sender has its own, so that a silent peer delays no other peer. Over
        # RDMA all share one, since each lane opens every adapter and pins all memory.
        self._pool = LanePool(self._make_lane, self._enter_device, is_shared=not is_tcp)
        log.warning(
            "Mooncake listens on all interfaces of this node, not only on host or bind, and authenticates no "
            "client: close its ports (15000 to 17000) to all but peers"
        )

    # ---- memory

    def register(self, spans: Sequence[Span]) -> None:
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
        self._check_open()
        self._spans.remove(spans)
        kept = self._library.ranges(self._spans)
        gone = [found for found in self._library.ranges(spans) if found not in kept]
        if not self._library.is_tcp:
            self._pool.each_engine(lambda engine: self._library.unregister(engine, gone))
        self._library.unregister(self._home, gone)

    # ---- peers

    def card(self) -> bytes:
        """The session name and protocol, which do not depend on the registered memory."""
        self._check_open()
        return msgspec.msgpack.encode(MooncakeCard(self._session, self._library.protocol))

    def connect(self, peer: str, card: bytes) -> None:
        self._check_open()
        found = decode_card(card, MooncakeCard, "Mooncake")
        session = found.session
        host, _, port = session.rpartition(":")
        if not host or not port.isdecimal() or len(session) > 256:
            raise EngineError(f"its card names {session[:256]!r}, not host:port")
        if found.protocol != self._library.protocol:
            raise EngineError(
                f"it uses Mooncake over {found.protocol[:16]}, the prefill node over "
                f"{self._library.protocol}: set the same kv_connector_extra_config.protocol on both"
            )
        known = self._peers.get(peer)
        if known is not None and known.session == session:
            return
        self.disconnect(peer)
        self._peers[peer] = _Peer(session)

    def _forget(self, peer: _Peer) -> None:
        for sender in peer.senders:
            sender.put(None)

    # ---- batches

    def submit(self, batch: Batch) -> None:
        self._admit(batch)
        peer = self._peers[batch.peer]
        job = self._flights[batch.batch_id] = LaneJob(batch=batch, submitted_at=time.monotonic())
        problem = source_problem(batch, self._spans)
        peer.stuck = [sender for sender in peer.stuck if sender.is_alive()]
        if not problem and len(peer.stuck) >= _MAX_STUCK_SENDERS and not peer.senders:
            problem = f"Mooncake still hangs in {len(peer.stuck)} earlier transfers to {peer.session}"
        if problem or not batch.total_bytes:
            self._answer(job, problem)
            return
        job.sender = self._sender_for(peer)
        job.sender.put(job)

    def _sender_for(self, peer: _Peer) -> NativeSender:
        """The sender thread of a peer that has the fewest batches."""
        if len(peer.senders) < self._senders_per_peer:
            peer.senders.append(NativeSender(self._pool, peer.session, self._settle_s, self._results))
            self._senders = [sender for sender in self._senders if sender.is_alive()]
            self._senders.append(peer.senders[-1])
        busy = [job.sender for job in self._flights.values() if job.sender in peer.senders]
        return min(peer.senders, key=busy.count)

    def poll(self) -> list[Completion]:
        if self._flights and self._results.empty() and not self._finished:
            # Without a pause, a polling caller would keep the GIL from the sender for 5 ms at a time.
            time.sleep(_YIELD_S)
        while not self._results.empty():
            self._take(self._results.get_nowait())
        now = time.monotonic()
        for job in list(self._flights.values()):
            if now >= job.deadline:
                self._overdue(job, now)
        return self._take_finished() if self._finished else []

    def _shut_down(self) -> None:
        """Batches that the library does not end in time are not quiescent; their threads end later."""
        until = time.monotonic() + _CLOSE_S
        while self._flights and time.monotonic() < until:
            # In two statements, since ``poll`` replaces ``_finished``.
            done = self.poll()
            self._finished.extend(done)
            time.sleep(0.005)
        for job in list(self._flights.values()):
            self._answer(job, job.error or "the engine was closed", quiescent=False)
        for sender in self._senders:
            sender.join(max(until - time.monotonic(), 0.0))
        stuck = [sender for sender in self._senders if sender.is_alive()]
        if stuck:
            log.info("at the close of the engine: Mooncake is still in %d transfers", len(stuck))
        self._pool.close()
        try:
            self._library.unregister(self._home, self._library.ranges(self._spans))
        except EngineError as error:
            log.info("at the close of the engine: %s", error)
        self._spans.remove(list(self._spans))
        self._home = None

    # ---- how a batch ends

    def _take(self, job: LaneJob) -> None:
        if self._flights.get(job.batch.batch_id) is not job:
            return  # completed before, as not quiescent
        error = job.error or job.failure
        if not error and time.monotonic() >= job.deadline:
            error = f"ended after its timeout of {job.batch.timeout_s:g} s"
        self._answer(job, error, job.quiescent)

    def _overdue(self, job: LaneJob, now: float) -> None:
        error = job.error or job.overdue
        if job.drop():
            self._answer(job, error)
        elif now >= job.deadline + self._settle_s:
            # The library cannot be interrupted. The sender retires its lane when the call returns.
            self._leave_sender(job)
            self._answer(job, error, quiescent=False)

    def _leave_sender(self, job: LaneJob) -> None:
        """Abandon a sender that hangs in the library; new batches to the peer use another thread."""
        peer, sender = self._peers.get(job.batch.peer), job.sender
        if peer is None or sender is None or sender not in peer.senders:
            return
        sender.put(None)
        peer.stuck.append(sender)
        peer.senders.remove(sender)
        self._pool.retire(sender)

    def _end_early(self, job: LaneJob, error: str) -> None:
        """Complete a batch at once if it is not posted, else at its end or after ``settle_s``."""
        job.error = job.error or error
        if job.drop():
            self._answer(job, error)
        else:
            job.deadline = min(job.deadline, time.monotonic())

    # ---- lanes

    def _make_lane(self) -> Any:
        engine = self._library.make_engine()
        if not self._library.is_tcp:
            self._library.register(engine, self._library.ranges(self._spans))
        return engine

    def _enter_device(self) -> None:
        """Set the CUDA device in a sender thread, since the library queries CUDA in the calling thread."""
        device = next((span.device for span in self._spans if span.device != "cpu"), None)
        if device is not None:
            torch.cuda.set_device(device)

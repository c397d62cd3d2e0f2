"""Sending engines of Mooncake, called lanes here, and the threads that wait in their blocking calls.

Behaviour of mooncake-transfer-engine 0.3.13.post1 that the code works around:

- A batch that returns -1 is not quiescent: the library goes on to send the rest of it, and reads source bytes
  that were written after the return. No call waits for the end. Destroying the sending engine stops it, so
  batches are sent by engines that can be destroyed: lanes. The engine whose address peers know only
  listens, and is never destroyed.
- Destroying an engine takes 0.2 to 0.8 s (the period of its accept loop), and holds the GIL all that
  time. This happens once per failed batch; successful batches pay nothing.
- Making an engine takes 1 ms, and two threads that sleep.
- Bytes that had reached the peer's kernel when the lane was destroyed are still written by the peer. A
  stopped peer writes them when it resumes, so only a later answer of the peer proves quiescence.
- The first transfer to a session opens it under a lock of the whole engine, for 60 s if the peer accepts
  the connection and stays silent. So a peer must answer a probe first.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvconnect.engine.adapter import Flight

log = logging.getLogger("kvconnect.engine.mooncake")

# How long a peer may need, after it answered a probe, to write the bytes in its kernel's buffers.
GRACE_S = 0.25

# The library's probe message: the length of its JSON text, the type, then the text.
_PROBE = b"\x04\x00\x00\x00\x00\x00\x00\x00\x03{}\n"
REFUSES, SILENT = "refuses connections", "does not answer"


@dataclass(slots=True, eq=False, kw_only=True)
class LaneJob(Flight):
    """One batch in the queue of a thread, ``sender``. From its deadline on the owner may complete it alone.

    ``claim`` is locked once, for good: by the sender right before the library may access memory, or by the
    owner, who completed the job before that. ``failure``, empty on success, and ``quiescent`` are the end of
    the job as its sender found it.
    """

    sender: NativeSender | None = None
    claim: Any = field(default_factory=threading.Lock)
    failure: str = ""
    quiescent: bool = True

    def post(self) -> bool:
        """Mark the job as posted. False: it was dropped, or its deadline has passed."""
        return time.monotonic() < self.deadline and self.drop()

    def drop(self) -> bool:
        """Prevent the job from being posted. False: it was posted already."""
        return bool(self.claim.acquire(blocking=False))


class SendingEngine:
    """A lane, that is, an engine that only sends. It is destroyed with the last reference to it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.sessions: set[str] = set()
        self.destroyed = threading.Event()

    def __del__(self) -> None:
        # This stops the engine's threads and closes its connections.
        self.engine = None
        self.destroyed.set()


class LanePool:
    """The current lanes: one of each sender, or one that all senders share. Thread-safe.

    Senders call ``prepare_thread`` in their thread before they use a lane, and keep no reference to it
    between two jobs.
    """

    def __init__(
        self, make_engine: Callable[[], Any], prepare_thread: Callable[[], None], *, is_shared: bool
    ) -> None:
        self._make_engine = make_engine
        self.prepare_thread = prepare_thread
        self._is_shared = is_shared
        self._lanes: dict[NativeSender | None, SendingEngine] = {}
        self._idle: list[SendingEngine] = []
        self._lock = threading.Lock()

    def lane_of(self, sender: NativeSender) -> SendingEngine:
        """The lane of a sender, made when it is first needed."""
        key = self._key(sender)
        with self._lock:
            if key not in self._lanes:
                idle = self._idle.pop() if self._idle else None
                self._lanes[key] = idle or SendingEngine(self._make_engine())
            return self._lanes[key]

    def retire(self, sender: NativeSender, lane: SendingEngine | None = None) -> None:
        """Retire a sender's lane, only if it is ``lane`` where that is given; new work gets a new lane."""
        with self._lock:
            if lane in (None, self._lanes.get(self._key(sender))):
                self._lanes.pop(self._key(sender), None)

    def leave(self, sender: NativeSender) -> None:
        """Keep the own lane of a sender that ends for the next new one.

        It is not destroyed, which would hold the GIL, nor kept beside new ones with its threads and sockets.
        """
        with self._lock:
            if (lane := self._lanes.pop(sender, None)) is not None:
                self._idle.append(lane)

    def each_engine(self, call: Callable[[Any], None]) -> None:
        """Call a function with the engine of every current lane."""
        with self._lock:
            for lane in self._lanes.values():
                call(lane.engine)

    def close(self) -> None:
        """Retire all lanes."""
        with self._lock:
            self._lanes.clear()
            self._idle.clear()

    def _key(self, sender: NativeSender) -> NativeSender | None:
        return None if self._is_shared else sender


def ask(session: str, until: float, stop: Callable[[], bool] = lambda: False) -> str:
    """Probe the engine at ``host:port``, until the monotonic time ``until`` or until ``stop`` returns True.

    Returns an empty text if it answers, else ``REFUSES`` or ``SILENT``.

    The library's own ``send_probe`` takes up to 60 s and cannot be interrupted, and a thread that returns
    from it while the interpreter ends aborts the process. So its message is sent from here.
    Any answer counts, also a closed connection: only a running engine, of any version, gives one.
    """
    host, _, port = session.rpartition(":")
    try:
        wait_s = max(until - time.monotonic(), 0.01)
        with socket.create_connection((host.strip("[]"), int(port)), timeout=wait_s) as sock:
            sock.sendall(_PROBE)
            while time.monotonic() < until and not stop():
                sock.settimeout(min(max(until - time.monotonic(), 0.01), 0.1))
                with suppress(TimeoutError):
                    sock.recv(4096)
                    return ""
    except ConnectionRefusedError:
        return REFUSES
    except (ConnectionResetError, BrokenPipeError):
        return ""
    except OSError as error:
        log.debug("%s cannot be asked for a sign of life: %s", session, error)
    return SILENT


class NativeSender(threading.Thread):
    """A thread that runs jobs of one peer, one at a time.

    A failed job waits up to ``settle_s`` for the proof that it is quiescent.
    """

    def __init__(
        self, pool: LanePool, session: str, settle_s: float, results: queue.SimpleQueue[LaneJob]
    ) -> None:
        super().__init__(name="kvconnect-mooncake", daemon=True)
        self._pool, self._session, self._settle_s = pool, session, settle_s
        self._results = results
        self._jobs: queue.SimpleQueue[LaneJob | None] = queue.SimpleQueue()
        self.start()
        _senders.add(self)

    def put(self, job: LaneJob | None) -> None:
        """Queue a job; ``results`` gets it at its end unless it is dropped. None ends the thread."""
        self._jobs.put(job)

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.claim.locked():
                continue
            try:
                job.failure = self._run(job)
            except Exception as error:
                log.debug("a transfer to %s broke", self._session, exc_info=True)
                job.failure, job.quiescent = f"{type(error).__name__}: {error}", not job.claim.locked()
            self._results.put(job)
        self._pool.leave(self)

    def _run(self, job: LaneJob) -> str:
        """Send a job; returns the problem, or an empty text."""
        self._pool.prepare_thread()
        lane = self._pool.lane_of(self)
        if problem := self._open(lane, job):
            return problem
        if not job.post():
            return "timed out before it could be posted"
        batch = job.batch
        columns = [batch.source], [batch.target], [batch.total_bytes]
        code = int(lane.engine.batch_transfer_sync_write(self._session, *columns))
        if code == 0:
            return ""
        self._pool.retire(self, lane)
        destroyed = lane.destroyed
        # The last reference, unless another sender shares the lane.
        del lane
        job.quiescent = self._came_to_rest(destroyed)
        return f"Mooncake's transfer returned {code}"

    def _open(self, lane: SendingEngine, job: LaneJob) -> str:
        """Probe the peer before the first use of its session; returns the problem, or an empty text."""
        if self._session in lane.sessions:
            return ""
        if problem := ask(self._session, job.deadline, stop=job.claim.locked):
            return f"the peer's engine at {self._session} {problem}"
        lane.sessions.add(self._session)
        return ""

    def _came_to_rest(self, destroyed: threading.Event) -> bool:
        """Wait until a failed job is quiescent; False if that could not be proven."""
        until = time.monotonic() + self._settle_s
        if not destroyed.wait(self._settle_s):
            return False
        # An engine that refuses connections is gone, and writes no more.
        if ask(self._session, until) == SILENT:
            return False
        time.sleep(GRACE_S)
        return True


# All threads that may be in a call of the library.
_senders: weakref.WeakSet[NativeSender] = weakref.WeakSet()


@atexit.register
def _leave_the_library() -> None:
    """Wait for threads to return from the library before the interpreter ends.

    A thread that returns while the interpreter ends cannot take the GIL, and aborts the process.
    """
    until = time.monotonic() + float(os.environ.get("MC_TRANSFER_TIMEOUT", "30")) + 1.0
    senders = list(_senders)
    for sender in senders:
        sender.put(None)
    for sender in senders:
        sender.join(max(until - time.monotonic(), 0.0))

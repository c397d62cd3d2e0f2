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
import enum
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
from typing import Any, NamedTuple

from kvconnect.engine.adapter import Flight

log = logging.getLogger("kvconnect.engine.mooncake")

# How long a peer may need, after it answered a probe, to write the bytes in its kernel's buffers.
GRACE_S = 0.25

# The library's probe message: the length of its JSON text, the type, then the text.
_PROBE = b"\x04\x00\x00\x00\x00\x00\x00\x00\x03{}\n"


@dataclass(slots=True, eq=False, kw_only=True)
class LaneJob(Flight):
    """One batch in the queue of a thread, ``sender``. From ``overdue_at`` on the owner may complete it alone.

    The sender sets ``posted`` right before the library may access memory. The owner sets ``dropped`` to skip
    a job that it completed or cancelled before that. ``lock`` makes the two exclusive.
    """

    session: str
    settle_s: float
    overdue_at: float
    sender: NativeSender | None = None
    posted: bool = False
    dropped: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def post(self) -> bool:
        """Mark the job as posted. False: it was dropped, or its deadline has passed."""
        with self.lock:
            self.posted = not self.dropped and time.monotonic() < self.deadline
            return self.posted

    def drop(self) -> bool:
        """Prevent the job from being posted. False: it was posted already."""
        with self.lock:
            self.dropped = not self.posted
            return self.dropped


class JobEnd(NamedTuple):
    """The end of a job: ``error`` is empty on success."""

    job: LaneJob
    quiescent: bool
    error: str


@dataclass(slots=True, eq=False)
class SendingEngine:
    """A lane, that is, an engine that only sends. It is destroyed once it is retired and has no users."""

    engine: Any
    users: int = 0
    retired: bool = False
    sessions: set[str] = field(default_factory=set)
    destroyed: threading.Event = field(default_factory=threading.Event)


class LanePool:
    """The current lane of each key, made when it is first needed. Thread-safe.

    Senders call ``prepare_thread`` in their thread before they use a lane.
    """

    def __init__(self, make_engine: Callable[[], Any], prepare_thread: Callable[[], None]) -> None:
        self._make_engine = make_engine
        self.prepare_thread = prepare_thread
        self._lanes: dict[str, SendingEngine] = {}
        self._idle: list[SendingEngine] = []
        self._lock = threading.Lock()

    def acquire(self, key: str) -> SendingEngine:
        """The lane of a key, for use until ``give_back``."""
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = (
                    self._idle.pop() if self._idle else SendingEngine(self._make_engine())
                )
            lane.users += 1
            return lane

    def give_back(self, lane: SendingEngine) -> None:
        """End a use; the last one of a retired lane destroys it."""
        with self._lock:
            lane.users -= 1
        self._destroy_if_unused(lane)

    def retire(self, key: str, lane: SendingEngine | None = None) -> None:
        """Retire the key's lane, only if it is ``lane`` where that is given; new work gets a new lane."""
        with self._lock:
            found = self._lanes.get(key)
            if found is not None and lane in (None, found):
                del self._lanes[key]
                found.retired = True
        if found is not None:
            self._destroy_if_unused(found)

    def leave(self, key: str) -> None:
        """Release a key that is not used any more. Its lane is reused for the next new key, or retired if a
        batch still uses it.

        It is not destroyed, which would hold the GIL, nor kept beside new ones with its threads and sockets.
        """
        with self._lock:
            lane = self._lanes.pop(key, None)
            if lane is None:
                return
            lane.retired = lane.users > 0
            if not lane.retired:
                self._idle.append(lane)

    def each_engine(self, call: Callable[[Any], None]) -> None:
        """Call a function with the engine of every current lane."""
        with self._lock:
            for lane in self._lanes.values():
                call(lane.engine)

    def close(self) -> None:
        """Retire all lanes. The last user of a lane destroys it."""
        for key in list(self._lanes):
            self.retire(key)
        self._idle.clear()

    def _destroy_if_unused(self, lane: SendingEngine) -> None:
        with self._lock:
            if lane.users or not lane.retired or lane.engine is None:
                return
            engine, lane.engine = lane.engine, None
        # The last reference: this stops the engine's threads and closes its connections.
        del engine
        lane.destroyed.set()


class Reaction(enum.Enum):
    """The reaction of a peer's port to a probe."""

    ANSWERS = "answers"
    REFUSES = "refuses connections"
    SILENT = "does not answer"


def ask(session: str, until: float, stop: Callable[[], bool] = lambda: False) -> Reaction:
    """Probe the engine at ``host:port``, until the monotonic time ``until`` or until ``stop`` returns True.

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
                    return Reaction.ANSWERS
    except ConnectionRefusedError:
        return Reaction.REFUSES
    except (ConnectionResetError, BrokenPipeError):
        return Reaction.ANSWERS
    except OSError as error:
        log.debug("%s cannot be asked for a sign of life: %s", session, error)
    return Reaction.SILENT


class NativeSender(threading.Thread):
    """A thread that runs jobs of one peer, one at a time."""

    def __init__(self, key: str, pool: LanePool, results: queue.SimpleQueue[JobEnd]) -> None:
        super().__init__(name="kvconnect-mooncake", daemon=True)
        self._key = key
        self._pool = pool
        self._results = results
        self._jobs: queue.SimpleQueue[LaneJob | None] = queue.SimpleQueue()
        self.start()
        _senders.add(self)

    def put(self, job: LaneJob | None) -> None:
        """Queue a job; ``results`` gets a ``JobEnd`` for it unless it is dropped. None ends the thread."""
        self._jobs.put(job)

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.dropped:
                continue
            try:
                outcome = self._run(job)
            except Exception as error:
                log.debug("a transfer to %s broke", job.session, exc_info=True)
                outcome = JobEnd(job, not job.posted, f"{type(error).__name__}: {error}")
            self._results.put(outcome)
        # The lane with the empty key is shared by all peers and stays.
        if self._key:
            self._pool.leave(self._key)

    def _run(self, job: LaneJob) -> JobEnd:
        self._pool.prepare_thread()
        lane = self._pool.acquire(self._key)
        try:
            problem = self._open(lane, job)
            if problem:
                return JobEnd(job, True, problem)
            if not job.post():
                return JobEnd(job, True, "timed out before it could be posted")
            batch = job.batch
            columns = [batch.source], [batch.target], [batch.total_bytes]
            code = int(lane.engine.batch_transfer_sync_write(job.session, *columns))
            if code == 0:
                return JobEnd(job, True, "")
            # Retired first, so that ``give_back`` can destroy it.
            self._pool.retire(self._key, lane)
        finally:
            self._pool.give_back(lane)
        return JobEnd(job, self._came_to_rest(lane, job), f"Mooncake's transfer returned {code}")

    def _open(self, lane: SendingEngine, job: LaneJob) -> str:
        """Probe the peer before the first use of its session; returns the problem, or an empty text."""
        if job.session in lane.sessions:
            return ""
        reaction = ask(job.session, job.deadline, stop=lambda: job.dropped)
        if reaction is not Reaction.ANSWERS:
            return f"the peer's engine at {job.session} {reaction.value}"
        lane.sessions.add(job.session)
        return ""

    def _came_to_rest(self, lane: SendingEngine, job: LaneJob) -> bool:
        """Wait until a failed job is quiescent; False if that could not be proven."""
        until = time.monotonic() + job.settle_s
        if not lane.destroyed.wait(job.settle_s):
            return False
        # An engine that refuses connections is gone, and writes no more.
        if ask(job.session, until) is Reaction.SILENT:
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

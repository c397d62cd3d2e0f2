"""Lanes: the Mooncake engines that only send, and the threads that wait in their blocking calls.

Observed with mooncake-transfer-engine 0.3.13.post1, which made the code what it is:

- A batch that returns -1 is not at rest: what the library still has of it keeps flowing, and takes source
  bytes that were written after the return. No call waits for it. Destroying the engine that sent it stops
  it, so transfers go out through engines that can be thrown away: lanes. The engine whose address
  peers know only listens and survives.
- Destroying an engine takes 0.2 to 0.8 s (its accept loop wakes that often) and holds the GIL all
  that time. It happens once per failed batch, so a failure is dear and a success costs nothing.
- Making one takes 1 ms and two threads that sleep.
- What had reached the peer's kernel when the lane went is still written by the peer. A stopped
  peer writes it when it wakes, so rest is proven only by a peer that answers afterwards.
- The first transfer to a session opens it under a lock of the whole engine, for 60 s if the peer
  accepts and stays silent. So a peer has to give a sign of life first.
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

# How long a peer that has answered may still need to write what its kernel holds for it.
GRACE_S = 0.25

# The library's probe: the length of its JSON text and the type, then the text.
_PROBE = b"\x04\x00\x00\x00\x00\x00\x00\x00\x03{}\n"


@dataclass(slots=True, eq=False, kw_only=True)
class LaneJob(Flight):
    """One batch on its way through a thread, ``sender``; its owner answers it, from ``overdue_at`` on alone.

    ``posted`` is set right before the library may touch memory, ``dropped`` by the owner to skip a
    job that was answered or cancelled before that. ``lock`` orders the two.
    """

    session: str
    settle_s: float
    overdue_at: float
    sender: NativeSender | None = None
    posted: bool = False
    dropped: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def post(self) -> bool:
        """Mark the job as posted, unless it was dropped or is too late."""
        with self.lock:
            self.posted = not self.dropped and time.monotonic() < self.deadline
            return self.posted

    def drop(self) -> bool:
        """Keep the job from being posted; False if it was posted already."""
        with self.lock:
            self.dropped = not self.posted
            return self.dropped


class JobEnd(NamedTuple):
    """How a job ended: ``error`` is empty if all of it was done."""

    job: LaneJob
    quiescent: bool
    error: str


@dataclass(slots=True, eq=False)
class SendingEngine:
    """A sending engine. It is destroyed when it is retired and no batch uses it any more."""

    engine: Any
    users: int = 0
    retired: bool = False
    sessions: set[str] = field(default_factory=set)
    destroyed: threading.Event = field(default_factory=threading.Event)


class LanePool:
    """The current lane of each key, made when it is first needed.

    ``prepare_thread`` is called in every thread before it uses a lane.
    """

    def __init__(self, make_engine: Callable[[], Any], prepare_thread: Callable[[], None]) -> None:
        self._make_engine = make_engine
        self.prepare_thread = prepare_thread
        self._lanes: dict[str, SendingEngine] = {}
        self._idle: list[SendingEngine] = []
        self._lock = threading.Lock()

    def acquire(self, key: str) -> SendingEngine:
        """A lane to use until ``give_back``."""
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
        """New work takes a fresh lane from now on, if a key has this lane, or any."""
        with self._lock:
            found = self._lanes.get(key)
            if found is not None and lane in (None, found):
                del self._lanes[key]
                found.retired = True
        if found is not None:
            self._destroy_if_unused(found)

    def leave(self, key: str) -> None:
        """A key is not used any more: its lane, unless a batch still uses it, is the next that is needed.

        Destroying it would take the GIL, and keeping it its threads and sockets.
        """
        with self._lock:
            lane = self._lanes.pop(key, None)
            if lane is None:
                return
            lane.retired = lane.users > 0
            if not lane.retired:
                self._idle.append(lane)

    def each_engine(self, call: Callable[[Any], None]) -> None:
        """For every engine that takes new work."""
        with self._lock:
            for lane in self._lanes.values():
                call(lane.engine)

    def close(self) -> None:
        """Retire all; those in use are destroyed by their last user."""
        for key in list(self._lanes):
            self.retire(key)
        self._idle.clear()

    def _destroy_if_unused(self, lane: SendingEngine) -> None:
        with self._lock:
            if lane.users or not lane.retired or lane.engine is None:
                return
            engine, lane.engine = lane.engine, None
        # The only reference: this stops its threads and closes its connections.
        del engine
        lane.destroyed.set()


class Reaction(enum.Enum):
    """What a peer's port does when it is asked for a sign of life."""

    ANSWERS = "answers"
    REFUSES = "refuses connections"
    SILENT = "does not answer"


def ask(session: str, until: float, stop: Callable[[], bool] = lambda: False) -> Reaction:
    """Ask the engine behind ``host:port`` whether it lives, until a time or until ``stop``.

    The library's own ``send_probe`` takes up to 60 s and cannot be interrupted, and a thread that
    returns from it while the interpreter ends aborts the process. So its message is sent from here.
    Any reaction counts, also a hang-up: it takes a running engine to give one, of any version.
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
    """One thread that runs the jobs of one peer, one at a time."""

    def __init__(self, key: str, pool: LanePool, results: queue.SimpleQueue[JobEnd]) -> None:
        super().__init__(name="kvconnect-mooncake", daemon=True)
        self._key = key
        self._pool = pool
        self._results = results
        self._jobs: queue.SimpleQueue[LaneJob | None] = queue.SimpleQueue()
        self.start()
        _senders.add(self)

    def put(self, job: LaneJob | None) -> None:
        """Queue a job; an outcome follows for every one that was not dropped. None ends the thread."""
        self._jobs.put(job)

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.dropped:
                continue
            try:
                outcome = self._run(job)
            except Exception as error:
                log.warning("a transfer to %s broke: %r", job.session, error)
                outcome = JobEnd(job, not job.posted, f"{type(error).__name__}: {error}")
            self._results.put(outcome)
        # The lane that all peers share stays.
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
            # Retired before it is given back, so that giving it back can destroy it.
            self._pool.retire(self._key, lane)
        finally:
            self._pool.give_back(lane)
        return JobEnd(job, self._came_to_rest(lane, job), f"Mooncake's transfer returned {code}")

    def _open(self, lane: SendingEngine, job: LaneJob) -> str:
        """Make sure that the peer answers before its session is first used; the problem, if any."""
        if job.session in lane.sessions:
            return ""
        reaction = ask(job.session, job.deadline, stop=lambda: job.dropped)
        if reaction is not Reaction.ANSWERS:
            return f"the peer's engine at {job.session} {reaction.value}"
        lane.sessions.add(job.session)
        return ""

    def _came_to_rest(self, lane: SendingEngine, job: LaneJob) -> bool:
        """Wait until nothing of a failed job can move any more; whether that was proven."""
        until = time.monotonic() + job.settle_s
        if not lane.destroyed.wait(job.settle_s):
            return False
        # An engine that refuses is gone, and wrote all it ever will.
        if ask(job.session, until) is Reaction.SILENT:
            return False
        time.sleep(GRACE_S)
        return True


# Every thread that may be inside the library.
_senders: weakref.WeakSet[NativeSender] = weakref.WeakSet()


@atexit.register
def _leave_the_library() -> None:
    """Let threads come back from the library before the interpreter ends.

    One that comes back while it ends cannot take the GIL any more, and aborts the process.
    """
    until = time.monotonic() + float(os.environ.get("MC_TRANSFER_TIMEOUT", "30")) + 1.0
    senders = list(_senders)
    for sender in senders:
        sender.put(None)
    for sender in senders:
        sender.join(max(until - time.monotonic(), 0.0))

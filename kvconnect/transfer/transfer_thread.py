"""The one thread that owns the engine, the side channel and all records of a worker's transfers.

Others give it orders and take reports; nothing else is shared. ``step`` does everything that can be
done now and returns how long to sleep; the thread around it only sleeps. While bytes are under way it
polls, with a back-off; when nothing is, it sleeps until it is woken.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from kvconnect.engine.base import Completion
from kvconnect.metrics import Metrics, count_error
from kvconnect.peer.channel import Arrival, Channel, Frame
from kvconnect.timeline import Turns
from kvconnect.transfer.inbound_peers import InboundPeers
from kvconnect.transfer.local import Local
from kvconnect.transfer.orders import Orders
from kvconnect.transfer.timers import Timers

Finished = Callable[[], bool]

_KEPT = 8
"""Steps whose beginning is remembered: more than a serving stack runs ahead of the results that it has."""


def always() -> bool:
    """Of a device that is done with what it is given at once."""
    return True


class DeviceSteps:
    """An event of the device before each of its last steps: an order waits for the step that it speaks of.

    Args:
        record: returns what reports whether the device has finished everything that it was given so far.
    """

    def __init__(self, record: Callable[[], Finished]) -> None:
        self._record = record
        self._begun: deque[tuple[int, Finished]] = deque(maxlen=_KEPT)

    def begin(self, step: int) -> None:
        """All kernels of the steps before this one were launched, and none of this one."""
        if self._begun and step <= self._begun[-1][0]:
            # Another scheduler, which counts its steps anew.
            self._begun.clear()
        self._begun.append((step, self._record()))

    def finished(self, step: int) -> Finished:
        """What knows whether a step is over; of one after which none began, all that was launched so far."""
        for begun, is_finished in self._begun:
            if begun > step:
                return is_finished
        return self._record()


logger = logging.getLogger(__name__)

Order = TypeVar("Order")
Command = Callable[[float], None]

_LONGEST_SLEEP_S = 5.0
_ACTIVE_POLLS = 200
"""Polls one after the other since the last progress: an engine that must be polled to advance needs them."""
_FEW_POLLS = 6
"""As many as a kernel that unpacks a chunk takes, where nothing else has to be looked at."""
_BRIEF_NAP_S = 1e-6
"""What the system makes of it is some 50 us, in which a thread that waits for the interpreter gets it."""
_SHORT_NAP_S = 50e-6
_NAPS = 400
_AFTER_ERROR_S = 0.1
_LONG_NAP_S = 1e-3


class TransferPart:
    """What a prefill node, or a decode node, does on the transfer thread, which alone calls it.

    A hook that a part has no use for does nothing.
    """

    name = ""

    def carry_out(self, orders: Orders, finished: Mapping[int, Finished], now: float) -> None:
        """One step's orders; ``finished`` reports by step whether the device is done with it."""

    def receive(self, arrival: Arrival, now: float) -> None:
        """Something came over a connection that we opened."""

    def completed(self, completion: Completion, now: float) -> None:
        """The engine has ended a batch."""

    def advance(self, now: float) -> bool:
        """Do what can be done now. Whether something went on that no message and no completion brought."""
        return False

    @property
    def is_due(self) -> bool:
        """Something happened that was not looked after since."""
        return False

    @property
    def is_busy(self) -> bool:
        """Something is under way whose end wakes no thread."""
        return False

    @property
    def is_sending(self) -> bool:
        """The engine must be polled often for it: the less, the slower it is."""
        return False


class TransferThread:
    """The parts of a worker's transfers, driven by ``step``.

    Args:
        inbound_peers: what takes the frames of connections that peers opened.
        parts: in the order in which they carry out a step's orders.
    """

    def __init__(
        self,
        channel: Channel,
        local: Local,
        metrics: Metrics,
        timers: Timers,
        inbound_peers: InboundPeers,
        parts: Sequence[TransferPart],
    ) -> None:
        self.local = local
        self.timers = timers
        self._inbound_peers = inbound_peers
        self._parts = parts
        self._channel = channel
        self._metrics = metrics
        metrics.slots_landing_limit.set(len(local.landing.slots))
        metrics.slots_send_limit.set(len(local.send.slots))
        self._commands: deque[Command] = deque()
        self._polls_without_progress = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # Called by the owner of the worker, from any thread

    def start(self, release: Callable[[], None]) -> None:
        """Begin to step; ``release`` is called when the thread ends, on it."""
        thread = threading.Thread(target=self._run, args=(release,), name="kvconnect-transfers", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self, timeout_s: float) -> bool:
        """Let the thread end. False: it has not within that time."""
        self._stopping.set()
        self._channel.wake()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def order(self, orders: Orders, finished: Callable[[int], Finished]) -> None:
        """Queue one step's orders. ``finished`` returns what reports whether the device has finished a step.

        Of the step of these orders, that is all that the device was given so far.
        """
        steps = {order.step for order in orders.holds}
        if orders.progress:
            steps.add(orders.step - 1)
        if orders.loads:
            steps.add(orders.step)
        # Here and now: an event is recorded on the caller's stream.
        checks = {step: finished(step) for step in steps}
        self.call(lambda now: self._carry_out(orders, checks, now))

    def call(self, command: Command) -> None:
        """Have this thread call it with the time, after what it was given before."""
        self._commands.append(command)
        self._channel.wake()

    # This thread

    def step(self, now: float) -> float:
        """Do what can be done now. Returns how long in seconds it may sleep if nothing arrives."""
        progress = False
        while self._commands:
            progress = True
            try:
                self._commands.popleft()(now)
            except Exception as error:
                count_error(self._metrics, error, "an order")
        arrivals: Sequence[Arrival] | None = None
        completions: Sequence[Completion] | None = None
        try:
            arrivals = self._channel.receive()
        except Exception as error:
            count_error(self._metrics, error, "the channel")
        for arrival in arrivals or ():
            progress = True
            try:
                self._take(arrival, now)
            except Exception as error:
                count_error(self._metrics, error, "a message")
        try:
            completions = self.local.engine.poll()
        except Exception as error:
            count_error(self._metrics, error, "the engine")
        for completion in completions or ():
            progress = True
            try:
                for part in self._parts:
                    part.completed(completion, now)
            except Exception as error:
                count_error(self._metrics, error, "a completion")
        self.timers.run(now)
        for part in self._parts:
            try:
                progress |= part.advance(now)
            except Exception as error:
                count_error(self._metrics, error, part.name)
        # What was ordered since was taken from the channel, with what came, as a reason to wake.
        is_called = bool(self._commands) or self._stopping.is_set() or self.timers.next_at() <= now
        if arrivals is None or completions is None:
            return _AFTER_ERROR_S
        for part in self._parts:
            is_called = is_called or part.is_due
        return 0.0 if is_called else self._sleep_s(progress, now)

    def _run(self, release: Callable[[], None]) -> None:
        """Step and sleep until stopped. An error of ours does not end it."""
        try:
            stream = self.local.stream
            if stream is not None:
                torch.cuda.set_device(stream.device)
                torch.cuda.set_stream(stream)
            turns = Turns(self._metrics.timeline)
            while not self._stopping.is_set():
                sleep_s = _AFTER_ERROR_S
                # A bug, since bad input never raises here. Requests that hang on it end by their deadlines;
                # the others go on.
                try:
                    sleep_s = self.step(turns.begin())
                except Exception as error:
                    count_error(self._metrics, error, "a turn")
                turns.end(sleep_s)
                if sleep_s >= _LONG_NAP_S:
                    self._channel.wait(sleep_s)
                elif sleep_s > 0:
                    time.sleep(sleep_s)
                else:
                    # Lets others have the interpreter. A sleep of no time takes 50 us and more.
                    os.sched_yield()
        finally:
            # By the thread that used them, so that nothing is closed under a running call.
            release()

    def _carry_out(self, orders: Orders, finished: Mapping[int, Finished], now: float) -> None:
        if orders.directory:
            self._inbound_peers.know_ranks(orders.directory)
        for part in self._parts:
            part.carry_out(orders, finished, now)
        if self.local.introduction.rank == 0:
            # Every rank gets the orders, but what happened to the scheduler half happened once.
            for reason in orders.failures:
                self._metrics.failures.labels(reason).inc()

    def _take(self, arrival: Arrival, now: float) -> None:
        if isinstance(arrival, Frame) and arrival.link.startswith("in:"):
            self._inbound_peers.receive(arrival.link, arrival.data, now, arrival.host)
            return
        for part in self._parts:
            part.receive(arrival, now)

    def _sleep_s(self, progress: bool, now: float) -> float:
        sends = receives = False
        for part in self._parts:
            sends, receives = sends or part.is_sending, receives or part.is_busy
        if not sends and not receives:
            self._polls_without_progress = 0
            return min(max(_LONG_NAP_S, self.timers.next_at() - now), _LONGEST_SLEEP_S)
        self._polls_without_progress = 0 if progress else self._polls_without_progress + 1
        if progress:
            return 0.0
        # What is under way is slower the less often we look: what we send, and all between CPUs.
        must_poll = sends or self.local.stream is None
        if not must_poll and self._polls_without_progress >= _FEW_POLLS:
            # A message ends this nap, and who computes beside us needs the interpreter more.
            return _LONG_NAP_S
        if self._polls_without_progress < _ACTIVE_POLLS:
            return _BRIEF_NAP_S
        return _SHORT_NAP_S if self._polls_without_progress < _ACTIVE_POLLS + _NAPS else _LONG_NAP_S


def each(metrics: Metrics, what: str, orders: Iterable[Order], carry_out: Callable[[Order], None]) -> None:
    """Carry out orders of one kind: an error of ours over one of them ends no other."""
    for order in orders:
        try:
            carry_out(order)
        except Exception as error:
            count_error(metrics, error, f"an order to {what}")

"""The one thread that owns the engine, the side channel and all records of a worker's transfers.

Others give it orders and take reports; nothing else is shared. ``step`` does everything that can be
done now and returns how long to sleep; the thread around it only sleeps. While bytes are under way it
polls, with a back-off; when nothing is, it sleeps until it is woken.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Completion
from kvconnect.metrics import Metrics
from kvconnect.orders import Orders, RankAddress
from kvconnect.peer.channel import Arrival, Channel, Frame, LinkLost
from kvconnect.peer.messages import OTHER_WEIGHTS
from kvconnect.timeline import Turns
from kvconnect.worker.decode_side import DecodeSide
from kvconnect.worker.device_steps import Finished
from kvconnect.worker.error_counting import ErrorsCounted, count_error
from kvconnect.worker.local import Local
from kvconnect.worker.prefill_side import PrefillSide
from kvconnect.worker.reports import Reports
from kvconnect.worker.tally import count_pulls
from kvconnect.worker.timers import Timers

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


class TransferThread:
    """Both sides of a worker's transfers, driven by ``step``.

    Args:
        randomness: where everything random comes from; None for the system's.
    """

    def __init__(
        self,
        config: ExtraConfig,
        channel: Channel,
        local: Local,
        reports: Reports,
        metrics: Metrics,
        randomness: random.Random | None = None,
    ) -> None:
        chance = randomness or random.SystemRandom()
        self.timers = Timers(lambda error: count_error(metrics, error, "what was due"))
        self.prefill = PrefillSide(config, local, channel, reports, metrics, chance, self.timers)
        self.decode = DecodeSide(config, local, channel, reports, metrics, chance, self.timers)
        self.local = local
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
        self._call(lambda now: self._carry_out(orders, checks, now))

    def replace_weights(self, weights: Mapping[str, str]) -> None:
        """Our introduction names other weights from now on: before the orders that are given after this."""

        def replace(now: float) -> None:
            self.local.replace_weights(weights)
            self.prefill.replace_weights(f"{OTHER_WEIGHTS} than those that it was computed with", now)
            self.decode.replace_weights(now)

        self._call(replace)

    def drain(self, drained: Callable[[], None], reason: str, drain_s: float) -> None:
        """Begin no lease until ``wake``; ``drained`` is called, on this thread, once none is left."""
        self._call(lambda now: self.prefill.drain(drained, reason, drain_s, now))

    def know_ranks(self, directory: tuple[RankAddress, ...]) -> None:
        """Where all ranks of this node listen, for peers that come before orders bring it."""
        self._call(lambda _: self.prefill.inbound_peers.know_ranks(directory))

    def wake(self) -> None:
        """Pages may be read again."""
        self._call(lambda now: self.prefill.wake())

    def _call(self, command: Command) -> None:
        self._commands.append(command)
        self._channel.wake()

    # This thread

    def step(self, now: float) -> float:
        """Do what can be done now. Returns how long in seconds it may sleep if nothing arrives."""
        progress = False
        while self._commands:
            progress = True
            with ErrorsCounted(self._metrics, "an order"):
                self._commands.popleft()(now)
        arrivals: Sequence[Arrival] | None = None
        completions: Sequence[Completion] | None = None
        with ErrorsCounted(self._metrics, "the channel"):
            arrivals = self._channel.receive()
        for arrival in arrivals or ():
            progress = True
            with ErrorsCounted(self._metrics, "a message"):
                self._take(arrival, now)
        with ErrorsCounted(self._metrics, "the engine"):
            completions = self.local.engine.poll()
        for completion in completions or ():
            progress = True
            with ErrorsCounted(self._metrics, "a completion"):
                self.prefill.sender.completed(completion, now)
        self.timers.run(now)
        with ErrorsCounted(self._metrics, "the loads"):
            self.decode.advance(now)
        with ErrorsCounted(self._metrics, "the leases"):
            self.prefill.advance(now)
        progress |= self.prefill.sender.take_progress()
        # What was ordered since was taken from the channel, with what came, as a reason to wake.
        is_called = (
            self._commands or self._stopping.is_set() or self.decode.is_due or self.timers.next_at() <= now
        )
        if arrivals is None or completions is None:
            return _AFTER_ERROR_S
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
                with ErrorsCounted(self._metrics, "a turn"):
                    sleep_s = self.step(turns.begin())
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
        prefill, decode, step = self.prefill, self.decode, orders.step
        prefill.inbound_peers.know_ranks(orders.directory)
        # In this order: a handle may be withdrawn, expected anew and held, all in one step.
        self._each("withdraw", orders.withdrawn, prefill.withdraw)
        self._each("expect", orders.expected, prefill.expect)
        self._each("preempt", orders.preempted, prefill.preempted)
        self._each(
            "report progress", orders.progress, lambda order: prefill.progress(order, finished[step - 1])
        )
        self._each("hold", orders.holds, lambda order: prefill.hold(order, finished[order.step], now))
        self._each("load", orders.loads, lambda order: decode.load(order, finished[step], now))
        self._each("let go", orders.let_go, lambda order: decode.let_go(order, now))
        self._each("await", orders.awaited, lambda order: decode.wait(order, now))
        self._each("abort", orders.aborted, decode.abort)
        if self.local.introduction.rank == 0:
            # Every rank gets the orders, but what happened to the scheduler half happened once.
            self._each("find", orders.finds, lambda order: decode.find(order, now))
            for reason in orders.failures:
                self._metrics.failures.labels(reason).inc()
            count_pulls(self._metrics, orders.pulls)

    def _each(self, what: str, orders: Iterable[Order], carry_out: Callable[[Order], None]) -> None:
        for order in orders:
            with ErrorsCounted(self._metrics, f"an order to {what}"):
                carry_out(order)

    def _take(self, arrival: Arrival, now: float) -> None:
        match arrival:
            case Frame(link=link, data=data, host=host) if link.startswith("in:"):
                self.prefill.receive(link, data, now, host)
            case Frame(link=link, data=data):
                self.decode.receive(link, data, now)
            case LinkLost():
                self.decode.link_lost(arrival, now)

    def _sleep_s(self, progress: bool, now: float) -> float:
        # Bytes may be under way to us, or be unpacked, the end of which wakes no thread.
        target_polls = self.local.engine.capabilities.target_must_poll
        receives = self.decode.waiting_for_device or (target_polls and self.decode.waiting_for_writes)
        sends = self.prefill.fetches.busy
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

"""The one thread that owns the engine, the side channel and both ledgers of a worker.

Others give it orders and take results; nothing else is shared. ``step`` does everything that can be
done now and says how long to sleep; the thread around it only sleeps. While bytes are under way it
polls, with a back-off; when nothing is, it sleeps until it is woken.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Engine
from kvconnect.metrics import Metrics
from kvconnect.orders import Orders, Results
from kvconnect.peer.channel import Arrival, Channel, Frame, LinkLost
from kvconnect.peer.messages import OTHER_WEIGHTS, CacheMeaning, Introduction
from kvconnect.worker.decode_side import DecodeSide
from kvconnect.worker.error_counting import ErrorsCounted
from kvconnect.worker.local import Local
from kvconnect.worker.prefill_side import PrefillSide

logger = logging.getLogger(__name__)

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
_LONG_NAP_S = 1e-3


class Mover:
    """Both halves of a worker's transfers, driven by ``step``.

    Args:
        introduce: our introduction, as it is now.
        local: our pages and slots.
        wake_owner: called from the mover's thread when results are waiting.
        randomness: where everything random comes from; None for the system's.
    """

    def __init__(
        self,
        config: ExtraConfig,
        engine: Engine,
        channel: Channel,
        *,
        rank: int,
        meaning: CacheMeaning,
        introduce: Callable[[], Introduction],
        local: Local,
        metrics: Metrics,
        wake_owner: Callable[[], None] = lambda: None,
        randomness: random.Random | None = None,
    ) -> None:
        self.wake_owner = wake_owner
        self._engine = engine
        self._rank = rank
        self._metrics = metrics
        self._channel = channel
        self._commands: deque[Command] = deque()
        self._results_lock = threading.Lock()
        self._sent: list[str] = []
        self._received: list[str] = []
        self._failed: dict[str, str] = {}
        self._settled: list[str] = []
        self._polls_without_progress = 0
        self._on_cuda = local.device.type == "cuda"
        self._drained: Callable[[], None] | None = None
        chance = randomness or random.SystemRandom()
        self.prefill = PrefillSide(
            config, engine, introduce, local, channel.send, self._report_sent, metrics, chance
        )
        self.decode = DecodeSide(
            config,
            engine,
            channel,
            rank,
            meaning,
            introduce,
            local,
            self._report_received,
            self._report_settled,
            metrics,
            chance,
        )

    # Called by the owner of the worker, from any thread

    def order(
        self, orders: Orders, ready: Callable[[], bool], computed: Callable[[], bool] | None = None
    ) -> None:
        """Queue one step's orders. ``ready`` says when the device is done with what they name.

        ``computed`` says that of what is held and what is streamed alone; left out, it is ``ready``.
        """
        is_computed = computed or ready

        def carry_out(now: float) -> None:
            if orders.directory:
                self.prefill.inbound_peers.directory = orders.directory
            # In this order: a handle may be withdrawn, expected anew and held, all in one step.
            for withdrawn in orders.withdrawn:
                with ErrorsCounted(self._metrics, "an order to withdraw"):
                    self.prefill.withdraw(withdrawn)
            for expected in orders.expected:
                with ErrorsCounted(self._metrics, "an order to expect"):
                    self.prefill.expect(expected)
            for preempted in orders.preempted:
                with ErrorsCounted(self._metrics, "an order of a preemption"):
                    self.prefill.preempted(preempted)
            for progress in orders.progress:
                with ErrorsCounted(self._metrics, "an order of progress"):
                    self.prefill.progress(progress, is_computed)
            for hold in orders.holds:
                with ErrorsCounted(self._metrics, "an order to hold"):
                    self.prefill.hold(hold, is_computed, now)
            for load in orders.loads:
                with ErrorsCounted(self._metrics, "an order to load"):
                    self.decode.load(load, ready, now)
            for release in orders.let_go:
                with ErrorsCounted(self._metrics, "an order to let go"):
                    self.decode.let_go(release, now)
            for awaited in orders.awaited:
                with ErrorsCounted(self._metrics, "an order to await"):
                    self.decode.wait(awaited, now)
            for request_id in orders.aborted:
                with ErrorsCounted(self._metrics, "an order to abort"):
                    self.decode.abort(request_id)
            if self._rank == 0:
                # Every rank gets the orders, but what happened to the scheduler half happened once.
                for reason in orders.failures:
                    self._metrics.failures.labels(reason).inc()

        self.call(carry_out)

    def call(self, command: Command) -> None:
        """Run something on the mover's thread, soon."""
        self._commands.append(command)
        self._channel.wake()

    def replace_weights(self) -> None:
        """Our introduction names other weights from now on: before the orders that are given after this."""

        def replace(now: float) -> None:
            self.prefill.replace_weights(f"{OTHER_WEIGHTS} than those that it was computed with")
            for loading in self.decode.loads.values():
                loading.fail("our weights were replaced while it was being loaded")
            self.decode.peers.greet_anew()

        self.call(replace)

    def drain(self, drained: Callable[[], None]) -> None:
        """Begin no lease any more; ``drained`` is called, on the mover's thread, once none is left."""

        def begin(now: float) -> None:
            self._drained = drained
            self.prefill.drain(now)

        self.call(begin)

    def take_results(self) -> Results:
        """What ended since the last call."""
        with self._results_lock:
            results = Results(
                tuple(self._sent), tuple(self._received), self._failed, settled=tuple(self._settled)
            )
            self._sent, self._received, self._failed, self._settled = [], [], {}, []
        return results

    # The mover's own thread

    def step(self, now: float) -> float:
        """Do what can be done now. Returns how long in seconds it may sleep if nothing arrives."""
        progress = False
        while self._commands:
            progress = True
            with ErrorsCounted(self._metrics, "an order"):
                self._commands.popleft()(now)
        for arrival in self._channel.receive():
            progress = True
            with ErrorsCounted(self._metrics, "a message"):
                self._take(arrival, now)
        for completion in self._engine.poll():
            progress = True
            with ErrorsCounted(self._metrics, "a completion"):
                self.prefill.completed(completion, now)
        with ErrorsCounted(self._metrics, "the loads"):
            self.decode.advance(now)
        with ErrorsCounted(self._metrics, "the leases"):
            self.prefill.advance(now)
        if self._drained is not None and self.prefill.drained:
            drained, self._drained = self._drained, None
            drained()
        return self._sleep_s(progress, now)

    def run(self, stopping: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        """The thread's body: step and sleep until told to stop. An error of ours does not end it."""
        while not stopping.is_set():
            try:
                sleep_s = self.step(clock())
            except Exception:
                # A bug, since bad input never raises here. Requests that hang on it end by their
                # deadlines; the others go on.
                logger.exception("the transfer thread met an error of its own")
                sleep_s = 0.1
            if sleep_s >= _LONG_NAP_S:
                self._channel.wait(sleep_s)
            elif sleep_s > 0:
                time.sleep(sleep_s)
            else:
                # Lets others have the interpreter. A sleep of no time takes 50 us and more.
                os.sched_yield()

    def _take(self, arrival: Arrival, now: float) -> None:
        match arrival:
            case Frame(link=link, data=data, host=host) if link.startswith("in:"):
                self.prefill.receive(link, data, now, host)
            case Frame(link=link, data=data):
                self.decode.receive(link, data, now)
            case LinkLost():
                self.decode.link_lost(arrival, now)

    def _sleep_s(self, progress: bool, now: float) -> float:
        sends = self.prefill.fetches.busy
        if not sends and not self._receives:
            self._polls_without_progress = 0
            deadlines = [
                deadline
                for deadline in (self.decode.next_deadline(), self.prefill.next_deadline(now))
                if deadline is not None
            ]
            earliest = min(deadlines, default=now + _LONGEST_SLEEP_S)
            return min(max(_LONG_NAP_S, earliest - now), _LONGEST_SLEEP_S)
        self._polls_without_progress = 0 if progress else self._polls_without_progress + 1
        if progress:
            return 0.0
        # What is under way is slower the less often we look: what we send, and all between CPUs.
        must_poll = sends or not self._on_cuda
        if not must_poll and self._polls_without_progress >= _FEW_POLLS:
            # A message ends this nap, and who computes beside us needs the interpreter more.
            return _LONG_NAP_S
        if self._polls_without_progress < _ACTIVE_POLLS:
            return _BRIEF_NAP_S
        return _SHORT_NAP_S if self._polls_without_progress < _ACTIVE_POLLS + _NAPS else _LONG_NAP_S

    @property
    def _receives(self) -> bool:
        """Bytes may be under way to us, or be unpacked, the end of which wakes no thread."""
        if self.decode.waiting_for_device:
            return True
        return self._engine.capabilities.target_must_poll and self.decode.waiting_for_writes

    def _report_sent(self, request_id: str) -> None:
        with self._results_lock:
            self._sent.append(request_id)
        self.wake_owner()

    def _report_received(self, request_id: str, error: str) -> None:
        with self._results_lock:
            self._received.append(request_id)
            if error:
                self._failed[request_id] = error
        self.wake_owner()

    def _report_settled(self, handle: str) -> None:
        if self._rank != 0:
            return
        with self._results_lock:
            self._settled.append(handle)
        self.wake_owner()

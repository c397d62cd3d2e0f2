"""The one thread that owns the engine, the side channel and all records of a worker's transfers.

Other threads give it orders and take reports, and share nothing else. ``step`` does all work that is possible
now and returns how long to sleep; the thread around it only sleeps. While bytes are under way the thread
polls, with a back-off; otherwise it sleeps until an event wakes it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvconnect.addresses import RankAddress
from kvconnect.config import TransferConfig
from kvconnect.decode.decode_side import DecodeSide
from kvconnect.metrics import Metrics, count_error
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.channel import Arrival, Channel, Frame
from kvconnect.prefill.prefill_side import PrefillSide
from kvconnect.timeline import Turns
from kvconnect.transfer.inbound_peers import InboundPeers
from kvconnect.transfer.local import Local
from kvconnect.transfer.orders import Orders, Reports
from kvconnect.transfer.parts import DeviceSteps, Finished, Pace, Timers, TransferContext, always

if TYPE_CHECKING:
    from kvconnect.offload.worker.prefix_blocks import PrefixBlocks

_OTHER_WEIGHTS = Cause.OTHER_WEIGHTS(
    "the prefill node's weights are no longer those that it was computed with"
)

Command = Callable[[float], None]
R = TypeVar("R")

_MOST_RECEIPTS = 1024
_LONGEST_SLEEP_S = 5.0
_ACTIVE_POLLS = 200
"""Polls without progress before the back-off begins: some engines advance only when polled."""
_FEW_POLLS = 6
"""Polls during the time in which a kernel unpacks a chunk, where no other work needs polling."""
_BRIEF_NAP_S = 1e-6
"""The system makes this some 50 us, in which a thread that waits for the interpreter gets it."""
_SHORT_NAP_S = 50e-6
_NAPS = 400
_AFTER_ERROR_S = 0.1
_LONG_NAP_S = 1e-3


class WorkerTransfers:
    """The transfers of a worker on one thread: P's part, D's part, or both.

    ``prefill`` is None where the node hands out no KV, and peers are refused; ``decode`` is None where it
    fetches none. ``shared``: the stack's prefix cache, if peers may fetch from it by name. ``randomness`` is
    the only source of random numbers; None for the system's. ``record`` is as of ``DeviceSteps``.
    """

    def __init__(
        self,
        config: TransferConfig,
        channel: Channel,
        local: Local,
        reports: Reports,
        metrics: Metrics,
        randomness: random.Random | None = None,
        *,
        shared: PrefixBlocks | None = None,
        record: Callable[[], Finished] | None = None,
    ) -> None:
        chance = randomness or random.SystemRandom()
        self.local, self._channel, self._metrics = local, channel, metrics
        self._shared, self._is_first = shared, local.introduction.rank == 0
        # A CPU finishes each step at once.
        self._steps = DeviceSteps(record or (_record if local.stream is not None else lambda: always))
        self.timers = Timers(lambda error: count_error(metrics, error, "what was due"))
        context = TransferContext(config.extra, local, channel, reports, metrics, chance, self.timers)
        self.inbound_peers = InboundPeers(context)
        self.prefill = PrefillSide(context, self.inbound_peers) if config.is_producer else None
        self.decode = DecodeSide(context) if config.is_consumer else None
        # The parts carry out a step's orders in this sequence.
        parts = (self.prefill, self.decode)
        self._parts = [part for part in parts if part is not None]
        metrics.slots_landing_limit.set(len(local.landing.slots))
        metrics.slots_send_limit.set(len(local.send.slots))
        self.receipts: deque[dict[str, Any]] = deque(maxlen=_MOST_RECEIPTS)
        """The last receipts of the node's requests, on rank 0. Any thread may add one."""
        self._commands: deque[Command] = deque()
        self._polls_without_progress = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # Called by the owner of the worker, from any thread

    def serve(self) -> None:
        """Start the thread; when it ends, it closes engine and channel."""
        thread = threading.Thread(target=self._run, name="kvconnect-transfers", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread. False: it did not end within ``timeout_s``."""
        self._stopping.set()
        self._channel.wake()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def before_step(self, orders: Orders) -> None:
        """Mark the start of this step on the device, before its kernels are launched.

        Called for every step: a hold refers to the step that computed it, whose orders do not name it.
        """
        if self._shared is not None:
            self._shared.begin(orders.step, orders.reused)
        if self.prefill is not None:
            self._steps.begin(orders.step)

    def start(self, orders: Orders) -> None:
        """Take one step's orders; never waits.

        Of all work of the device, only work given to it so far may still use the blocks to be filled.
        """
        if self._is_first:
            if orders.notes:
                self._metrics.timeline.take(orders.notes)
            self.receipts.extend(orders.receipts)
        if not orders:
            return
        if orders.named and self._shared is not None:
            name, number = self._shared.name, self._shared.number
            is_computed = self._steps.finished(orders.step - 1)
            self.call(lambda now: name(orders.named, number, is_computed))
        self.order(orders, self._steps.finished)

    def order(self, orders: Orders, finished: Callable[[int], Finished]) -> None:
        """Queue one step's orders; ``finished`` returns a check whether the device has finished a given step.

        For the step of these orders, the check covers all work given to the device so far.
        """
        steps = {order.step for order in orders.holds}
        if orders.progress:
            steps.add(orders.step - 1)
        if orders.loads:
            steps.add(orders.step)
        # On the caller's thread: an event is recorded on the caller's stream.
        checks = {step: finished(step) for step in steps}
        self.call(lambda now: self._carry_out(orders, checks, now))

    def call(self, command: Command) -> None:
        """Have the transfer thread call ``command`` with the time, after all commands given before."""
        self._commands.append(command)
        self._channel.wake()

    def revoke(self, handle: str, reason: Reason) -> None:
        """From now on no peer uses what it is sent under a handle; nothing is held there."""
        prefill = self.prefill
        if prefill is not None:
            prefill.book.revoked.add(handle)
            self.call(lambda now: prefill.revoke(handle, reason, now))

    def replace_weights(self, weights: Mapping[str, str]) -> None:
        """Put other weights into this node's introduction, before all orders given after this call."""

        def replace(now: float) -> None:
            self.local.replace_weights(weights)
            if self.prefill is not None:
                self.prefill.replace_weights(_OTHER_WEIGHTS, now)
            self.inbound_peers.introduce_anew()
            if self.decode is not None:
                self.decode.replace_weights(now)

        self.call(replace)

    def quiesce(self, drained: Callable[[], None], reason: Reason, drain_s: float) -> None:
        """Begin no lease until ``wake``; the transfer thread calls ``drained`` once none is left."""
        prefill = self.prefill
        self.call(lambda now: prefill.drain(drained, reason, drain_s, now) if prefill else drained())

    def wake(self) -> None:
        """Allow pages to be read, and leases to begin, again."""
        prefill = self.prefill
        if prefill is not None:
            self.call(lambda now: prefill.wake())

    def know_ranks(self, directory: Iterable[RankAddress]) -> None:
        """Set the addresses of all ranks of this node, for peers that connect before the first orders."""
        ranks = tuple(directory)
        self.call(lambda now: self.inbound_peers.know_ranks(ranks))

    def state(self) -> dict[str, int]:
        """Counts of leases, loads, slots and peers. All zero when idle, except peers."""
        prefill, decode, local = self.prefill, self.decode, self.local
        return {
            **(PrefillSide.NOTHING if prefill is None else prefill.state()),
            **(DecodeSide.NOTHING if decode is None else decode.state()),
            "slots": local.send.taken + local.landing.taken,
            "inbound_peers": len(self.inbound_peers),
        }

    # This thread

    def step(self, now: float) -> float:
        """Do all work that is possible now. Returns the seconds to sleep if no event arrives."""
        progress = False
        while self._commands:
            progress = True
            self._attempt("an order", self._commands.popleft(), now)
        arrivals = self._attempt("the channel", self._channel.receive)
        for arrival in arrivals or ():
            self._attempt("a message", self._take, arrival, now)
        completions = self._attempt("the engine", self.local.engine.poll)
        for completion in completions or ():
            if self.prefill is not None:
                self._attempt("a completion", self.prefill.sender.completed, completion, now)
        progress |= bool(arrivals or completions)
        has_event = self.timers.run(now) or progress
        for part in self._parts:
            # Most turns of a thread that polls bring nothing.
            if has_event or part.has_work:
                progress |= bool(self._attempt(part.name, part.advance, now))
        # A command queued meanwhile: the channel's wake signal for it was already consumed with the arrivals.
        next_at = self.timers.next_at()
        is_called = bool(self._commands) or self._stopping.is_set() or next_at <= now
        if arrivals is None or completions is None:
            return _AFTER_ERROR_S
        pace = max([part.pace for part in self._parts])
        return 0.0 if is_called or pace is Pace.DUE else self._sleep_s(progress, pace, next_at - now)

    def _attempt(self, what: str, call: Callable[..., R], *given: object) -> R | None:
        """The result of a call; None, and the error is counted, if it raises: no other call is left out."""
        try:
            return call(*given)
        except Exception as error:
            count_error(self._metrics, error, what)
            return None

    def _run(self) -> None:
        """Step and sleep until stopped. An internal error does not end the thread."""
        try:
            stream = self.local.stream
            if stream is not None:
                torch.cuda.set_device(stream.device)
                torch.cuda.set_stream(stream)
            turns = Turns(self._metrics.timeline)
            while not self._stopping.is_set():
                # An error here is a bug: bad input never raises. Its requests end by their deadlines.
                found = self._attempt("a turn", self.step, turns.begin())
                sleep_s = _AFTER_ERROR_S if found is None else found
                turns.end(sleep_s)
                if sleep_s >= _LONG_NAP_S:
                    self._channel.wait(sleep_s)
                elif sleep_s > 0:
                    time.sleep(sleep_s)
                else:
                    # Yields the interpreter to other threads. A sleep of 0 s takes 50 us and more.
                    os.sched_yield()
        finally:
            # On the thread that used engine and channel, so that neither is closed during a call: the engine
            # first, since peers take a closed channel for the end of its writes.
            with ExitStack() as opened:
                opened.callback(self._channel.close)
                opened.callback(self.local.engine.close)

    def _carry_out(self, orders: Orders, finished: Mapping[int, Finished], now: float) -> None:
        if orders.directory:
            self.inbound_peers.know_ranks(orders.directory)
        for part in self._parts:
            part.carry_out(orders, finished, now)
        if self._is_first:
            # Every rank gets the orders; failures of the scheduler half are counted once, by rank 0.
            for reason in orders.failures:
                self._metrics.failures.labels(reason).inc()

    def _take(self, arrival: Arrival, now: float) -> None:
        if isinstance(arrival, Frame) and arrival.link.startswith("in:"):
            self.inbound_peers.receive(arrival.link, arrival.data, now, arrival.host)
        elif self.decode is not None:
            self.decode.receive(arrival, now)

    def _sleep_s(self, progress: bool, pace: Pace, timer_s: float) -> float:
        """The seconds to sleep; ``timer_s``: those until the first timer is due."""
        if pace is Pace.IDLE:
            self._polls_without_progress = 0
            return min(max(_LONG_NAP_S, timer_s), _LONGEST_SLEEP_S)
        self._polls_without_progress = 0 if progress else self._polls_without_progress + 1
        if progress:
            return 0.0
        # Sends, and all transfers between CPUs, are slower the less often this thread polls.
        must_poll = pace is Pace.SENDING or self.local.stream is None
        if not must_poll and self._polls_without_progress >= _FEW_POLLS:
            # A message ends this sleep, and the model's threads need the interpreter more.
            return _LONG_NAP_S
        if self._polls_without_progress < _ACTIVE_POLLS:
            return _BRIEF_NAP_S
        return _SHORT_NAP_S if self._polls_without_progress < _ACTIVE_POLLS + _NAPS else _LONG_NAP_S


def _record() -> Finished:
    """A check whether the device has finished all work so far: engines do not follow its streams."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query

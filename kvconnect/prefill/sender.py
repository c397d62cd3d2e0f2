"""P's writes under way: submits the batches of all sendings to the engine, within both sides' bounds.

Knows no session: the fetch service begins each sending, and answers the peer. Owned by the transfer thread.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.engine.base import Batch, Completion
from kvconnect.errors import LayoutError, PeerError
from kvconnect.metrics import count_error
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import Written
from kvconnect.prefill.calibration import ProbeOutbox
from kvconnect.prefill.leases import Consumer, Lease, TransferKey
from kvconnect.prefill.outbox import Parcel, SlotOutbox
from kvconnect.prefill.send_path import SendPath
from kvconnect.transfer.parts import Timer, TransferContext
from kvconnect.transfer.slots import Slot, SlotState

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Sending:
    """P's record of one fetch under way, or of a calibration, which has no ``lease`` and no ``consumer``.

    An ``error`` ends it early; ``again``: the peer may fetch anew. ``streamed``: its prefill was under way
    when it began. ``in_flight``: bytes by id of its batches. ``due_reported``: for how many chunks the peer
    knows that P can use slots; None: all. ``unsettled``: generations of landing slots that are not quiescent.
    ``timer`` fires at the deadline.
    """

    key: TransferKey
    path: SendPath
    outbox: ProbeOutbox | SlotOutbox
    deadline: float
    started_at: float
    lease: Lease | None = None
    consumer: Consumer = ("", "", 0)
    streamed: bool = False
    in_flight: dict[int, int] = field(default_factory=dict)
    total_bytes: int = 0
    last_ended_at: float = 0.0
    moving_since: float = 0.0
    moving_s: float = 0.0
    error: Reason | None = None
    again: bool = False
    due_reported: int | None = None
    unsettled: list[int] = field(default_factory=list)
    timer: Timer | None = None

    def stop(self, reason: Reason, *, again: bool = False) -> None:
        """End it early, once its blocks are not read any more. The first reason is the one reported."""
        if not self.error:
            self.error, self.again = reason, again

    @property
    def epoch(self) -> int:
        """The epoch of the content that is sent; 0 for a calibration."""
        return 0 if self.lease is None else self.lease.epoch

    @property
    def answer(self) -> Written:
        """The message to the peer about this sending, which has ended."""
        lease = None if self.error else self.lease
        return Written(
            transfer_id=self.key[1],
            ok=not self.error,
            quiescent=not self.unsettled,
            total_bytes=self.total_bytes,
            copies=self.outbox.copies,
            seconds=self.seconds,
            error=self.error,
            again=self.again and not self.unsettled,
            epoch=self.epoch,
            unsettled=tuple(self.unsettled),
            attachment=b"" if lease is None or lease.order is None else lease.order.attachment,
            on_device=lease is not None and lease.kept is not None and lease.kept.on_device,
        )

    @property
    def goes_on(self) -> bool:
        """It needs another turn: work is under way whose end wakes no thread, or it can continue at once."""
        return bool(self.in_flight or self.error or self.outbox.goes_on)

    @property
    def is_over(self) -> bool:
        """No batch or kernel of it is under way, and none will follow."""
        is_reading = self.in_flight or self.outbox.is_packing
        return not is_reading and bool(self.error or self.outbox.exhausted)

    @property
    def seconds(self) -> float:
        """Seconds spent sending; of a streamed prefill, without the time in which no chunk was ready."""
        # Chunks that this thread packs into landing slots are written before its clock is read again.
        return self.moving_s if self.streamed else max(self.moving_s, self.last_ended_at - self.started_at)


def _late(seconds: float) -> str:
    return f"not all was sent after {seconds:.1f} s, when load_timeout_s of the decode node was over"


class Sender:
    """All sendings of a worker.

    Args:
        arrived: called for every chunk that lies in its landing slot.
    """

    def __init__(self, context: TransferContext, arrived: Callable[[Sending, Parcel], None]) -> None:
        self.sendings: dict[TransferKey, Sending] = {}
        self._config, self._metrics, self._timers = context.config, context.metrics, context.timers
        self._engine, self._pool = context.local.engine, context.local.send
        self._arrived = arrived
        self._batches: dict[int, Sending] = {}
        self._batch_ids = itertools.count(1)
        self._in_flight_bytes = 0
        self.active: dict[TransferKey, Sending] = {}
        """Sendings to look at in the next turn: touched by an event, or continuing without one."""
        self._lost: deque[tuple[float, Slot]] = deque()
        self._settling = context.timers.timer(self._settle)
        self._has_written = False
        # The last time at which the engine was polled for completions before the present turn.
        self._polled_at = 0.0

    def touch(self, key: TransferKey) -> None:
        """Look again at a sending, whose state has changed."""
        if key in self.sendings:
            self.active[key] = self.sendings[key]

    def begin(self, sending: Sending) -> None:
        """Begin a sending: pack its chunks, and submit its batches."""
        self.sendings[sending.key] = self.active[sending.key] = sending
        sending.timer = self._timers.timer(
            lambda now: self.cancel(sending.key, Cause.TIMEOUT(_late(now - sending.started_at)))
        )
        sending.timer.at(sending.deadline)
        # Start the device now, rather than after all other messages that have arrived.
        self._advance(sending, sending.started_at)

    def cancel(self, key: TransferKey, reason: Reason, *, again: bool = False) -> None:
        """Cancel a sending, which ends once its blocks are not read any more.

        ``again``: the peer is to fetch it anew.
        """
        sending = self.sendings.get(key)
        if sending is not None and not sending.error:
            sending.stop(reason, again=again)
            self.touch(key)
            for batch_id in sending.in_flight:
                self._engine.cancel(batch_id)

    def completed(self, completion: Completion, now: float) -> None:
        """Take the engine's completion of one batch."""
        sending = self._batches.pop(completion.batch_id)
        self.touch(sending.key)
        self._in_flight_bytes -= sending.in_flight.pop(completion.batch_id)
        self._metrics.inflight_bytes.set(self._in_flight_bytes)
        sending.last_ended_at = now
        if not sending.in_flight:
            sending.moving_s += now - sending.moving_since
        parcel = sending.outbox.ended(completion)
        if completion.ok:
            sending.total_bytes += completion.total_bytes
        else:
            sending.stop(Cause.ENGINE(f"the prefill node's engine: {completion.error or 'no reason given'}"))
        if parcel is not None and parcel.slot is not None and not completion.quiescent:
            until = now + self._config.quarantine_s
            self._lost.append((until, parcel.slot))
            self._settling.by(until)
            sending.unsettled.append(parcel.grant.generation)
        elif parcel is not None and not sending.error:
            self._arrived(sending, parcel)
            self._metrics.chunk_seconds.observe(completion.seconds)
            if (meter := sending.path.meter) is not None:
                is_alone = all(other.path.name == sending.path.name for other in self._batches.values())
                meter.moved(completion, now, is_alone=is_alone, unfinished_at=self._polled_at)

    def advance(self, now: float) -> list[Sending]:
        """Pack and submit. Returns, and forgets, the sendings that have ended."""
        self._polled_at = now
        for sending in list(self.active.values()):
            self._advance(sending, now)
        self._feed(now)
        over: list[Sending] = []
        for sending in list(self.active.values()):
            if not sending.goes_on:
                del self.active[sending.key]
            if sending.is_over:
                over.append(sending)
                self.active.pop(sending.key, None)
                del self.sendings[sending.key]
                if sending.timer is not None:
                    sending.timer.cancel()
        self._metrics.slots_send.set(self._pool.taken)
        return over

    def take_progress(self) -> bool:
        """Whether a chunk was packed into its landing slot since the last call, so that more may be due."""
        has_written, self._has_written = self._has_written, False
        return has_written

    def _advance(self, sending: Sending, now: float) -> None:
        try:
            for parcel in sending.outbox.advance(stopping=bool(sending.error)):
                self._has_written = True
                sending.total_bytes += parcel.length_bytes
                sending.moving_s += parcel.seconds
                sending.last_ended_at = now
                self._metrics.chunk_seconds.observe(parcel.seconds)
                if not sending.error:
                    self._arrived(sending, parcel)
        except Exception as error:
            # Any error, a device out of memory included, fails only this request. It is counted once: a
            # failed device raises at every turn.
            if not isinstance(error, (LayoutError, PeerError)) and not sending.error:
                count_error(self._metrics, error, f"transfer {sending.key[1]}")
            sending.stop(Cause.ENGINE(f"the prefill node cannot pack its chunks: {error}"))

    def _settle(self, now: float) -> None:
        while self._lost and self._lost[0][0] <= now:
            self._pool.move(self._lost.popleft()[1], SlotState.FREE)
        if self._lost:
            self._settling.at(self._lost[0][0])
        self._metrics.slots_send.set(self._pool.taken)

    def _feed(self, now: float) -> None:
        """Submit batches while the engine's bounds and P's own allow."""
        in_flight: Counter[str] = Counter()
        for sending in self.active.values():
            in_flight[sending.path.name] += len(sending.in_flight)
        most = self._engine.capabilities.max_batches_per_peer
        for sending in self.active.values():
            peer = sending.path.name
            while in_flight[peer] < most and self._submit_next(sending, in_flight[peer], now):
                in_flight[peer] += 1

    def _submit_next(self, sending: Sending, under_way: int, now: float) -> bool:
        """Submit a sending's next batch, if there is room; ``under_way``: batches in flight to its peer."""
        columns = None if sending.error else sending.outbox.peek()
        if columns is None:
            return False
        source, target, length = columns
        # A peer's first batch may exceed the bound, so that peers which do not respond cannot take all of it.
        if under_way and self._in_flight_bytes + length > self._config.max_inflight_bytes:
            return False
        batch = Batch(
            batch_id=next(self._batch_ids),
            peer=sending.path.name,
            source=source,
            target=target,
            total_bytes=length,
            timeout_s=min(self._config.transfer_timeout_s, max(0.001, sending.deadline - now)),
        )
        try:
            self._engine.submit(batch)
        except Exception as error:
            # The engine will not complete this batch, so the fetch must fail.
            logger.debug("a batch could not be submitted", exc_info=True)
            text = f"the prefill node's engine does not take a batch: {type(error).__name__}: {error}"
            sending.stop(Cause.ENGINE(text))
            return False
        sending.outbox.submitted(batch.batch_id)
        if not sending.in_flight:
            sending.moving_since = now
        total_bytes = batch.total_bytes
        self._batches[batch.batch_id] = sending
        sending.in_flight[batch.batch_id] = total_bytes
        self._in_flight_bytes += total_bytes
        self._metrics.inflight_bytes.set(self._in_flight_bytes)
        return True

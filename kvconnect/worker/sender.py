"""P's writes under way: feeds the engine from all sendings, within its bounds and ours.

Knows no lease and no session; the prefill side begins a sending, and answers for it once it is over.
Owned by the transfer thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Batch, Completion
from kvconnect.errors import PeerError
from kvconnect.metrics import Metrics
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import Grant
from kvconnect.plan.transfer import Plan
from kvconnect.worker.error_counting import count_error
from kvconnect.worker.leases import SendEvent, Sending, TransferKey
from kvconnect.worker.local import Local
from kvconnect.worker.outbox import Arrived, Outbox, PageOutbox, SlotOutbox
from kvconnect.worker.slots import Slot, SlotEvent
from kvconnect.worker.supply import Supply

logger = logging.getLogger(__name__)


class Sender:
    """All sendings of a worker.

    Args:
        arrived: told of every chunk that lies in its landing slot.
    """

    def __init__(
        self,
        config: ExtraConfig,
        local: Local,
        metrics: Metrics,
        arrived: Callable[[TransferKey, Arrived], None],
    ) -> None:
        self.sendings: dict[TransferKey, Sending] = {}
        self._config = config
        self._engine = local.engine
        self._pool = local.send
        self._metrics = metrics
        self._arrived = arrived
        self._outboxes: dict[TransferKey, Outbox] = {}
        self._of_peer: dict[str, list[TransferKey]] = {}
        self._batches: dict[int, TransferKey] = {}
        self._batch_ids = itertools.count(1)
        self._in_flight_bytes = 0
        self._lost: list[tuple[float, Slot]] = []

    @property
    def slot_bytes(self) -> int:
        """The largest chunk that a send slot takes and that is one batch; 0 where there are no slots."""
        if not self._pool.slots:
            return 0
        return min(self._pool.slot_bytes, self._engine.capabilities.max_bytes)

    @property
    def slots_taken(self) -> int:
        """Send slots in use or in quarantine."""
        return self._pool.taken

    @property
    def busy(self) -> bool:
        """Something is under way whose end wakes no thread."""
        return any(
            sending.in_flight or sending.error or self._outboxes[key].goes_on
            for key, sending in self.sendings.items()
        )

    def begin_direct(self, sending: Sending, plan: Plan) -> None:
        """Begin to write pages."""
        capabilities = self._engine.capabilities
        max_bytes = min(capabilities.max_bytes, self._config.max_batch_bytes)
        self.begin(sending, PageOutbox(plan, capabilities.max_copies, max_bytes))

    def begin_packed(
        self, sending: Sending, packer: Packer, supply: Supply, grants: Sequence[Grant]
    ) -> Sequence[Grant]:
        """Begin to pack chunks, and to write them to landing slots. Returns those of no use yet.

        Raises:
            PeerError: one is larger than a slot of ours.
        """
        if supply.largest_bytes > self.slot_bytes:
            raise PeerError(f"a chunk has {supply.largest_bytes} bytes, a slot here has {self.slot_bytes}")
        digest = self._config.check_digest
        outbox = SlotOutbox(packer, supply, grants, self._pool, digest, sending.peer)
        self.begin(sending, outbox)
        # The device begins now rather than when everything else that has arrived was looked at.
        if error := outbox.advance(stopping=False):
            sending.stop(error)
        return outbox.unneeded

    def begin(self, sending: Sending, outbox: Outbox) -> None:
        """Begin to submit what an outbox gives."""
        sending.path, sending.copies = outbox.path, outbox.copies
        self.sendings[sending.key] = sending
        self._outboxes[sending.key] = outbox
        self._of_peer.setdefault(sending.peer, []).append(sending.key)

    def grant(self, key: TransferKey, grants: Sequence[Grant]) -> Sequence[Grant]:
        """A peer lends more slots. Returns those of no use yet; what is over has no use for any."""
        outbox = self._outboxes.get(key)
        return outbox.grant(grants) if isinstance(outbox, SlotOutbox) else ()

    def due(self, key: TransferKey) -> int:
        """How many chunks of what is under way can be packed by now, in all."""
        outbox = self._outboxes[key]
        return outbox.due if isinstance(outbox, SlotOutbox) else 0

    def cancel(self, key: TransferKey, reason: str, *, again: bool = False) -> None:
        """Ask for an early end. The sending is over once nothing reads its blocks any more.

        ``again``: the peer is to fetch it anew.
        """
        sending = self.sendings.get(key)
        if sending is not None and not sending.error:
            sending.stop(reason, again=again)
            for batch_id in sending.in_flight:
                self._engine.cancel(batch_id)

    def completed(self, completion: Completion, now: float) -> None:
        """Take the engine's answer to one of our batches."""
        key = self._batches.pop(completion.batch_id)
        sending = self.sendings[key]
        self._in_flight_bytes -= sending.in_flight.pop(completion.batch_id)
        self._metrics.inflight_bytes.set(self._in_flight_bytes)
        sending.last_ended_at = now
        if not sending.in_flight:
            sending.moving_s += now - sending.moving_since
        outbox = self._outboxes[key]
        arrived = outbox.ended(completion)
        if completion.ok:
            sending.total_bytes += completion.total_bytes
        else:
            sending.quiescent &= completion.quiet
            sending.stop(completion.error or "the engine gave no reason")
        if isinstance(outbox, SlotOutbox):
            for slot, generation in outbox.take_lost():
                self._lost.append((now + self._config.quarantine_s, slot))
                sending.unsettled.append(generation)
        if arrived is not None and not sending.error:
            self._arrived(key, arrived)

    def advance(self, now: float) -> list[Sending]:
        """Let time pass: feed kernels and engine. Returns the sendings that are over, and forgets them."""
        self._settle(now)
        for key, outbox in self._outboxes.items():
            sending = self.sendings[key]
            try:
                error = outbox.advance(stopping=bool(sending.error))
            except Exception as failure:
                # Once for each: a device that failed fails at every look.
                if not sending.error:
                    count_error(self._metrics, failure, f"transfer {key[1]}")
                error = f"its chunks cannot be packed: {failure}"
            if error:
                sending.stop(error)
        for keys in self._of_peer.values():
            self._feed(keys, now)
        over = [sending for key, sending in self.sendings.items() if self._is_over(key)]
        for sending in over:
            sending.move(SendEvent.END)
            del self.sendings[sending.key]
            del self._outboxes[sending.key]
            keys = self._of_peer[sending.peer]
            keys.remove(sending.key)
            if not keys:
                del self._of_peer[sending.peer]
        self._metrics.slots_send.set(self._pool.taken)
        return over

    def next_deadline(self) -> float | None:
        """The time by which ``advance`` has something to do even if nothing arrives."""
        return min((until for until, _ in self._lost), default=None)

    def _settle(self, now: float) -> None:
        if not self._lost:
            return
        for until, slot in self._lost:
            if now >= until:
                self._pool.move(slot, SlotEvent.RETURN)
        self._lost = [(until, slot) for until, slot in self._lost if now < until]

    def _is_over(self, key: TransferKey) -> bool:
        sending, outbox = self.sendings[key], self._outboxes[key]
        return not sending.in_flight and not outbox.busy and bool(sending.error or outbox.exhausted)

    def _feed(self, keys: Sequence[TransferKey], now: float) -> None:
        """Give the engine batches to one peer while it and our own bounds allow."""
        limit = self._engine.capabilities.max_batches_per_peer
        room = limit - sum(len(self.sendings[key].in_flight) for key in keys)
        for key in keys:
            while room > 0 and self._submit_next(self.sendings[key], self._outboxes[key], now):
                room -= 1

    def _submit_next(self, sending: Sending, outbox: Outbox, now: float) -> bool:
        if sending.error or self._in_flight_bytes >= self._config.max_inflight_bytes:
            return False
        columns = outbox.peek()
        if columns is None:
            return False
        source, target, length = columns
        batch = Batch(
            batch_id=next(self._batch_ids),
            peer=sending.peer,
            source=source,
            target=target,
            length=length,
            timeout_s=min(self._config.transfer_timeout_s, max(0.001, sending.deadline - now)),
        )
        try:
            self._engine.submit(batch)
        except Exception as error:
            # This batch will never be answered, so the fetch must not pass for done.
            logger.exception("a batch to %s could not be submitted", sending.peer)
            sending.stop(f"the engine does not take a batch: {error}")
            return False
        outbox.submitted(batch.batch_id)
        if not sending.in_flight:
            sending.moving_since = now
        total_bytes = batch.total_bytes
        self._batches[batch.batch_id] = sending.key
        sending.in_flight[batch.batch_id] = total_bytes
        self._in_flight_bytes += total_bytes
        self._metrics.inflight_bytes.set(self._in_flight_bytes)
        return True

"""The transfer thread of a worker, with the parts that its role asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

from kvconnect.addresses import RankAddress
from kvconnect.config import ExtraConfig
from kvconnect.decode.decode_side import DecodeSide
from kvconnect.metrics import Metrics, count_error
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.channel import Channel
from kvconnect.prefill.prefill_side import PrefillSide
from kvconnect.transfer.inbound_peers import InboundPeers
from kvconnect.transfer.local import Local
from kvconnect.transfer.orders import Reports
from kvconnect.transfer.timers import Timers
from kvconnect.transfer.transfer_thread import TransferThread

_OTHER_WEIGHTS = Cause.OTHER_WEIGHTS("peer has other weights than those that it was computed with")


class WorkerTransfers(TransferThread):
    """What a worker holds and sends as a producer, what it fetches as a consumer, or both, on one thread.

    Args:
        is_producer: it hands out KV; else ``prefill`` is None, and peers that ask are refused.
        is_consumer: it fetches KV; else ``decode`` is None.
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
        *,
        is_producer: bool = True,
        is_consumer: bool = True,
    ) -> None:
        chance = randomness or random.SystemRandom()
        timers = Timers(lambda error: count_error(metrics, error, "what was due"))
        inbound = self.inbound_peers = InboundPeers(config, local, channel, metrics, timers)
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        if is_producer:
            self.prefill = PrefillSide(config, local, inbound, reports, metrics, chance, timers)
        if is_consumer:
            self.decode = DecodeSide(config, local, channel, reports, metrics, chance, timers)
        parts = [part for part in (self.prefill, self.decode) if part is not None]
        super().__init__(channel, local, metrics, timers, inbound, parts)

    # Called by the owner of the worker, from any thread

    def replace_weights(self, weights: Mapping[str, str]) -> None:
        """Our introduction names other weights from now on: before the orders that are given after this."""

        def replace(now: float) -> None:
            self.local.replace_weights(weights)
            if self.prefill is not None:
                self.prefill.replace_weights(_OTHER_WEIGHTS, now)
            self.inbound_peers.introduce_anew()
            if self.decode is not None:
                self.decode.replace_weights(now)

        self.call(replace)

    def drain(self, drained: Callable[[], None], reason: Reason, drain_s: float) -> None:
        """Begin no lease until ``wake``; ``drained`` is called, on this thread, once none is left."""
        prefill = self.prefill
        self.call(lambda now: prefill.drain(drained, reason, drain_s, now) if prefill else drained())

    def wake(self) -> None:
        """Pages may be read again."""
        prefill = self.prefill
        if prefill is not None:
            self.call(lambda now: prefill.wake())

    def know_ranks(self, directory: Iterable[RankAddress]) -> None:
        """Where all ranks of this node listen, for peers that come before orders bring it."""
        ranks = tuple(directory)
        self.call(lambda now: self.inbound_peers.know_ranks(ranks))

    def state(self) -> dict[str, int]:
        """Counts of what is held and under way. All zero when idle, but for peers."""
        prefill, decode, local = self.prefill, self.decode, self.local
        return {
            **(PrefillSide.NOTHING if prefill is None else prefill.state()),
            **(DecodeSide.NOTHING if decode is None else decode.state()),
            "slots": local.send.taken + local.landing.taken,
            "inbound_peers": len(self.inbound_peers),
        }

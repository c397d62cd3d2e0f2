"""P serves KV by name, of its prefix cache, host memory and disk: lookups of peers, and pins for fetches.

A peer's pin has a lease like any other. What it names may still be evicted: chunks of rows and blocks that
were given away while they were sent are void. A stack is asked to reuse pinned blocks last, which takes until
its next step; a stack that does not step reuses none. Owned by the transfer thread.
"""

from __future__ import annotations

import logging

from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import PIN_PREFIX, FindPrefix, PinPrefix, PrefixFound
from kvconnect.prefill.leases import LeaseBook
from kvconnect.transfer.inbound_peers import InboundPeer
from kvconnect.transfer.parts import TransferContext

logger = logging.getLogger(__name__)

EVICTED = Cause.EVICTED("the prefill node evicted it while it was sent")
TOO_MANY = Cause.BUSY("the prefill node was asked for more names than it looks up for one decode node")
_NOTHING = Cause.NOT_HELD("the prefill node keeps nothing under names for peers")


def not_all(num_tokens: int) -> PeerError:
    """The refusal of a fetch by name whose rows hold other content now, or never held all of it."""
    return PeerError(f"not all of {num_tokens} tokens is kept under these names", Cause.EVICTED)


class KeptFetches:
    """Prefix lookups and pins of peers. ``refusal``: why this node serves no peer now, or None."""

    def __init__(self, context: TransferContext, book: LeaseBook) -> None:
        self._local, self._metrics, self._book = context.local, context.metrics, book
        self._most_leases, self._misused = context.config.max_leases, context.misused
        self._reports = context.reports

    def find(
        self, inbound: InboundPeer, asked: FindPrefix, refusal: Reason | None, now: float
    ) -> PrefixFound:
        """The answer to a prefix lookup; its ``error`` is a refusal, not a lack of the names."""
        kept, refusal = self._local.kept, refusal or inbound.disagrees
        if refusal or kept is None:
            return PrefixFound(asked.number, error=refusal or _NOTHING)
        # Names before ``start_tokens`` are not looked up, and cost nothing.
        num_names = len(asked.prefix.names) - asked.prefix.start_tokens // asked.prefix.naming.tokens
        if not inbound.names.take(max(0, num_names), now):
            return PrefixFound(asked.number, error=TOO_MANY, is_busy=True)
        return PrefixFound(asked.number, *kept.find(asked.prefix, asked.max_tokens))

    def pin(self, inbound: InboundPeer, asked: PinPrefix, refusal: Reason | None, now: float) -> None:
        """Pin the rows of these names under a lease: once per handle, for all ranks of the peer's engine.

        Raises:
            PeerError: the rows cannot be pinned; fetches of the handle are refused with this reason.
        """
        handle, kept = asked.handle, self._local.kept
        if handle in self._book.leases:
            return
        if not handle.startswith(PIN_PREFIX):
            # The handle may be one that this node issued: ending it would void that request.
            text = f"a handle to pin does not begin with {PIN_PREFIX!r}"
            self._misused(inbound, text)
            return
        refusal = refusal or inbound.disagrees
        if refusal or kept is None:
            raise PeerError.of(refusal or _NOTHING)
        if len(self._book.leases) >= self._most_leases:
            raise PeerError(
                f"{len(self._book.leases)} requests are held already, and the prefill node holds no more",
                Cause.BUSY,
            )
        # Only the names of the first ``num_tokens`` tokens are looked up.
        names = min(len(asked.prefix.names), asked.num_tokens // asked.prefix.naming.tokens)
        if not inbound.names.take(names, now):
            raise PeerError.of(TOO_MANY)
        found = kept.hold(asked.prefix, asked.num_tokens)
        if found is None:
            raise not_all(asked.num_tokens)
        self._book.pin(handle, inbound.peer.engine_id, asked.num_tokens, found, now)
        self._metrics.named_leases.labels("device" if found.on_device else "host").inc()
        if found.on_device:
            self._reports.read(block for group in found.groups for block in group.block_ids if block)

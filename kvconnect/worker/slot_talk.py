"""What P and a peer tell each other about the landing slots of a fetch.

A slot is of use only for a chunk that can be packed: what is granted for others is given back, and asked
for once they can be. Where all can be packed when the fetch comes, nothing of this is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.peer.messages import CreditRequest, Grant, Landed
from kvconnect.worker.inbound_peers import InboundPeers
from kvconnect.worker.leases import Sending, TransferKey
from kvconnect.worker.outbox import Arrived
from kvconnect.worker.pending_fetches import PendingFetch, PendingFetches
from kvconnect.worker.sender import Sender


class SlotTalk:
    """The slots of all fetches, those that wait and those that are being served."""

    def __init__(self, sender: Sender, waiting: PendingFetches, inbound_peers: InboundPeers) -> None:
        self._sender = sender
        self._waiting = waiting
        self._peers = inbound_peers

    def waits(self, early: PendingFetch) -> None:
        """A fetch has to wait: its slots are of no use yet."""
        fetch = early.fetch
        if fetch.chunks and not early.has_waited:
            self._peers.tell(early.key, CreditRequest(fetch.transfer_id, 0, _generations(fetch.grants)))

    def want(self, sending: Sending, spared: Sequence[Grant] = ()) -> None:
        """Say for how many chunks slots are of use, and which slots are of none, if that is news."""
        due = self._sender.due(sending.key)
        if spared or due != sending.told_due:
            sending.told_due = due
            self._peers.tell(sending.key, CreditRequest(sending.key[1], due, _generations(spared)))

    def want_more(self) -> None:
        """Say so of all that is sent while it is computed."""
        for sending in self._sender.sendings.values():
            if sending.told_due is not None and not sending.error:
                self.want(sending)

    def granted(self, key: TransferKey, grants: Sequence[Grant]) -> None:
        """A peer lends more slots for a fetch, which may have no use for them yet."""
        sending = self._sender.sendings.get(key)
        if sending is not None:
            spared = self._sender.grant(key, grants)
            if sending.told_due is not None and not sending.error:
                self.want(sending, spared)
        elif self._waiting.has(key):
            self._peers.tell(key, CreditRequest(key[1], 0, _generations(grants)))

    def arrived(self, key: TransferKey, arrived: Arrived) -> None:
        """A chunk lies in its slot."""
        epoch = self._sender.sendings[key].claims.epoch
        self._peers.tell(
            key,
            Landed(key[1], arrived.chunk, arrived.generation, arrived.length_bytes, arrived.digest, epoch),
        )


def _generations(grants: Sequence[Grant]) -> tuple[int, ...]:
    return tuple(grant.generation for grant in grants)

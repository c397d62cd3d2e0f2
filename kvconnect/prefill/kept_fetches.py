"""P serves what it keeps in host memory or on disk: how much there is under some names, and fetches by name.

Nothing is held for a peer that asks. A fetch has a lease of its own that is in no book: rows may change while
they are read, and what was sent of them counts only if they did not. Owned by the transfer thread.
"""

from __future__ import annotations

from kvconnect.cache.identity import MAX_NAMES
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import FindPrefix, PrefixFound
from kvconnect.prefill.leases import Lease
from kvconnect.prefill.pending_fetches import PendingFetch
from kvconnect.transfer.inbound_peers import InboundPeer
from kvconnect.transfer.kept import KeptByName
from kvconnect.transfer.orders import Hold

EVICTED = Cause.EVICTED("it was evicted from host memory while it was sent")
TOO_MANY = Cause.BUSY("it was asked for more names than one peer may have looked up")
_NOTHING = Cause.NOT_HELD("this node keeps nothing under names for peers")


_NAMES_PER_S = 200_000
"""To read and look up those takes about a twentieth of the transfer thread's time, for each cache group."""


class NameAllowance:
    """For how many names one peer is answered: all of a prompt at once, and then so many a second."""

    def __init__(self) -> None:
        self._left, self._looked_at = float(MAX_NAMES), 0.0

    def take(self, names: int, now: float) -> bool:
        """Whether it is answered for so many more."""
        grown = self._left + (now - self._looked_at) * _NAMES_PER_S
        self._left, self._looked_at = min(float(MAX_NAMES), grown), now
        if names > self._left:
            return False
        self._left -= names
        return True


def found_for(
    inbound: InboundPeer,
    names: NameAllowance,
    kept: KeptByName | None,
    asked: FindPrefix,
    refusal: Reason | None,
    now: float,
) -> PrefixFound:
    """The answer to a question, which names why nothing is given where that is not for lack of the names."""
    refusal = refusal or inbound.disagrees
    if kept is None or refusal:
        return PrefixFound(asked.number, error=refusal or _NOTHING)
    # Those before the first that is wanted are not looked up.
    num_names = len(asked.prefix.names) - asked.prefix.start_tokens // asked.prefix.naming.tokens
    if not names.take(max(0, num_names), now):
        return PrefixFound(asked.number, error=TOO_MANY, is_busy=True)
    return PrefixFound(asked.number, *kept.find(asked.prefix, asked.max_tokens))


def lease_by_name(kept: KeptByName | None, early: PendingFetch, epoch: int) -> Lease | None:
    """What a fetch by name is served from; None while that is read from disk.

    Raises:
        PeerError: not all of it is kept, or could be read.
    """
    fetch, lease = early.fetch, early.lease
    assert fetch.prefix is not None
    if kept is None:
        raise PeerError(_NOTHING.text, _NOTHING.cause)
    if lease is None and (found := kept.hold(fetch.prefix, fetch.num_tokens)) is not None:
        num_tokens, name = fetch.num_tokens, f"for {fetch.num_tokens} tokens by name"
        hold = Hold(name, fetch.handle, num_tokens, found.groups, lease_s=0.0, step=0)
        # The peer goes on after these tokens: what only the last of them sees is not kept.
        early.lease = lease = Lease(
            fetch.handle, num_tokens, epoch, hold=hold, is_computed=found.is_ready, kept=found, replay=0
        )
        lease.is_intact = found.is_intact
    if lease is None or not lease.is_intact():
        raise PeerError(f"not all of {fetch.num_tokens} tokens is kept under these names", Cause.EVICTED)
    return lease if lease.is_computed() else None

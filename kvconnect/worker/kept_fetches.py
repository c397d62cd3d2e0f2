"""P serves what it keeps in host memory: how much there is under some names, and fetches by name.

Nothing is held for a peer that asks. A fetch has a lease of its own that is in no book: rows may change while
they are read, and what was sent of them counts only if they did not. Owned by the transfer thread.
"""

from __future__ import annotations

from kvconnect.errors import PeerError
from kvconnect.orders import Hold
from kvconnect.peer.agreement import other_weights
from kvconnect.peer.messages import Fetch, FindPrefix, PrefixFound
from kvconnect.worker.inbound_peers import InboundPeer
from kvconnect.worker.kept import KeptByName
from kvconnect.worker.leases import Lease

EVICTED = "it was evicted from host memory while it was sent"
TOO_MANY = "it was asked for more names than one peer may have looked up"
_NOTHING = "this node keeps nothing under names for peers"


def found_for(
    inbound: InboundPeer, kept: KeptByName | None, asked: FindPrefix, refusal: str, now: float
) -> PrefixFound | None:
    """The answer to a question, which names why nothing is given where that is not for lack of the names."""
    if (peer := inbound.session.peer) is None:
        return None
    refusal = refusal or other_weights(inbound.session.ours.meaning, peer.meaning) or ""
    if kept is None or refusal:
        return PrefixFound(asked.number, 0, 0, refusal or _NOTHING)
    if not inbound.names.take(len(asked.prefix.names), now):
        return PrefixFound(asked.number, 0, 0, TOO_MANY)
    return PrefixFound(asked.number, *kept.find(asked.prefix, asked.max_tokens))


def lease_by_name(kept: KeptByName | None, fetch: Fetch, epoch: int) -> Lease:
    """What a fetch by name is served from.

    Raises:
        PeerError: not all of it is kept.
    """
    assert fetch.prefix is not None
    if kept is None:
        raise PeerError(_NOTHING)
    found = kept.hold(fetch.prefix, fetch.num_tokens)
    if found is None:
        raise PeerError(f"not all of {fetch.num_tokens} tokens is kept under these names")
    num_tokens, name = fetch.num_tokens, f"for {fetch.num_tokens} tokens by name"
    hold = Hold(name, fetch.handle, num_tokens, found.groups, lease_s=0.0, step=0)
    # The peer goes on after these tokens: what only the last of them sees is not kept.
    lease = Lease(fetch.handle, num_tokens, epoch, hold=hold, is_computed=lambda: True)
    lease.replay, lease.is_intact = 0, found.is_intact
    return lease

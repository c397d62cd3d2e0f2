"""When D tells its peers that it will still fetch what they hold for it. Pure; no timer, no socket.

Nothing is renewed while nothing is wanted, nor for a fetch that is served within a fraction of the
lease: the first renewal of a fetch that was asked at once is due a third of the lease later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvconnect.worker.ledger import LegState, Loading

_SHORTEST_S, _LONGEST_S = 0.05, 30.0


def interval_s(lease_s: float) -> float:
    """How often a lease of this length is renewed, whatever a peer says that it is."""
    wanted = lease_s / 3 if math.isfinite(lease_s) and lease_s > 0 else _LONGEST_S
    return min(max(wanted, _SHORTEST_S), _LONGEST_S)


def wants(loading: Loading, rank: int) -> bool:
    """Whether a load still counts on what a rank of its peer holds."""
    if loading.error or not loading.order.handle:
        return False
    leg = loading.legs.get(rank)
    return leg is None or leg.state in (LegState.MEETING, LegState.ASKED)


def plan_first(loading: Loading, lease_s: float, now: float) -> None:
    """Set when a load of a peer that was met is renewed first: now, unless it was asked for already."""
    if loading.renew_at == math.inf:
        asked = loading.legs and all(leg.state is not LegState.MEETING for leg in loading.legs.values())
        loading.renew_at = now + interval_s(lease_s) if asked else now


def take_due(loads: Iterable[Loading], lease_s: float, now: float) -> list[Loading]:
    """The loads of one peer to renew now: all that are due soon, if one is due."""
    pending = [loading for loading in loads if not loading.error and loading.order.handle]
    if not any(now >= loading.renew_at for loading in pending):
        return []
    every = interval_s(lease_s)
    due = [loading for loading in pending if now + every / 2 >= loading.renew_at]
    for loading in due:
        loading.renew_at = now + every
    return due

"""When D renews what its peers hold for it.

From the moment that the scheduler half knows a request. All handles of one peer share a message, and a rank
gets at most one a second, or three to a lease where that is shorter; what is loaded within it costs none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.orders import Await
from kvconnect.peer.messages import MAX_HANDLES, Renew, Renewed
from kvconnect.worker.loads import LoadRecord, PeerKey
from kvconnect.worker.peers import Peer, Peers, RankLink

_SHORTEST_S, _LONGEST_S = 0.05, 30.0
_PACE_S = 1.0
"""How long renewals of new handles are put off, to share a message; and how often a peer is tried."""


@dataclass(eq=False)
class Awaited:
    """D's record of a handle that a request may load under, once it gets blocks.

    ``epochs`` and ``renew_at`` are those of the load that follows, and with ``error`` it fails at once.
    ``reports`` until the scheduler half, which asked for it, was notified that the handle is settled.
    """

    handle: str
    peer: PeerKey
    since: float
    renew_at: float = math.inf
    epochs: dict[int, int] = field(default_factory=dict)
    error: str = ""
    reports: bool = False
    is_to_ask = True

    def counts_on(self, rank: int) -> bool:
        """See ``LoadRecord``."""
        return not self.error

    def is_to_ask_of(self, rank: int) -> bool:
        """See ``LoadRecord``."""
        return True

    def fail(self, reason: str) -> None:
        """Nothing can be loaded under it. The first reason counts."""
        self.error = self.error or reason


Renewable = Awaited | LoadRecord


def interval_s(lease_s: float) -> float:
    """How often a lease of this length is renewed: within bounds, since a peer states it."""
    wanted = lease_s / 3 if math.isfinite(lease_s) and lease_s > 0 else _LONGEST_S
    return min(max(wanted, _SHORTEST_S), _LONGEST_S)


class Renewals:
    """What this node counts on at its peers: handles that requests wait for, and loads under way.

    ``settled`` is called once with each awaited handle that was to be reported.
    """

    def __init__(
        self,
        config: ExtraConfig,
        peers: Peers,
        loads: Mapping[str, LoadRecord],
        metrics: Metrics,
        settled: Callable[[str], None],
    ) -> None:
        self.awaited: dict[str, Awaited] = {}
        self._config = config
        self._peers = peers
        self._loads = loads
        self._metrics = metrics
        self._settled = settled
        self._unplanned: list[Renewable] = []
        self._just_met: set[PeerKey] = set()
        self._look_at = math.inf

    def keep(self, order: Await, key: PeerKey, now: float) -> None:
        """A request waits that may load under a handle."""
        awaited = self.awaited.get(order.handle)
        if awaited is None:
            awaited = self.awaited[order.handle] = Awaited(order.handle, key, now)
            self._reach(awaited, now)
            self._unplanned.append(awaited)
        if order.reports:
            awaited.reports = True
            awaited.renew_at = self._look_at = now
            self._report_if_settled(awaited)

    def end(self, handle: str) -> Awaited | None:
        """It is loaded, or let go."""
        return self.awaited.pop(handle, None)

    def load(self, load: LoadRecord) -> None:
        """A load begins, with what is known of its handle."""
        if not load.handle:
            return
        awaited = self.end(load.handle)
        if awaited is not None and awaited.peer == load.peer:
            load.epochs, load.renew_at = awaited.epochs, awaited.renew_at
            if awaited.error:
                load.fail(awaited.error)
        self._unplanned.append(load)

    def peers_in_use(self) -> set[PeerKey]:
        """Peers of loads, and those that are asked about what requests wait for."""
        return self._asked() | {load.peer for load in self._loads.values()}

    def owed(self) -> set[str]:
        """Connections over which a peer owes an answer about what requests wait for."""
        known = (self._peers.peers[key] for key in self._asked() if key in self._peers.peers)
        return {link.name for peer in known for link in peer.links.values()}

    def met(self, key: PeerKey, now: float) -> None:
        """A peer was met: what it holds was not renewed for a while."""
        self._just_met.add(key)
        for wanted in self._all():
            if wanted.peer == key:
                wanted.renew_at = math.inf
                self._unplanned.append(wanted)
        self._look_at = now

    def failed(self, key: PeerKey, reason: str) -> None:
        """A peer is out of reach, or unusable: what it does not hold yet, and is asked for, is lost."""
        for awaited in self.awaited.values():
            if awaited.peer == key and awaited.reports:
                awaited.fail(reason)
                self._report_if_settled(awaited)

    def next_deadline(self) -> float:
        """The time by which ``advance`` has something to do; endless for never."""
        return self._look_at

    def advance(self, now: float) -> None:
        """Have peers hold what is due."""
        for wanted in self._unplanned:
            self._plan_first(wanted, now)
            # A load of a peer that is not known yet is planned with when it is met.
            self._look_at = min(self._look_at, wanted.renew_at)
        self._unplanned.clear()
        self._just_met.clear()
        if now < self._look_at:
            return
        self._give_up(now)
        by_peer: dict[PeerKey, list[Renewable]] = {}
        for wanted in self._all():
            by_peer.setdefault(wanted.peer, []).append(wanted)
        for key, pending in by_peer.items():
            peer = self._peers.peers.get(key)
            if peer is None or not peer.is_ready:
                self._try(key, pending, now)
            elif due := _take_due(pending, interval_s(peer.lease_s), now):
                peer.renewed_at = peer.used_at = now
                for rank in peer.partners:
                    self._renew_at_rank(peer, rank, due, now)
        self._look_at = min((wanted.renew_at for wanted in self._all()), default=math.inf)

    def _plan_first(self, wanted: Renewable, now: float) -> None:
        """Set when something is renewed first: at once what its peer was asked for before it was met."""
        peer = self._peers.peers.get(wanted.peer)
        if peer is None or not peer.is_ready:
            if isinstance(wanted, Awaited):
                wanted.renew_at = min(wanted.renew_at, now + _PACE_S)
        elif wanted.renew_at == math.inf:
            every = interval_s(peer.lease_s)
            soon = now if wanted.peer in self._just_met else max(now, peer.renewed_at) + min(_PACE_S, every)
            wanted.renew_at = soon if wanted.is_to_ask else now + every

    def renewed(self, link: RankLink, renewed: Renewed, now: float) -> None:
        """A peer reports what it still holds. What it was asked for already it answers for by itself."""
        rank = link.rank
        found: dict[str, Renewable] = {
            wanted.handle: wanted
            for wanted in self._all()
            if wanted.peer == link.peer.key and wanted.counts_on(rank) and wanted.is_to_ask_of(rank)
        }
        for handle, epoch in renewed.epochs:
            if handle in found and found[handle].epochs.setdefault(rank, epoch) != epoch:
                self._metrics.failures.labels("epoch").inc()
                found[handle].fail("the peer holds something else under this handle than before")
        for handle, reason in renewed.over:
            if handle in found:
                self._metrics.failures.labels("lease_over").inc()
                found[handle].fail(reason)
        for handle in renewed.unknown:
            # A load asks by itself, and is answered.
            if isinstance(wanted := found.get(handle), Awaited):
                self._not_held_yet(wanted, now)
        for wanted in found.values():
            self._report_if_settled(wanted)

    def _not_held_yet(self, awaited: Awaited, now: float) -> None:
        until = awaited.since + self._config.early_fetch_s
        if now >= until:
            self._metrics.failures.labels("lease_over").inc()
            awaited.fail("no request is held under this handle")
        else:
            awaited.renew_at = min(awaited.renew_at, max(until, now + _PACE_S))
            self._look_at = min(self._look_at, awaited.renew_at)

    def _asked(self) -> set[PeerKey]:
        return {awaited.peer for awaited in self.awaited.values() if awaited.reports}

    def _all(self) -> Iterator[Renewable]:
        """Everything that is not lost."""
        for records in (self.awaited, self._loads):
            for wanted in records.values():
                if wanted.handle and not wanted.error:
                    yield wanted

    def _report_if_settled(self, wanted: Renewable) -> None:
        """The peer holds it, which its ranks begin all at once, or never will."""
        if isinstance(wanted, Awaited) and wanted.reports and (wanted.epochs or wanted.error):
            wanted.reports = False
            self._settled(wanted.handle)

    def _give_up(self, now: float) -> None:
        """A peer that is alive may never report what becomes of a handle."""
        longest_s = self._config.lease_max_s
        for awaited in self.awaited.values():
            if awaited.reports and now >= awaited.since + longest_s:
                awaited.fail(f"it was not held within {longest_s} s, which is lease_max_s")
                self._report_if_settled(awaited)

    def _reach(self, awaited: Awaited, now: float) -> None:
        # What only waits makes no more connections than may be remembered; what is asked for is like a load.
        if awaited.reports or awaited.peer in self._peers.peers or len(self._peers) < self._config.max_peers:
            self._peers.reach(awaited.peer, now)

    def _try(self, key: PeerKey, pending: Iterable[Renewable], now: float) -> None:
        """Meet a peer that requests wait for."""
        for wanted in pending:
            if isinstance(wanted, Awaited):
                wanted.renew_at = now + _PACE_S
                self._reach(wanted, now)
            else:
                # It meets its peer itself.
                wanted.renew_at = math.inf
        if reason := self._peers.refusal(key, now):
            self.failed(key, reason)

    def _renew_at_rank(self, peer: Peer, rank: int, due: Iterable[Renewable], now: float) -> None:
        link = self._peers.connect_rank(peer, rank, now)
        handles = tuple(dict.fromkeys(wanted.handle for wanted in due if wanted.counts_on(rank)))
        if link is not None and handles:
            self._peers.send(link.name, Renew(handles))


def _take_due(pending: Iterable[Renewable], every: float, now: float) -> list[Renewable]:
    """What of one peer is to be renewed now: all that is due soon, if anything is due."""
    first = sorted(pending, key=lambda wanted: wanted.renew_at)[:MAX_HANDLES]
    if not first or now < first[0].renew_at:
        return []
    # What is left out is not due before the pace allows another message.
    soon = now + max(every / 2, min(_PACE_S, every))
    due = [wanted for wanted in first if wanted.renew_at <= soon]
    for wanted in due:
        wanted.renew_at = now + every
    return due

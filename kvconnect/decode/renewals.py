"""When D renews the leases that its peers hold for it, from the arrival of a request to its load's end.

One message renews all handles of a peer. A rank receives at most one a second, or three per lease where the
lease is shorter; a request that is loaded within that time causes none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvconnect.decode.loads import OTHER_EPOCH, LoadRecord, PeerKey
from kvconnect.decode.peers import Peer, Peers, RankLink
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import MAX_HANDLES, Renew, Renewed
from kvconnect.transfer.orders import Await
from kvconnect.transfer.params import NO_REQUEST
from kvconnect.transfer.parts import Timer, TransferContext

_SHORTEST_S, _LONGEST_S = 0.05, 30.0
_PACE_S = 1.0
"""Seconds that renewals of new handles wait, to share a message; and between two tries to reach a peer."""


@dataclass(eq=False)
class Awaited:
    """D's record of a handle that a request may load under, once the request gets blocks.

    ``epochs``, ``renew_at``: passed on to the load that follows, which fails at once with ``error``.
    ``reports``: the scheduler half is to be informed when the handle is settled, and was not yet.
    """

    handle: str
    peer: PeerKey
    since: float
    renew_at: float = math.inf
    epochs: dict[int, int] = field(default_factory=dict)
    error: Reason | None = None
    reports: bool = False
    is_to_ask = True

    def counts_on(self, rank: int) -> bool:
        """See ``LoadRecord``."""
        return not self.error

    def is_to_ask_of(self, rank: int) -> bool:
        """See ``LoadRecord``."""
        return True

    def fail(self, reason: Reason) -> None:
        """Mark the handle as void. The first reason counts."""
        self.error = self.error or reason


Renewable = Awaited | LoadRecord


def interval_s(lease_s: float) -> float:
    """Seconds between renewals of a lease of this length, bounded, since a peer states the length."""
    wanted = lease_s / 3 if math.isfinite(lease_s) and lease_s > 0 else _LONGEST_S
    return min(max(wanted, _SHORTEST_S), _LONGEST_S)


@dataclass(eq=False)
class _Account:
    """The leases of one peer."""

    key: PeerKey
    timer: Timer
    kept: dict[Renewable, None] = field(default_factory=dict)

    def wanted(self) -> Iterator[Renewable]:
        """The handles and loads that have not failed."""
        return (wanted for wanted in self.kept if not wanted.error)


class Renewals:
    """The leases that D needs at its peers: of awaited handles, and of loads under way.

    Each awaited handle with ``reports`` is reported as settled exactly once.
    """

    def __init__(self, context: TransferContext, peers: Peers) -> None:
        self.awaited: dict[str, Awaited] = {}
        self._config, self._timers, self._peers = context.config, context.timers, peers
        self._settled = context.reports.settled
        self._accounts: dict[PeerKey, _Account] = {}
        self._unplanned: list[Renewable] = []
        self._just_met: set[PeerKey] = set()

    def keep(self, order: Await, key: PeerKey, now: float) -> None:
        """Keep the lease of a handle that a waiting request may load under."""
        awaited = self.awaited.get(order.handle)
        if awaited is None:
            awaited = self.awaited[order.handle] = Awaited(order.handle, key, now)
            self._reach(awaited, now)
            self._add(awaited)
        if order.reports and not awaited.reports:
            awaited.reports = True
            awaited.renew_at = now
            self._accounts[awaited.peer].timer.at(now)
            self._report_if_settled(awaited)

    def end(self, handle: str) -> Awaited | None:
        """Stop awaiting a handle, which is loaded or released."""
        awaited = self.awaited.pop(handle, None)
        if awaited is not None:
            self._remove(awaited)
        return awaited

    def load(self, load: LoadRecord) -> None:
        """A load begins: it takes over the epochs and the error of its awaited handle."""
        if not load.handle:
            return
        awaited = self.end(load.handle)
        if awaited is not None and awaited.peer == load.peer:
            load.epochs, load.renew_at = awaited.epochs, awaited.renew_at
            if awaited.error:
                load.fail(awaited.error)
        self._add(load)

    def loaded(self, load: LoadRecord) -> None:
        """A load has ended: renew its lease no more."""
        if load.handle:
            self._remove(load)

    def _add(self, wanted: Renewable) -> None:
        account = self._accounts.get(wanted.peer) or self._open(wanted.peer)
        account.kept[wanted] = None
        self._unplanned.append(wanted)

    def _open(self, key: PeerKey) -> _Account:
        account = _Account(key, self._timers.timer(lambda now: self._renew(account, now)))
        self._accounts[key] = account
        return account

    def _remove(self, wanted: Renewable) -> None:
        account = self._accounts[wanted.peer]
        del account.kept[wanted]
        if not account.kept:
            account.timer.cancel()
            del self._accounts[wanted.peer]

    def peers_in_use(self) -> set[PeerKey]:
        """Peers with handles that are to be reported once settled."""
        return {awaited.peer for awaited in self.awaited.values() if awaited.reports}

    def met(self, key: PeerKey) -> None:
        """A peer was met: renew its leases at once, as none was renewed for a while."""
        self._just_met.add(key)
        account = self._accounts.get(key)
        for wanted in account.wanted() if account is not None else ():
            wanted.renew_at = math.inf
            self._unplanned.append(wanted)

    def failed(self, key: PeerKey, reason: Reason) -> None:
        """A peer is out of reach or unusable: fail its awaited handles that are to be reported."""
        account = self._accounts.get(key)
        for awaited in list(account.kept) if account is not None else ():
            if isinstance(awaited, Awaited) and awaited.reports:
                awaited.fail(reason)
                self._report_if_settled(awaited)

    def plan(self, now: float) -> None:
        """At the end of a turn, set the first renewal of new handles and loads, if not loaded within it."""
        for wanted in self._unplanned:
            account = self._accounts.get(wanted.peer)
            if account is not None and wanted in account.kept:
                self._plan_first(wanted, now)
                # A load of a peer not met yet is planned when the peer is met.
                account.timer.by(wanted.renew_at)
        self._unplanned.clear()
        self._just_met.clear()

    def _renew(self, account: _Account, now: float) -> None:
        """Renew a peer's leases that are due."""
        self._give_up(account, now)
        pending = list(account.wanted())
        peer = self._peers.peers.get(account.key)
        if peer is None or not peer.is_ready:
            self._try(account.key, pending, now)
        elif due := _take_due(pending, interval_s(peer.lease_s), now):
            peer.renewed_at = peer.used_at = now
            for rank in peer.partners:
                self._renew_at_rank(peer, rank, due, now)
        account.timer.by(min((wanted.renew_at for wanted in account.wanted()), default=math.inf))

    def _plan_first(self, wanted: Renewable, now: float) -> None:
        """Set the time of a first renewal: at once if the request was there before its peer was met."""
        peer = self._peers.peers.get(wanted.peer)
        if peer is None or not peer.is_ready:
            if isinstance(wanted, Awaited):
                wanted.renew_at = min(wanted.renew_at, now + _PACE_S)
        elif wanted.renew_at == math.inf:
            every = interval_s(peer.lease_s)
            soon = now if wanted.peer in self._just_met else max(now, peer.renewed_at) + min(_PACE_S, every)
            wanted.renew_at = soon if wanted.is_to_ask else now + every

    def renewed(self, link: RankLink, renewed: Renewed, now: float) -> None:
        """Take a peer's answer to a renewal; fetches already sent to it are answered separately."""
        rank, account = link.rank, self._accounts.get(link.peer.key)
        if account is None:
            return
        found: dict[str, Renewable] = {
            wanted.handle: wanted
            for wanted in account.wanted()
            if wanted.counts_on(rank) and wanted.is_to_ask_of(rank)
        }
        for handle, epoch in renewed.epochs:
            if handle in found and found[handle].epochs.setdefault(rank, epoch) != epoch:
                found[handle].fail(OTHER_EPOCH)
        for handle, reason in renewed.over:
            if handle in found:
                found[handle].fail(reason)
        for handle in renewed.unknown:
            # A load sends its own fetch, and P answers that.
            if isinstance(wanted := found.get(handle), Awaited):
                self._not_held_yet(wanted, now)
        for wanted in found.values():
            self._report_if_settled(wanted)

    def _not_held_yet(self, awaited: Awaited, now: float) -> None:
        until = awaited.since + self._config.early_fetch_s
        if now >= until:
            awaited.fail(Cause.NOT_HELD(NO_REQUEST))
        else:
            awaited.renew_at = min(awaited.renew_at, max(until, now + _PACE_S))
            self._accounts[awaited.peer].timer.by(awaited.renew_at)

    def _report_if_settled(self, wanted: Renewable) -> None:
        """Report an awaited handle if it is settled: one rank holds it, as all do then, or none ever will."""
        if isinstance(wanted, Awaited) and wanted.reports and (wanted.epochs or wanted.error):
            wanted.reports = False
            self._settled(wanted.handle)

    def _give_up(self, account: _Account, now: float) -> None:
        """Fail handles that a live peer has not settled within ``lease_max_s``."""
        longest_s = self._config.lease_max_s
        for awaited in account.kept:
            if isinstance(awaited, Awaited) and awaited.reports and now >= awaited.since + longest_s:
                text = f"its prefill was not complete within {longest_s:g} s, which is lease_max_s"
                awaited.fail(Cause.TIMEOUT(text))
                self._report_if_settled(awaited)

    def _reach(self, awaited: Awaited, now: float) -> None:
        # A handle that only waits opens no connection beyond ``max_peers``; one with ``reports`` does, as a
        # load.
        if awaited.reports or awaited.peer in self._peers.peers or len(self._peers) < self._config.max_peers:
            self._peers.reach(awaited.peer, now)

    def _try(self, key: PeerKey, pending: Iterable[Renewable], now: float) -> None:
        """Try to meet a peer that requests wait for."""
        for wanted in pending:
            if isinstance(wanted, Awaited):
                wanted.renew_at = now + _PACE_S
                self._reach(wanted, now)
            else:
                # A load meets its peer itself.
                wanted.renew_at = math.inf
        if reason := self._peers.refusal(key, now):
            self.failed(key, reason)

    def _renew_at_rank(self, peer: Peer, rank: int, due: Iterable[Renewable], now: float) -> None:
        link = self._peers.connect_rank(peer, rank, now)
        handles = tuple(dict.fromkeys(wanted.handle for wanted in due if wanted.counts_on(rank)))
        if link is not None and handles:
            self._peers.send(link.name, Renew(handles))


def _take_due(pending: Iterable[Renewable], every: float, now: float) -> list[Renewable]:
    """A peer's leases to be renewed now: all that are due soon, if any is due."""
    first = sorted(pending, key=lambda wanted: wanted.renew_at)[:MAX_HANDLES]
    if not first or now < first[0].renew_at:
        return []
    # A lease left out is due no sooner than the pace allows the next message.
    soon = now + max(every / 2, min(_PACE_S, every))
    due = [wanted for wanted in first if wanted.renew_at <= soon]
    for wanted in due:
        wanted.renew_at = now + every
    return due

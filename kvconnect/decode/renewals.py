"""When D renews the leases that its peers hold for it, from the arrival of a request to its load's end.

One message renews all handles of a peer, and each peer has one timer. A rank receives at most one message a
second, or three per lease where the lease is shorter; a request that is loaded within that time causes none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvconnect.decode.loads import OTHER_EPOCH, LoadRecord
from kvconnect.decode.peers import Peers, RankLink
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import MAX_HANDLES, Renew, Renewed
from kvconnect.transfer.orders import Await, PeerKey
from kvconnect.transfer.params import NO_REQUEST
from kvconnect.transfer.parts import Timer, TransferContext

_SHORTEST_S, _LONGEST_S = 0.05, 30.0
_PACE_S = 1.0
"""Seconds that renewals of new handles wait, to share a message; and between two tries to reach a peer."""


@dataclass(eq=False)
class Awaited:
    """D's record of a handle that a request may load under, once the request gets blocks.

    ``epochs``: passed on to the load that follows, which fails at once with ``error``. ``reports``: the
    scheduler half is to be informed when the handle is settled, and was not yet.
    """

    handle: str
    peer: PeerKey
    since: float
    epochs: dict[int, int] = field(default_factory=dict)
    error: Reason | None = None
    reports: bool = False

    def counts_on(self, rank: int) -> bool:
        """See ``LoadRecord``."""
        return not self.error

    is_to_ask_of = counts_on

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
    """The leases of one peer: ``kept`` has when each was renewed, minus infinity if it is to be renewed next.

    ``timer`` fires when the next message is due, or the next try to reach the peer.
    """

    key: PeerKey
    timer: Timer
    kept: dict[Renewable, float] = field(default_factory=dict)

    def wanted(self) -> list[Renewable]:
        """The handles and loads that have not failed."""
        return [wanted for wanted in self.kept if not wanted.error]


class Renewals:
    """The leases that D needs at its peers: of awaited handles, and of loads under way.

    Each awaited handle with ``reports`` is reported as settled exactly once.
    """

    def __init__(self, context: TransferContext, peers: Peers) -> None:
        self.awaited: dict[str, Awaited] = {}
        self._config, self._timers, self._peers = context.config, context.timers, peers
        self._settled = context.reports.settled
        self._accounts: dict[PeerKey, _Account] = {}

    def keep(self, order: Await, now: float) -> None:
        """Keep the lease of a handle that a waiting request may load under."""
        awaited = self.awaited.get(order.handle)
        if awaited is None:
            awaited = self.awaited[order.handle] = Awaited(order.handle, order.peer, now)
            self._add(awaited, now)
        if order.reports and not awaited.reports:
            awaited.reports = True
            self._ask_again(awaited, now)
            self._report_if_settled(awaited)

    def end(self, handle: str) -> Awaited | None:
        """Stop awaiting a handle, which is loaded or released."""
        awaited = self.awaited.pop(handle, None)
        if awaited is not None:
            self._remove(awaited)
        return awaited

    def load(self, load: LoadRecord, now: float) -> None:
        """A load begins: it takes over the epochs and the error of its awaited handle."""
        if not load.handle:
            return
        awaited = self.end(load.handle)
        if awaited is not None and awaited.peer == load.peer:
            load.epochs = awaited.epochs
            if awaited.error:
                load.fail(awaited.error)
        self._add(load, now)

    def loaded(self, load: LoadRecord) -> None:
        """A load has ended: renew its lease no more."""
        if load.handle:
            self._remove(load)

    def _add(self, wanted: Renewable, now: float) -> None:
        account = self._accounts.get(wanted.peer) or self._open(wanted.peer)
        account.kept[wanted] = -math.inf
        peer = self._peers.find(wanted.peer)
        is_met = peer is not None and peer.is_ready
        # A load meets its peer itself.
        wait_s = min(_PACE_S, interval_s(peer.lease_s if peer is not None else 0.0))
        account.timer.by(now + wait_s if is_met or isinstance(wanted, LoadRecord) else now)

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

    def _ask_again(self, awaited: Awaited, when: float) -> None:
        account = self._accounts[awaited.peer]
        account.kept[awaited] = -math.inf
        account.timer.by(when)

    def peers_in_use(self) -> set[PeerKey]:
        """Peers with handles that are to be reported once settled."""
        return {awaited.peer for awaited in self.awaited.values() if awaited.reports}

    def met(self, key: PeerKey, now: float) -> None:
        """A peer was met: renew its leases, as none was renewed for a while; at once if requests wait."""
        account = self._accounts.get(key)
        if account is not None:
            account.kept = dict.fromkeys(account.kept, -math.inf)
            has_waiting = any(isinstance(wanted, Awaited) for wanted in account.kept)
            account.timer.by(now if has_waiting else now + _PACE_S)

    def failed(self, key: PeerKey, reason: Reason) -> None:
        """A peer is out of reach or unusable: fail its awaited handles that are to be reported."""
        if (account := self._accounts.get(key)) is not None:
            self._give_up(account, reason)

    def _renew(self, account: _Account, now: float) -> None:
        """Renew a peer's leases, but those renewed lately; or try to meet the peer."""
        longest_s = self._config.lease_max_s
        text = f"its prefill was not complete within {longest_s:g} s, which is lease_max_s"
        self._give_up(account, Cause.TIMEOUT(text), now - longest_s)
        wanted, peer, wait_s = account.wanted(), self._peers.find(account.key), _PACE_S
        if not wanted:
            return
        if peer is None or not peer.is_ready:
            # Handles that only wait open no connection beyond ``max_peers``; those to be reported do.
            is_reported = any(isinstance(one, Awaited) and one.reports for one in wanted)
            if peer is not None or is_reported or len(self._peers) < self._config.max_peers:
                self._peers.reach(account.key, now)
            if reason := self._peers.refusal(account.key, now):
                self._give_up(account, reason)
        else:
            every = interval_s(peer.lease_s)
            due = [one for one in wanted if account.kept[one] <= now - every / 2][:MAX_HANDLES]
            wait_s = every if len(due) < MAX_HANDLES else min(_PACE_S, every)
            account.kept.update(dict.fromkeys(due, now))
            peer.used_at = now
            for rank in peer.partners:
                link = self._peers.connect_rank(peer, rank, now)
                handles = tuple(dict.fromkeys(one.handle for one in due if one.counts_on(rank)))
                if link is not None and handles:
                    self._peers.send(link.name, Renew(handles))
        account.timer.by(now + wait_s)

    def renewed(self, link: RankLink, renewed: Renewed, now: float) -> None:
        """Take a peer's answer to a renewal; fetches already sent to it are answered separately."""
        rank, account = link.rank, self._accounts.get(link.peer.key)
        if account is None:
            return
        found = {wanted.handle: wanted for wanted in account.wanted() if wanted.is_to_ask_of(rank)}
        for handle, epoch in renewed.epochs:
            if handle in found and found[handle].epochs.setdefault(rank, epoch) != epoch:
                found[handle].fail(OTHER_EPOCH)
        for handle, reason in renewed.over:
            if handle in found:
                found[handle].fail(reason)
        for handle in renewed.unknown:
            # A load sends its own fetch, and P answers that.
            if isinstance(wanted := found.get(handle), Awaited):
                until = wanted.since + self._config.early_fetch_s
                if now >= until:
                    wanted.fail(Cause.NOT_HELD(NO_REQUEST))
                else:
                    self._ask_again(wanted, max(until, now + _PACE_S))
        for wanted in found.values():
            self._report_if_settled(wanted)

    def _report_if_settled(self, wanted: Renewable) -> None:
        """Report an awaited handle if it is settled: one rank holds it, as all do then, or none ever will."""
        if isinstance(wanted, Awaited) and wanted.reports and (wanted.epochs or wanted.error):
            wanted.reports = False
            self._settled(wanted.handle)

    def _give_up(self, account: _Account, reason: Reason, until: float = math.inf) -> None:
        """Fail the handles that are to be reported and were awaited by the time ``until``."""
        for awaited in account.wanted():
            if isinstance(awaited, Awaited) and awaited.reports and awaited.since <= until:
                awaited.fail(reason)
                self._report_if_settled(awaited)

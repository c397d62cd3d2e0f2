"""D's prefix lookups at peers, before it pulls: how much of a prefix a peer keeps under names.

D's rank 0 asks one rank of a peer for all ranks, which keep the same. A peer measures its link to D at the
first lookup: without the rate D cannot decide whether a load pays. Owned by the transfer thread.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from kvconnect.cache.identity import Prefix
from kvconnect.decode.peers import FetchPath, Peers, RankLink
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import FindPrefix, PrefixFound
from kvconnect.transfer.orders import Find, Found, PeerKey, Results
from kvconnect.transfer.parts import TransferContext

logger = logging.getLogger(__name__)

_RATE_SHARE = 1 / 16
"""The share of ``find_s`` that an answer waits for the link's rate; a useful link has one by then."""


@dataclass(eq=False)
class _Asked:
    """A lookup under way. ``link``: the connection that carried it, empty until the peer is met.

    ``answer``: the peer's answer, which waits for the rate of the link.
    """

    order: Find
    deadline: float
    link: str = ""
    answer: PrefixFound | None = None


class Finds:
    """Lookups without an answer yet. Each one's result is reported exactly once.

    ``path`` returns the cutter and packer of a connection, or why the caches do not fit: then D does not ask.
    """

    def __init__(
        self, context: TransferContext, peers: Peers, path: Callable[[RankLink], FetchPath | str]
    ) -> None:
        self._config, self._reports, self._misused = context.config, context.reports, context.misused
        self._peers, self._path = peers, path
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._timer = context.timers.timer(lambda now: self.changed())
        self.has_changed = False
        """A lookup may be able to continue."""

    def __len__(self) -> int:
        return len(self._asked)

    def peers_in_use(self) -> set[PeerKey]:
        """The peers of all lookups under way."""
        return {asked.order.peer for asked in self._asked.values()}

    def ask(self, order: Find, now: float) -> None:
        """Begin a lookup; the peer is asked once it is met."""
        self._asked[next(self._numbers)] = _Asked(order, now + self._config.find_s)
        self._peers.reach(order.peer, now)
        self.changed()

    def changed(self) -> None:
        """Look at all lookups again: a peer was met or lost, or its link was measured."""
        self.has_changed = True

    def advance(self, now: float) -> None:
        """Ask the peers that were met meanwhile, and end the lookups that are late."""
        self.has_changed = False
        for number, asked in list(self._asked.items()):
            if asked.answer is not None:
                self._conclude(number, asked.answer, self._peers.links[asked.link], now >= asked.deadline)
            elif now >= asked.deadline:
                late = f"it did not answer a lookup within {self._config.find_s:g} s"
                self._end(number, Cause.TIMEOUT(late))
            elif not asked.link:
                self._try(number, asked, now)
        self._timer.at(min((asked.deadline for asked in self._asked.values()), default=math.inf))

    def met(self, link: RankLink, now: float) -> None:
        """A peer's rank has introduced itself: if D will ask it, have it measure its link before."""
        peer, theirs = link.peer, link.session.peer
        if theirs is None or theirs.naming is None or not peer.is_warm or link.found is not None:
            return
        if link.rank == 0:
            for rank in peer.partners:
                self._peers.connect_rank(peer, rank, now)
        if link.rank in peer.partners:
            self._peers.send(link.name, FindPrefix(0, Prefix(theirs.naming, 0, ()), 0))

    def answered(self, link: RankLink, message: PrefixFound, now: float) -> None:
        """Take a peer's answer. A late answer is ignored, and is no fault of the peer."""
        asked = self._asked.get(message.number)
        if asked is None or asked.link != link.name:
            return
        problem = _problem(message, asked.order.prefix, asked.order.max_tokens)
        if problem:
            self._misused(link, problem)
        error = Cause.PROTOCOL(problem) if problem else message.error
        if error or max(message.num_tokens, message.disk_tokens) <= asked.order.prefix.start_tokens:
            self._end(message.number, error, is_busy=message.is_busy)
        else:
            asked.answer = message
            asked.deadline = min(asked.deadline, now + _RATE_SHARE * self._config.find_s)
            self.changed()

    def lost(self, link: str, reason: Reason) -> None:
        """A connection has ended: end the lookups that it carried, with this reason."""
        for number in [number for number, asked in self._asked.items() if asked.link == link]:
            self._end(number, reason)

    def _try(self, number: int, asked: _Asked, now: float) -> None:
        peer, order = self._peers.reach(asked.order.peer, now), asked.order
        if reason := peer.refusal(now):
            self._end(number, reason)
        elif peer.is_ready and (theirs := peer.links[0].session.peer) is not None:
            if theirs.naming != order.prefix.naming:
                # A peer without a naming keeps nothing for others: that is a result, too.
                self._report(number, Found(order.request_id, naming=theirs.naming))
                return
            path = self._path(peer.links[0])
            if isinstance(path, str):
                self._end(number, Cause.OTHER_LAYOUT(path))
                return
            asked.link = peer.links[0].name
            self._peers.send(asked.link, FindPrefix(number, order.prefix, order.max_tokens))

    def _conclude(self, number: int, answer: PrefixFound, link: RankLink, is_late: bool) -> None:
        """Report an answer, with how long the load takes, once the link's rate is known or is late."""
        if link.found is None and not is_late:
            return
        rate = link.found.bytes_per_s if link.found is not None else 0.0
        if not rate:
            logger.info("nothing is loaded by name from %s: its link is not measured yet", link)
        # All ranks of a peer send at the same time, each to every rank of D that fetches from it.
        num_ranks = len(link.peer.partners)
        here_s, disk_s = (
            total_bytes * num_ranks / rate if rate else math.inf
            for total_bytes in (answer.total_bytes, answer.disk_bytes)
        )
        # The peer reads rows from disk before it sends any of them.
        counts = answer.num_tokens, here_s, answer.disk_tokens, disk_s + answer.disk_s
        self._report(number, Found(self._asked[number].order.request_id, *counts, error=link.refusal))

    def _end(self, number: int, error: Reason | None, *, is_busy: bool = False) -> None:
        self._report(number, Found(self._asked[number].order.request_id, error=error, is_busy=is_busy))

    def _report(self, number: int, found: Found) -> None:
        del self._asked[number]
        self._reports.add(Results(found=(found,)))


def _problem(found: PrefixFound, prefix: Prefix, max_tokens: int) -> str:
    """Why an answer is impossible; empty if it is not."""
    tokens = prefix.naming.tokens
    most = min(max_tokens, len(prefix.names) * tokens)
    for count in (found.num_tokens, found.disk_tokens):
        if count > most or count % tokens:
            return f"it reports {count} kept tokens, of at most {most} by names of {tokens} each"
    return "" if 0 <= found.disk_s < math.inf else f"it reports to read its disk in {found.disk_s} s"

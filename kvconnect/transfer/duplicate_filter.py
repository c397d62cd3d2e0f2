"""Which failures of a peer are logged: the first of each cause, until a success with that peer."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable

from kvconnect.outcome import Cause, Reason

logger = logging.getLogger(__name__)

_MOST_PEERS = 4096
_OUT_OF_REACH = {Cause.LOST: Cause.OUT_OF_REACH}
"""A lost peer that does not answer any more is one cause."""


class DuplicateFilter:
    """The causes that were logged of each peer, by what names the peer.

    The peers used longest ago are forgotten: their next failure is logged again. While nothing
    is ``logged`` a success needs no call.
    """

    def __init__(self) -> None:
        self.logged: OrderedDict[Hashable, set[Cause]] = OrderedDict()

    def is_first(self, peer: Hashable, cause: Cause) -> bool:
        """Whether to log a failure. A second call for the same cause returns false."""
        logged = self.logged.setdefault(peer, set())
        self.logged.move_to_end(peer)
        if len(self.logged) > _MOST_PEERS:
            self.logged.popitem(last=False)
        found = _OUT_OF_REACH.get(cause, cause)
        is_first = found not in logged
        logged.add(found)
        return is_first

    def warn_first(self, counted_as: str, peer: Hashable, what: str, reason: Reason) -> None:
        """Log ``what`` failed, and why, if it is the first failure of this peer and cause."""
        if self.is_first(peer, reason.cause):
            text = "%s %s %s (further ones are only counted, as %s)"
            logger.warning(text, what, reason, reason.label, counted_as)

    def reached(self, peer: Hashable) -> None:
        """The peer answered: that it is out of reach would be a new failure."""
        self.logged.get(peer, set()).discard(Cause.OUT_OF_REACH)

    def succeeded(self, peer: Hashable) -> None:
        """KV was transferred: every failure would be a new one."""
        self.logged.pop(peer, None)

"""D's records: one for each request that it fetches, with one for each rank that it is fetched from."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.decode.landing import Landing
from kvconnect.outcome import Cause, Reason
from kvconnect.transfer.orders import Load
from kvconnect.transfer.parts import Timer
from kvconnect.transfer.slots import next_state


class RankFetchState(enum.Enum):
    """One rank's part of a request that D fetches."""

    MEETING = "meeting the peer"
    ASKED = "asked"
    UNPACKING = "sent, being unpacked"
    LANDED = "landed"
    FAILED = "failed"


class RankFetchEvent(enum.Enum):
    """What can happen to a fetch."""

    ASK = "the fetch is sent"
    FORGET = "the peer had forgotten us, and does nothing"
    REPEAT = "the peer lost what it was sending, and does nothing"
    ARRIVE = "nothing more is sent, and what arrived is being unpacked"
    LAND = "all of it is in its pages"
    FAIL = "it failed; slots that the peer may still write are in quarantine"


RANK_FETCH_TRANSITIONS: dict[tuple[RankFetchState, RankFetchEvent], RankFetchState] = {
    (RankFetchState.MEETING, RankFetchEvent.ASK): RankFetchState.ASKED,
    (RankFetchState.MEETING, RankFetchEvent.FAIL): RankFetchState.FAILED,
    (RankFetchState.ASKED, RankFetchEvent.ARRIVE): RankFetchState.UNPACKING,
    (RankFetchState.UNPACKING, RankFetchEvent.LAND): RankFetchState.LANDED,
    (RankFetchState.UNPACKING, RankFetchEvent.FAIL): RankFetchState.FAILED,
    (RankFetchState.ASKED, RankFetchEvent.FORGET): RankFetchState.MEETING,
    (RankFetchState.ASKED, RankFetchEvent.REPEAT): RankFetchState.MEETING,
    (RankFetchState.ASKED, RankFetchEvent.FAIL): RankFetchState.FAILED,
}

OTHER_EPOCH = Cause.EPOCH("the peer holds something else under this handle than before")

_WAITING = (RankFetchState.MEETING, RankFetchState.ASKED)

PeerKey = tuple[str, str, int]
"""A remote engine as a request names it: engine id, host, port of rank 0."""


@dataclass(eq=False)
class RankFetch:
    """One rank's part of a load.

    ``landing`` has what lands of it. ``repeats`` counts how often the peer lost what it was sending.
    ``epoch`` is that of the lease under which it was accepted, 0 until then.
    """

    load: LoadRecord
    rank: int
    state: RankFetchState = RankFetchState.MEETING
    transfer_id: int = -1
    link: str = ""
    landing: Landing | None = None
    repeats: int = 0
    epoch: int = 0

    def move(self, event: RankFetchEvent) -> None:
        """Change state, or raise ``IllegalTransition``."""
        self.state = next_state(
            RANK_FETCH_TRANSITIONS, self.state, event, f"fetch {self.transfer_id} of rank {self.rank}"
        )

    @property
    def is_unpacking(self) -> bool:
        """A kernel of ours works for what was asked last, which may be over for the peer."""
        return self.landing is not None and not self.landing.idle

    @property
    def over(self) -> bool:
        """Nothing of this fetch can touch memory any more."""
        return self.state in (RankFetchState.LANDED, RankFetchState.FAILED)


@dataclass(eq=False)
class LoadRecord:
    """D's record of one request.

    ``is_unused`` once the device is done with what its blocks were used for before. ``admitted`` once it was
    its turn; ``fetches`` is empty until the ranks of its peer are known;
    ``met_again`` once the peer had forgotten us and was greeted anew; ``given_back`` once its failure was
    reported to the peer; ``moved`` are bytes and chunks by lane. ``epochs`` are those of its
    leases by rank, as far as known, renewed at ``renew_at``. ``is_ragged``: see ``Results``. ``changed`` is
    called with it when something is to be done about it.
    """

    order: Load
    peer: PeerKey
    ordered_at: float
    deadline: float
    is_unused: Callable[[], bool]
    changed: Callable[[LoadRecord], None]
    timer: Timer
    admitted: bool = False
    met_again: bool = False
    given_back: bool = False
    fetches: dict[int, RankFetch] = field(default_factory=dict)
    error: Reason | None = None
    moved: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    epochs: dict[int, int] = field(default_factory=dict)
    renew_at: float = math.inf
    is_ragged: bool = False

    @property
    def handle(self) -> str:
        """What the peer holds for it, and is to be renewed; empty where it is refused."""
        return self.order.handle

    def counts_on(self, rank: int) -> bool:
        """Whether it still wants what a rank of its peer holds."""
        fetch = self.fetches.get(rank)
        return not self.error and (fetch is None or fetch.state in _WAITING)

    def is_to_ask_of(self, rank: int) -> bool:
        """Whether a rank of its peer was not asked for it."""
        return rank not in self.fetches or self.fetches[rank].state is RankFetchState.MEETING

    @property
    def is_to_ask(self) -> bool:
        """A rank of its peer, or the peer for its ranks, is still to be asked."""
        return not self.fetches or any(map(self.is_to_ask_of, self.fetches))

    def fail(self, reason: Reason) -> None:
        """It will not be loaded. The first reason is the one that is reported."""
        self.error = self.error or reason
        self.touch()

    def touch(self) -> None:
        """Something happened to it: it is looked after in this turn."""
        self.changed(self)

    @property
    def over(self) -> bool:
        """Every fetch is over, and there was one or there will be none."""
        return all(fetch.over for fetch in self.fetches.values()) and bool(self.fetches or self.error)

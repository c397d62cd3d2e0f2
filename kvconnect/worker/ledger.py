"""Every request that a worker holds for others or fetches from others: one record each.

Pure bookkeeping, with the time as an argument. A record changes only along its table of legal moves;
an illegal event names state and event and changes nothing. Forgetting a request is one ``del``.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.errors import PeerError
from kvconnect.orders import ABORTED, Hold, Load
from kvconnect.peer.loss import Quarantine
from kvconnect.worker.state_machine import next_state


class LeaseState(enum.Enum):
    """A request whose blocks P keeps for others."""

    HELD = "held"
    SENDING = "sending"
    DONE = "done"


class LeaseEvent(enum.Enum):
    """What can happen to a lease."""

    FETCH = "a fetch begins"
    LAST_ENDED = "the last fetch under way ends"
    SATISFIED = "every consumer was served or let go"
    EXPIRED = "the lease expires"


LEASE_TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.HELD, LeaseEvent.FETCH): LeaseState.SENDING,
    (LeaseState.SENDING, LeaseEvent.FETCH): LeaseState.SENDING,
    (LeaseState.SENDING, LeaseEvent.LAST_ENDED): LeaseState.HELD,
    (LeaseState.HELD, LeaseEvent.SATISFIED): LeaseState.DONE,
    (LeaseState.HELD, LeaseEvent.EXPIRED): LeaseState.DONE,
}


class LoadState(enum.Enum):
    """A request that D fetches."""

    QUEUED = "waits for its turn"
    FETCHING = "being fetched"
    FAILED = "failed, and not all of it is quiet yet"
    OVER = "reported"


class LoadEvent(enum.Enum):
    """What can happen to a load."""

    ADMIT = "it is its turn"
    FAIL = "something went wrong with it"
    END = "all of its rank fetches are over"


LOAD_TRANSITIONS: dict[tuple[LoadState, LoadEvent], LoadState] = {
    (LoadState.QUEUED, LoadEvent.ADMIT): LoadState.FETCHING,
    (LoadState.QUEUED, LoadEvent.FAIL): LoadState.FAILED,
    (LoadState.FETCHING, LoadEvent.FAIL): LoadState.FAILED,
    (LoadState.FAILED, LoadEvent.FAIL): LoadState.FAILED,
    (LoadState.FETCHING, LoadEvent.END): LoadState.OVER,
    (LoadState.FAILED, LoadEvent.END): LoadState.OVER,
}


class SendState(enum.Enum):
    """A fetch that P serves."""

    MOVING = "being sent"
    STOPPING = "it ends early, once nothing reads its blocks any more"
    OVER = "answered"


class SendEvent(enum.Enum):
    """What can happen to a fetch that P serves."""

    STOP = "something went wrong with it, or it is not wanted any more"
    END = "nothing of it is under way"


SEND_TRANSITIONS: dict[tuple[SendState, SendEvent], SendState] = {
    (SendState.MOVING, SendEvent.STOP): SendState.STOPPING,
    (SendState.STOPPING, SendEvent.STOP): SendState.STOPPING,
    (SendState.MOVING, SendEvent.END): SendState.OVER,
    (SendState.STOPPING, SendEvent.END): SendState.OVER,
}


class RankFetchState(enum.Enum):
    """One rank's part of a request that D fetches."""

    MEETING = "meeting the peer"
    ASKED = "asked"
    UNPACKING = "sent, being unpacked"
    LANDED = "landed"
    BUSY = "failed, memory may still be written"
    FAILED = "failed, memory is quiet"


class RankFetchEvent(enum.Enum):
    """What can happen to a fetch."""

    ASK = "the fetch is sent"
    FORGET = "the peer had forgotten us, and does nothing"
    REPEAT = "the peer lost what it was sending, and does nothing"
    ARRIVE = "nothing more is sent, and what arrived is being unpacked"
    LAND = "all of it is in its pages"
    FAIL = "it failed, and nothing writes"
    LOSE = "it failed, and writes may be under way"
    SETTLE = "the peer says, or time proves, that nothing writes any more"


RANK_FETCH_TRANSITIONS: dict[tuple[RankFetchState, RankFetchEvent], RankFetchState] = {
    (RankFetchState.MEETING, RankFetchEvent.ASK): RankFetchState.ASKED,
    (RankFetchState.MEETING, RankFetchEvent.FAIL): RankFetchState.FAILED,
    (RankFetchState.ASKED, RankFetchEvent.LAND): RankFetchState.LANDED,
    (RankFetchState.ASKED, RankFetchEvent.ARRIVE): RankFetchState.UNPACKING,
    (RankFetchState.UNPACKING, RankFetchEvent.LAND): RankFetchState.LANDED,
    (RankFetchState.UNPACKING, RankFetchEvent.FAIL): RankFetchState.FAILED,
    (RankFetchState.ASKED, RankFetchEvent.FORGET): RankFetchState.MEETING,
    (RankFetchState.ASKED, RankFetchEvent.REPEAT): RankFetchState.MEETING,
    (RankFetchState.ASKED, RankFetchEvent.FAIL): RankFetchState.FAILED,
    (RankFetchState.ASKED, RankFetchEvent.LOSE): RankFetchState.BUSY,
    (RankFetchState.BUSY, RankFetchEvent.SETTLE): RankFetchState.FAILED,
}

_WAITING = (RankFetchState.MEETING, RankFetchState.ASKED)

PeerKey = tuple[str, str, int]
"""A remote engine as a request names it: engine id, host, port of rank 0."""

Consumer = tuple[str, str, int]
"""Who fetches: engine id, incarnation, rank."""

TransferKey = tuple[str, int]
"""A fetch as P knows it: the connection it came over, and D's number for it."""


@dataclass(eq=False, kw_only=True)
class Claims:
    """Who fetches under a handle: one engine (``owner``), ``consumers`` of its ranks, each of them once.

    ``epoch`` is another whenever the blocks behind the handle are others, and never 0 where there are any.
    """

    owner: str | None = None
    consumers: int | None = None
    served: set[Consumer] = field(default_factory=set)
    let_go: set[Consumer] = field(default_factory=set)
    sending: set[TransferKey] = field(default_factory=set)
    epoch: int = 0

    def claim(self, consumer: Consumer, consumers: int) -> None:
        """A rank fetches, and says how many ranks of its engine will.

        Raises:
            PeerError: it has no right to.
        """
        if self.owner not in (None, consumer[0]):
            raise PeerError("another engine has fetched this request")
        if consumer in self.served or consumer in self.let_go:
            raise PeerError("this rank has had this request")
        self.owner, self.consumers = consumer[0], consumers

    @property
    def satisfied(self) -> bool:
        """Everybody who would fetch did, or said that they will not."""
        ranks = {rank for _, _, rank in self.served | self.let_go}
        return self.consumers is not None and len(ranks) >= self.consumers


@dataclass(eq=False)
class Lease(Claims):
    """P's record of one request that it holds.

    ``ready`` says whether its KV is complete on the device. It ends at ``expires_at``, which may be moved as
    far as ``last_until``. Until ``busy_until`` a library that could not prove that it stopped may still read
    the blocks. ``renewers`` are the connections over which somebody renewed it. ``revoked`` says why it is
    given up before its time.
    """

    order: Hold
    expires_at: float
    last_until: float
    ready: Callable[[], bool]
    busy_until: float = 0.0
    renewers: set[str] = field(default_factory=set)
    revoked: str = ""
    state: LeaseState = LeaseState.HELD

    @property
    def num_tokens(self) -> int:
        """Tokens that are held."""
        return self.order.num_tokens

    def move(self, event: LeaseEvent) -> None:
        """Change state.

        Raises:
            IllegalTransition: the event is not legal in this state.
        """
        self.state = next_state(LEASE_TRANSITIONS, self.state, event, f"lease of {self.order.request_id}")


@dataclass(eq=False)
class RankFetch:
    """One rank's part of a load.

    ``path`` is empty while the peer has not said which one it takes. ``quarantine`` is that of its memory
    where the peer may still write. ``repeats`` counts how often the peer lost what it was sending. ``epoch``
    is that of the lease under which the peer accepted the fetch, 0 until it did. ``closed`` is why the
    packed path was not asked for. ``is_cut``: what was asked cannot arrive any more, since our registration
    is another, and can be asked for anew. ``is_answered``: the peer has given its one answer to the fetch.
    """

    rank: int
    state: RankFetchState = RankFetchState.MEETING
    path: str = ""
    transfer_id: int = -1
    link: str = ""
    quarantine: Quarantine = field(default_factory=Quarantine)
    repeats: int = 0
    epoch: int = 0
    closed: str = ""
    is_cut: bool = False
    is_answered: bool = False

    def move(self, event: RankFetchEvent) -> None:
        """Change state.

        Raises:
            IllegalTransition: the event is not legal in this state.
        """
        self.state = next_state(
            RANK_FETCH_TRANSITIONS, self.state, event, f"fetch {self.transfer_id} of rank {self.rank}"
        )

    @property
    def owed(self) -> bool:
        """The peer owes us an answer: that it is done, or that it stopped."""
        return self.state in (RankFetchState.ASKED, RankFetchState.BUSY)

    @property
    def over(self) -> bool:
        """Nothing of this fetch can touch memory any more."""
        return self.state in (RankFetchState.LANDED, RankFetchState.FAILED)


@dataclass(eq=False)
class LoadRecord:
    """D's record of one request.

    ``admitted`` once it was its turn; ``fetches`` is empty until the peer said how many ranks it has;
    ``met_again`` once a peer had forgotten us and was greeted anew; ``given_back`` once it failed and the
    peer was told that it will not be fetched; ``moved`` are bytes and copies by path.
    ``epochs`` are those of its leases by rank, as far as told; at ``renew_at`` they are to be renewed.
    ``aborted``: it ended because its client left, and for no other reason.
    """

    order: Load
    peer: PeerKey
    ordered_at: float
    deadline: float
    ready: Callable[[], bool]
    admitted: bool = False
    met_again: bool = False
    given_back: bool = False
    fetches: dict[int, RankFetch] = field(default_factory=dict)
    error: str = ""
    moved: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    epochs: dict[int, int] = field(default_factory=dict)
    renew_at: float = math.inf
    aborted: bool = False
    state: LoadState = LoadState.QUEUED

    @property
    def handle(self) -> str:
        """Empty where there is nothing to fetch."""
        return self.order.handle

    def counts_on(self, rank: int) -> bool:
        """Whether it still wants what a rank of its peer holds."""
        fetch = self.fetches.get(rank)
        return not self.error and (fetch is None or fetch.state in _WAITING)

    def is_to_ask_of(self, rank: int) -> bool:
        """Whether a rank of its peer was not asked for it."""
        return rank not in self.fetches or self.fetches[rank].state is RankFetchState.MEETING

    def move(self, event: LoadEvent) -> None:
        """Change state.

        Raises:
            IllegalTransition: the event is not legal in this state.
        """
        self.state = next_state(LOAD_TRANSITIONS, self.state, event, f"load of {self.order.request_id}")

    def fail(self, reason: str) -> None:
        """It will not be loaded. The first reason is the one that is told.

        Raises:
            IllegalTransition: it was reported already.
        """
        self.move(LoadEvent.FAIL)
        self.error = self.error or reason

    def abort(self) -> None:
        """Its client left. That is no failure, unless it had failed before. Raises what ``fail`` does."""
        self.aborted = self.aborted or not self.error
        self.fail(ABORTED)

    def is_due(self, now: float) -> bool:
        """Something is to be done about it that nobody tells us: more than to wait for its peer."""
        if now >= self.deadline:
            return True
        return any(fetch.state not in _WAITING for fetch in self.fetches.values())

    @property
    def is_to_ask(self) -> bool:
        """A rank of its peer, or the peer for its ranks, is still to be asked."""
        return not self.fetches or any(
            fetch.state is RankFetchState.MEETING for fetch in self.fetches.values()
        )

    @property
    def over(self) -> bool:
        """Every fetch is over, and there was one or there will be none."""
        return all(fetch.over for fetch in self.fetches.values()) and bool(self.fetches or self.error)


@dataclass(eq=False)
class Sending:
    """P's record of one fetch under way. ``in_flight`` are the bytes of its batches, by their id.

    ``claims`` is what is sent: a lease, or a prefill that becomes one meanwhile (``streamed``). ``again``:
    it ends so that the peer can fetch anew; ``cancelled``: the peer wants it no more. ``told_due``: how many
    chunks the peer knows that slots are of use for; None: all. ``unsettled`` are the generations of landing
    slots that a batch which was not quiet may still write.
    """

    key: TransferKey
    claims: Claims
    consumer: Consumer
    peer: str
    deadline: float
    started_at: float
    streamed: bool = False
    path: str = "direct"
    copies: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    total_bytes: int = 0
    last_ended_at: float = 0.0
    moving_since: float = 0.0
    moving_s: float = 0.0
    error: str = ""
    again: bool = False
    cancelled: bool = False
    quiescent: bool = True
    told_due: int | None = None
    unsettled: list[int] = field(default_factory=list)
    state: SendState = SendState.MOVING

    def move(self, event: SendEvent) -> None:
        """Change state.

        Raises:
            IllegalTransition: the event is not legal in this state.
        """
        self.state = next_state(
            SEND_TRANSITIONS, self.state, event, f"transfer {self.key[1]} over {self.key[0]}"
        )

    def stop(self, reason: str, *, again: bool = False) -> None:
        """Let it end early. The first reason is the one that is told; ``again``: the peer may fetch anew.

        Raises:
            IllegalTransition: it was answered already.
        """
        self.move(SendEvent.STOP)
        if not self.error:
            self.error, self.again = reason, again

    @property
    def seconds(self) -> float:
        """What it took; without the time in which there was nothing to send yet."""
        return self.moving_s if self.streamed else max(0.0, self.last_ended_at - self.started_at)


class Tombstones:
    """Handles that were valid once, and why they are not any more. The oldest are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def bury(self, handle: str, reason: str) -> None:
        """Remember why a handle ended."""
        self._reasons[handle] = reason
        while len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def lift(self, handle: str) -> None:
        """The handle is in use again."""
        self._reasons.pop(handle, None)

    def reason(self, handle: str) -> str | None:
        """Why a handle ended, or None if it was never known or is forgotten."""
        return self._reasons.get(handle)

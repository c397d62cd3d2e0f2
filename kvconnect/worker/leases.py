"""P's records: one for each request that it holds, and one for each fetch that it serves.

Pure, with the time as an argument. A record changes only along its table of legal transitions; an illegal
event names state and event, and changes nothing. Forgetting a request is one ``del``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.errors import PeerError
from kvconnect.orders import Hold
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
    the blocks. ``renewers`` are the connections over which a peer renewed it. ``revoked`` says why it is
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
        """Change state, or raise ``IllegalTransition``."""
        self.state = next_state(LEASE_TRANSITIONS, self.state, event, f"lease of {self.order.request_id}")


@dataclass(eq=False)
class Sending:
    """P's record of one fetch under way. ``in_flight`` are the bytes of its batches, by their id.

    ``claims`` is what is sent: a lease, or a prefill that becomes one meanwhile (``streamed``). ``again``:
    it ends so that the peer can fetch anew; ``cancelled``: the peer wants it no more. ``due_reported``: for
    how many chunks the peer knows that slots are of use; None: for all. ``unsettled`` are the generations of
    landing slots that a batch which was not quiescent may still write.
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
    due_reported: int | None = None
    unsettled: list[int] = field(default_factory=list)
    state: SendState = SendState.MOVING

    def move(self, event: SendEvent) -> None:
        """Change state, or raise ``IllegalTransition``."""
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

"""The state machine of one connection between two workers, without any I/O.

A session takes frames and the time, and returns events and frames to send. ``LEGAL`` lists all legal
messages. An illegal message changes nothing, and is answered with a ``Bad`` that names state and message.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import get_args

from kvconnect.addresses import RankAddress
from kvconnect.config import ExtraConfig
from kvconnect.errors import LocalError, PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.agreement import disagreement
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import (
    PROTOCOL_VERSION,
    Alive,
    Answer,
    Bad,
    Hello,
    Introduction,
    Message,
    Question,
    Refused,
    Side,
    ToDecode,
    ToPrefill,
    Welcome,
    decode,
    encode,
    other_release,
)


class SessionState(enum.Enum):
    """The state of a session."""

    NEW = "new"
    GREETED = "greeted"
    READY = "ready"
    ENDED = "ended"


LEGAL: dict[tuple[Side, SessionState], tuple[type, ...]] = {
    (Side.DECODE, SessionState.GREETED): (Welcome, Refused, Bad),
    (Side.DECODE, SessionState.READY): tuple(kind for kind in get_args(ToDecode) if kind is not Answer),
    (Side.PREFILL, SessionState.NEW): (Hello, Bad, Question),
    (Side.PREFILL, SessionState.READY): get_args(ToPrefill),
}
"""The messages that a side may receive in a state."""


@dataclass(frozen=True)
class Ended:
    """The session is over; ``reason`` is for the operator. ``refused``: the peer whose greeting P refused."""

    reason: Reason
    loss: PeerLoss = PeerLoss.UNUSABLE
    refused: Introduction | None = None


@dataclass(frozen=True)
class Misused:
    """A message was unreadable or illegal, and was dropped; for the log and a counter."""

    reason: Reason


Event = Message | Ended | Misused
"""A message is legal in this state, and for the layer above; a ``Hello`` or ``Welcome`` is a greeting that
succeeded."""


class Session:
    """One side of one connection. ``directory`` has the addresses of this node's ranks, for ``Welcome``."""

    def __init__(
        self, side: Side, ours: Introduction, limits: ExtraConfig, directory: tuple[RankAddress, ...] = ()
    ) -> None:
        self.side = side
        self.state = SessionState.NEW
        self.peer: Introduction | None = None
        self.ours = ours
        self._limits = limits
        self._directory = directory
        self._unanswered_greetings = 0
        self._outgoing: list[bytes] = []
        self._greeted_at = 0.0
        self._heard_at = 0.0
        self._asked_at: float | None = None
        """When D sent the heartbeat that P has not answered; None without one."""

    def __repr__(self) -> str:
        who = f"{self.peer.engine_id}/{self.peer.rank}" if self.peer else "an unknown peer"
        return f"Session({self.side.value}, {self.state.value}, with {who})"

    def greet(self, now: float) -> None:
        """Send D's greeting. Raises ``LocalError``: it was sent before, or this is P's side."""
        if self.side is not Side.DECODE or self.state is not SessionState.NEW:
            raise LocalError(f"{self!r} cannot greet")
        self.state = SessionState.GREETED
        self._unanswered_greetings = 1
        self._greeted_at = now
        self._push(Hello(PROTOCOL_VERSION, self.ours))

    def greet_anew(self, ours: Introduction) -> None:
        """Replace this side's introduction. D sends it to P, if D has greeted already."""
        self.ours = ours
        if self.side is Side.DECODE and self.state in (SessionState.GREETED, SessionState.READY):
            self._unanswered_greetings += 1
            self._push(Hello(PROTOCOL_VERSION, ours))

    def send(self, message: Message) -> None:
        """Queue a message of the layer above. Raises ``LocalError``: the session is not ready."""
        if self.state is not SessionState.READY:
            raise LocalError(f"{self!r} cannot send {type(message).__name__}")
        self._push(message)

    def answer(self, answer: Answer) -> None:
        """Queue the answer to a question. Questions are legal before the greeting."""
        if self.state is not SessionState.ENDED:
            self._push(answer)

    def outgoing(self) -> list[bytes]:
        """Take the frames to send now, in order. Each is returned once."""
        frames, self._outgoing = self._outgoing, []
        return frames

    def receive(self, frame: bytes, now: float) -> list[Event]:
        """Process one frame of the other side. Raises nothing, for any content."""
        if self.state is SessionState.ENDED:
            return []
        try:
            message = decode(self.side, frame, self._limits.max_message_bytes)
        except PeerError as error:
            return self._misused(error.reason)
        if type(message) not in LEGAL.get((self.side, self.state), ()):
            return self._illegal(message)
        self._heard_at, self._asked_at = now, None
        match message:
            case Hello():
                return self._hello(message, now)
            case Welcome():
                return self._welcome(message)
            case Refused() as refused:
                self.state = SessionState.ENDED
                # A refusal of a repeated greeting leaves earlier fetches running; their writes may go on.
                is_repeated = self.peer is not None and self._unanswered_greetings > 0
                loss = PeerLoss.UNUSABLE if is_repeated else PeerLoss.TOLD_TO_STOP
                return [Ended(refused.reason.after("the prefill node refused: "), loss)]
            case Bad(reason=reason):
                if self.state is SessionState.GREETED:
                    self.state = SessionState.ENDED
                    text = f"the prefill node could not read this node's greeting: {reason}"
                    return [Ended(Cause.OTHER_RELEASE(text))]
                return [Misused(Cause.PROTOCOL(f"it cannot use a message of this node: {reason}"))]
            case _:
                return [message]

    def tick(self, now: float) -> list[Event]:
        """Check the deadlines, and send a heartbeat that is due."""
        ask_at, end_at = self._times()
        if now >= end_at:
            was_greeted = self.state is SessionState.GREETED
            self.state = SessionState.ENDED
            if was_greeted:
                limit = f"{self._limits.handshake_timeout_s:g} s, half of peer_timeout_s"
                reason = f"the prefill node did not answer the greeting within {limit}"
            else:
                limit = f"{self._limits.peer_timeout_s:g} s, which is peer_timeout_s"
                reason = f"the prefill node has been silent for {limit}"
            return [Ended(Cause.OUT_OF_REACH(reason), PeerLoss.SILENT)]
        if now >= ask_at:
            self._asked_at = now
            self._push(Alive())
        return []

    def next_tick(self) -> float:
        """The time at which ``tick`` must be called next; infinite for never."""
        return min(self._times())

    def _times(self) -> tuple[float, float]:
        """When to send a heartbeat, and when the peer counts as silent. Only D watches P.

        Counted from the heartbeat: a node that itself did not run for a while ends no session by that.
        """
        timeout_s = self._limits.peer_timeout_s
        if self.state is SessionState.GREETED:
            return math.inf, self._greeted_at + self._limits.handshake_timeout_s
        if self.state is not SessionState.READY or self.side is not Side.DECODE:
            return math.inf, math.inf
        if self._asked_at is not None:
            return math.inf, self._asked_at + timeout_s * 3 / 4
        return self._heard_at + timeout_s / 4, math.inf

    def _hello(self, hello: Hello, now: float) -> list[Event]:
        refusal = _refusal(self.ours, hello.introduction, PROTOCOL_VERSION, hello.version)
        if refusal:
            self._refuse(refusal)
            return [Ended(refusal, refused=hello.introduction)]
        self.state = SessionState.READY
        self.peer = hello.introduction
        self._push(Welcome(PROTOCOL_VERSION, self.ours, self._directory, self._limits.lease_s, now))
        return [hello]

    def _welcome(self, welcome: Welcome) -> list[Event]:
        refusal = _refusal(welcome.introduction, self.ours, welcome.version, PROTOCOL_VERSION)
        if refusal:
            self.state = SessionState.ENDED
            return [Ended(refusal)]
        self.state = SessionState.READY
        self._unanswered_greetings -= 1
        self.peer = welcome.introduction
        return [welcome]

    def _illegal(self, message: Message) -> list[Event]:
        reason = Cause.PROTOCOL(f"{type(message).__name__} is not expected in state {self.state.value}")
        if self.side is Side.PREFILL and self.state is SessionState.NEW:
            # D may still be in a session that P has forgotten. Only a refusal makes D greet again.
            text = "the connection is not known: it was restarted, or too many decode nodes connected since"
            self._refuse(Cause.LOST(text))
            return [Misused(reason), Ended(Cause.LOST(text))]
        return self._misused(reason)

    def _refuse(self, reason: Reason) -> None:
        self.state = SessionState.ENDED
        self._push(Refused(PROTOCOL_VERSION, reason.text, reason.cause.value))

    def _misused(self, reason: Reason) -> list[Event]:
        self._push(Bad(reason.text))
        return [Misused(reason)]

    def _push(self, message: Message) -> None:
        self._outgoing.append(encode(message))


def _refusal(
    prefill: Introduction, decode: Introduction, prefill_version: int, decode_version: int
) -> Reason | None:
    if prefill_version != decode_version:
        return other_release(prefill_version, decode_version)
    return disagreement(prefill, decode)

"""Sends a question to a serving worker from another process; blocks until the answer or a timeout."""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Generic

import msgspec

from kvconnect.config import ExtraConfig
from kvconnect.errors import PeerError
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.channel import Channel, LinkLost
from kvconnect.peer.description import TOPIC as DESCRIPTION
from kvconnect.peer.description import AnyAnswer, Description, read_answer
from kvconnect.peer.keyring import Keyring
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import Answer, Bad, Question, Refused, Side, decode, encode
from kvconnect.peer.zmq_channel import ZmqChannel

_LINK = "asked"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Answered(Generic[AnyAnswer]):
    """An answer, and the times in seconds of this process's wall clock around the exchange."""

    value: AnyAnswer
    asked_at: float
    answered_at: float


def ask(
    extra: ExtraConfig,
    keyring: Keyring | None,
    address: tuple[str, int],
    topic: str,
    kind: type[AnyAnswer],
    argument: str = "",
) -> Answered[AnyAnswer]:
    """Send a question to the worker at ``address``, and wait ``peer_timeout_s`` at most for its answer.

    Raises ``PeerError``: nothing listens there, keys differ, the worker cannot answer, its answer is not of
    this ``kind``, or the time is over.
    """
    shown, question = f"{address[0]}:{address[1]}", Question(next(_numbers), topic, argument)
    with closing(asking_channel(extra, keyring)) as channel:
        deadline = time.monotonic() + extra.peer_timeout_s
        channel.connect(_LINK, *address)
        asked_at = time.time()
        channel.send(_LINK, encode(question))
        while (left_s := deadline - time.monotonic()) > 0:
            channel.wait(left_s)
            for arrival in channel.receive():
                if isinstance(arrival, LinkLost):
                    gone = arrival.loss is PeerLoss.PROCESS_GONE
                    lost = f"cannot talk to {shown}: {arrival.reason or 'the connection broke'}"
                    raise PeerError(f"nothing listens at {shown}" if gone else lost)
                match decode(Side.DECODE, arrival.data, extra.max_message_bytes):
                    case Answer(number=question.number, data=data, error=""):
                        answered_at = time.time()
                        return Answered(read_answer(data, kind), asked_at, answered_at)
                    case Answer(number=question.number, error=error):
                        raise PeerError(f"{shown} cannot answer: {error}")
                    case Refused() | Bad() as refused:
                        reason = f"runs a release that answers no such question: {refused.reason}"
                        raise PeerError(f"{shown} {reason}")
    raise PeerError(f"{shown} did not answer within {extra.peer_timeout_s:g} s")


def describe(extra: ExtraConfig, keyring: Keyring | None, address: tuple[str, int]) -> Answered[Description]:
    """Ask the worker at an address for its description. Raises ``PeerError`` as ``ask``."""
    return ask(extra, keyring, address, DESCRIPTION, Description)


def asking_channel(extra: ExtraConfig, keyring: Keyring | None) -> Channel:
    """A channel that only opens connections: it listens on the loopback interface, at a free port."""
    ours = msgspec.structs.replace(extra, host="127.0.0.1", bind="")
    return ZmqChannel(ours, 0, keyring, AllowList(extra.allow_peers))

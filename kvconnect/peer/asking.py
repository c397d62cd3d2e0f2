"""A question to a worker that serves, from a process that is none. It waits, and leaves nothing behind."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import msgspec

from kvconnect.config import ExtraConfig
from kvconnect.errors import PeerError
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.channel import Channel, LinkLost
from kvconnect.peer.description import TOPIC as DESCRIPTION
from kvconnect.peer.description import Description, read_answer
from kvconnect.peer.keyring import Keyring
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import Answer, Bad, Question, Refused, Side, decode, encode
from kvconnect.peer.zmq_channel import ZmqChannel

_LINK = "asked"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Reply:
    """The data of an answer, and when by our wall clock the question left and the answer came."""

    data: bytes
    asked_at: float
    answered_at: float


def ask(
    extra: ExtraConfig, keyring: Keyring | None, address: tuple[str, int], topic: str, argument: str = ""
) -> Reply:
    """Ask the worker at an address, and wait for its answer: ``peer_timeout_s`` at most.

    Raises ``PeerError``, which names the cause: nothing answers, the keys differ, the worker cannot answer.
    """
    channel = asking_channel(extra, keyring)
    try:
        return _exchange(channel, address, Question(next(_numbers), topic, argument), extra)
    finally:
        channel.close()


@dataclass(frozen=True)
class TimedDescription:
    """A worker's description, and between which times of our wall clock the worker made it."""

    description: Description
    asked_at: float
    answered_at: float


def describe(extra: ExtraConfig, keyring: Keyring | None, address: tuple[str, int]) -> TimedDescription:
    """Ask the worker at an address what it is. Raises ``PeerError``."""
    reply = ask(extra, keyring, address, DESCRIPTION)
    return TimedDescription(read_answer(reply.data, Description), reply.asked_at, reply.answered_at)


def asking_channel(extra: ExtraConfig, keyring: Keyring | None) -> Channel:
    """A channel that connects to workers, and that no peer connects to."""
    ours = msgspec.structs.replace(extra, host="127.0.0.1", bind="")
    return ZmqChannel(ours, 0, keyring, AllowList(extra.allow_peers))


def _exchange(channel: Channel, address: tuple[str, int], question: Question, extra: ExtraConfig) -> Reply:
    shown = f"{address[0]}:{address[1]}"
    deadline = time.monotonic() + extra.peer_timeout_s
    channel.connect(_LINK, *address)
    asked_at = time.time()
    channel.send(_LINK, encode(question))
    while (left_s := deadline - time.monotonic()) > 0:
        channel.wait(left_s)
        for arrival in channel.receive():
            if isinstance(arrival, LinkLost):
                gone = arrival.loss is PeerLoss.PROCESS_GONE
                reason = f"nothing listens at {shown}" if gone else arrival.reason or "the connection broke"
                raise PeerError(reason)
            match decode(Side.DECODE, arrival.data, extra.max_message_bytes):
                case Answer(number=number, data=data, error="") if number == question.number:
                    return Reply(data, asked_at, time.time())
                case Answer(number=number, error=error) if number == question.number:
                    raise PeerError(f"{shown} cannot answer: {error}")
                case Refused() | Bad() as refused:
                    raise PeerError(f"{shown} runs a release that answers no such question: {refused.reason}")
    raise PeerError(f"{shown} did not answer within {extra.peer_timeout_s:g} s")

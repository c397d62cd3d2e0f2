"""The outcome of a load: one value, from where it is known to the log, the metrics and the operator.

A ``Reason`` also travels between nodes, which decide by its ``Cause``, never by its text.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

_MOST_TEXT = 4096


class Actor(enum.Enum):
    """Who must act, so that the next request of this kind is loaded."""

    NONE = "no one"
    OPERATOR = "the operator of the two nodes"
    CLIENT = "the client, or the router that named the transfer"
    PEER = "the operator of the prefill node"
    DEVELOPER = "the developers of kvconnect"


class Cause(enum.Enum):
    """Why a request was not loaded. The value is the ``reason`` label of ``kvconnect_failures_total``."""

    ABORTED = "aborted"
    OTHER_WEIGHTS = "other_weights"
    OTHER_IDENTITY = "other_identity"
    OTHER_LAYOUT = "layouts_differ"
    OTHER_RELEASE = "releases_differ"
    LANE_REFUSED = "transport_refused"
    NOT_TRUSTED = "peer_not_trusted"
    WRONG_ROLE = "wrong_role"
    OTHER_PROMPT = "prompt_differs"
    PARAMETERS = "parameters_refused"
    NOT_HELD = "not_held"
    FETCHED_BEFORE = "fetched_before"
    BLOCKS = "blocks_differ"
    LEASE_OVER = "lease_over"
    TIMEOUT = "load_timeout"
    OUT_OF_REACH = "peer_out_of_reach"
    LOST = "lost_with_peer"
    STOPPING = "peer_stopping"
    BUSY = "peer_busy"
    PREFILL_ENDED = "prefill_ended"
    EVICTED = "evicted"
    REPLACED = "replaced_while_loaded"
    ENGINE = "engine_failed"
    DIGEST = "digest"
    EPOCH = "epoch"
    LANDING = "landing"
    PROTOCOL = "protocol"
    RESTORE = "offload_restore_failed"
    INTERNAL = "not_planned"

    def __call__(self, text: str) -> Reason:
        """A reason of this cause, with a text (cut to its longest length)."""
        return Reason(self, text[:_MOST_TEXT])

    @property
    def actor(self) -> Actor:
        """Who must act."""
        return _ACTORS[self]


_ACTORS = {
    **dict.fromkeys(Cause, Actor.PEER),
    Cause.ABORTED: Actor.NONE,
    Cause.PREFILL_ENDED: Actor.NONE,
    Cause.EVICTED: Actor.NONE,
    Cause.REPLACED: Actor.NONE,
    **dict.fromkeys(
        (
            *(Cause.OTHER_WEIGHTS, Cause.OTHER_IDENTITY, Cause.OTHER_LAYOUT, Cause.OTHER_RELEASE),
            *(Cause.LANE_REFUSED, Cause.NOT_TRUSTED, Cause.WRONG_ROLE, Cause.LEASE_OVER, Cause.TIMEOUT),
        ),
        Actor.OPERATOR,
    ),
    **dict.fromkeys(
        (Cause.OTHER_PROMPT, Cause.PARAMETERS, Cause.NOT_HELD, Cause.FETCHED_BEFORE), Actor.CLIENT
    ),
    **dict.fromkeys(
        (Cause.BLOCKS, Cause.DIGEST, Cause.EPOCH, Cause.LANDING, Cause.PROTOCOL, Cause.INTERNAL),
        Actor.DEVELOPER,
    ),
}


class Reason(msgspec.Struct, frozen=True, array_like=True):
    """Why something was refused or failed: ``cause`` to decide by, ``text`` for people."""

    cause: Cause
    text: Annotated[str, msgspec.Meta(max_length=_MOST_TEXT)]

    def __str__(self) -> str:
        return self.text

    def after(self, prefix: str) -> Reason:
        """The same reason, with a prefix to its text."""
        return self.cause(f"{prefix}{self.text}")


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one load of this rank from a peer; ``reason`` is None if the KV was loaded.

    ``engine_id`` is the peer's, "" where any engine at the side channel ``channel`` would do. ``source``:
    ``lease``, a request that the peer held, or ``name``, rows that it keeps. ``seconds``: from the order to
    the end. ``lane``: what carried the bytes.
    """

    request_id: str
    engine_id: str
    channel: tuple[str, int]
    source: str
    num_tokens: int
    total_bytes: int
    seconds: float
    lane: str = ""
    reason: Reason | None = None

    @property
    def peer(self) -> str:
        """The peer, as a text."""
        host, port = self.channel
        return f"{self.engine_id or 'an engine'} at {host}:{port}"

    def __str__(self) -> str:
        took = f"after {self.seconds * 1e3:.1f} ms"
        if self.reason is None:
            return (
                f"request {self.request_id}: {self.num_tokens} tokens, {self.total_bytes} bytes, were loaded "
                f"from {self.peer} by {self.source} {took}"
            )
        actor = self.reason.cause.actor
        acts = "" if actor is Actor.NONE else f"; {actor.value} must act"
        return (
            f"request {self.request_id} was not loaded from {self.peer} by {self.source} {took}: "
            f"{self.reason.text} [{self.reason.cause.value}{acts}]"
        )

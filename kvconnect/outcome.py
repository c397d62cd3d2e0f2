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

    @property
    def remedy(self) -> str:
        """What to do; empty where nothing is to be done."""
        return _REMEDIES.get(self, "")


_ACTORS = {
    **dict.fromkeys(Cause, Actor.PEER),
    Cause.ABORTED: Actor.NONE,
    Cause.PREFILL_ENDED: Actor.NONE,
    Cause.EVICTED: Actor.NONE,
    Cause.REPLACED: Actor.NONE,
    Cause.STOPPING: Actor.NONE,
    Cause.RESTORE: Actor.NONE,
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


_REMEDIES = {
    Cause.OTHER_WEIGHTS: "serve the same checkpoint and revision on both",
    Cause.OTHER_IDENTITY: "start both servers alike in it; `kvconnect doctor --peer` has every field",
    Cause.OTHER_LAYOUT: "start both servers alike in it; `kvconnect doctor --peer` compares the caches",
    Cause.OTHER_RELEASE: "install one release of kvconnect on both",
    Cause.LANE_REFUSED: "mend the link (`kvconnect doctor`), or change require_lane or min_gb_per_s",
    Cause.NOT_TRUSTED: "list the address in allow_peers, if it is one of yours",
    Cause.WRONG_ROLE: "set kv_role kv_producer on prefill nodes and kv_consumer on decode nodes",
    Cause.OTHER_PROMPT: "send both nodes the prompt unchanged",
    Cause.PARAMETERS: "give both nodes one key, and pass on kv_transfer_params unchanged",
    Cause.NOT_HELD: "send the request to the decode node within lease_s, and once",
    Cause.FETCHED_BEFORE: "prefill again: a handle is good for one request",
    Cause.BLOCKS: "report it",
    Cause.LEASE_OVER: "add decode nodes, or raise lease_s or lease_max_s",
    Cause.TIMEOUT: "look at the link and the prefill node's load, or raise load_timeout_s",
    Cause.OUT_OF_REACH: "start it; check host, port and the firewall (rank r listens on port + r)",
    Cause.LOST: "start it, if it does not come back",
    Cause.STOPPING: "have the router ask another one",
    Cause.BUSY: "add decode nodes",
    Cause.ENGINE: "see its log and `kvconnect doctor`",
    Cause.DIGEST: "report it, if it repeats: the fabric or the engine is faulty",
    Cause.EPOCH: "report it, if it repeats",
    Cause.LANDING: "report it",
    Cause.PROTOCOL: "report it with both logs",
    Cause.RESTORE: "see the lines before",
    Cause.INTERNAL: "report it, with the log at level DEBUG",
}


class Reason(msgspec.Struct, frozen=True, array_like=True):
    """Why something was refused or failed: ``cause`` to decide by, ``text`` for people."""

    cause: Cause
    text: Annotated[str, msgspec.Meta(max_length=_MOST_TEXT)]

    def __str__(self) -> str:
        return self.text

    @property
    def label(self) -> str:
        """The cause, who must act, and how, in brackets."""
        cause = self.cause
        acts = "" if cause.actor is Actor.NONE else f"; {cause.actor.value} must act"
        return f"[{cause.value}{acts}{': ' * bool(cause.remedy)}{cause.remedy}]"

    def after(self, prefix: str) -> Reason:
        """The same reason, with a prefix to its text."""
        return self.cause(f"{prefix}{self.text}")


def duration(seconds: float) -> str:
    """A time, for people."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def prefill_name(engine_id: str, host: str, port: int) -> str:
    """A prefill node, for people; ``engine_id`` may be empty, and ``host`` where no address is known."""
    at = f"at [{host}]:{port}" if ":" in host else f"at {host}:{port}" if host else ""
    return " ".join(filter(None, ("prefill node", engine_id, at)))


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one load of this rank from a peer; ``reason`` is None if the KV was loaded.

    A request that the scheduler half refuses to load has an outcome of 0 seconds. ``engine_id`` is the
    peer's, "" where any at the side channel ``channel`` would do, and both are empty if unknown. ``source``:
    ``lease``, a request that the peer held, or ``name``, rows that it keeps. ``seconds``: from the order to
    the end. ``lane``: what carried the bytes. ``identities``: the digests of this node's KV and of the
    peer's, and ``digest`` that of what was committed; both only where a receipt is wanted. ``on_device``: the
    peer had what it sent by name on its device.
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
    identities: tuple[str, str] = ("", "")
    digest: str = ""
    on_device: bool = False

    @property
    def peer(self) -> str:
        """The peer, as a text."""
        return prefill_name(self.engine_id, *self.channel)

    def __str__(self) -> str:
        took = f" after {duration(self.seconds)}" if self.seconds else ""
        if self.reason is None:
            return (
                f"request {self.request_id}: {self.num_tokens} tokens, {self.total_bytes} bytes, were loaded "
                f"from {self.peer} by {self.source}{took}"
            )
        return (
            f"request {self.request_id} was not loaded from {self.peer} by {self.source}{took}: "
            f"{self.reason.text} {self.reason.label}"
        )

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
    """Why a request was not loaded, who must act, and how; no ``remedy`` where nothing is to be done.

    The value is the ``reason`` label of ``kvconnect_failures_total``.
    """

    actor: Actor
    remedy: str

    ABORTED = "aborted", Actor.NONE
    OTHER_WEIGHTS = "other_weights", Actor.OPERATOR, "serve the same checkpoint and revision on both"
    OTHER_IDENTITY = (
        "other_identity",
        Actor.OPERATOR,
        "start both servers alike in it; `kvconnect doctor --peer` has every field",
    )
    OTHER_LAYOUT = (
        "layouts_differ",
        Actor.OPERATOR,
        "start both servers alike in it; `kvconnect doctor --peer` compares the caches",
    )
    OTHER_RELEASE = "releases_differ", Actor.OPERATOR, "install one release of kvconnect on both"
    LANE_REFUSED = (
        "transport_refused",
        Actor.OPERATOR,
        "mend the link (`kvconnect doctor`), or change require_lane or min_gb_per_s",
    )
    NOT_TRUSTED = "peer_not_trusted", Actor.OPERATOR, "list the address in allow_peers, if it is one of yours"
    WRONG_ROLE = (
        "wrong_role",
        Actor.OPERATOR,
        "set kv_role kv_producer on prefill nodes and kv_consumer on decode nodes",
    )
    OTHER_PROMPT = "prompt_differs", Actor.CLIENT, "send both nodes the prompt unchanged"
    PARAMETERS = (
        "parameters_refused",
        Actor.CLIENT,
        "give both nodes one key, and pass on kv_transfer_params unchanged",
    )
    NOT_HELD = "not_held", Actor.CLIENT, "send the request to the decode node within lease_s, and once"
    FETCHED_BEFORE = "fetched_before", Actor.CLIENT, "prefill again: a handle is good for one request"
    BLOCKS = "blocks_differ", Actor.DEVELOPER, "report it"
    LEASE_OVER = "lease_over", Actor.OPERATOR, "add decode nodes, or raise lease_s or lease_max_s"
    TIMEOUT = (
        "load_timeout",
        Actor.OPERATOR,
        "look at the link and the prefill node's load, or raise load_timeout_s",
    )
    OUT_OF_REACH = (
        "peer_out_of_reach",
        Actor.PEER,
        "start it; check host, port and the firewall (rank r listens on port + r)",
    )
    LOST = "lost_with_peer", Actor.PEER, "start it, if it does not come back"
    STOPPING = "peer_stopping", Actor.NONE, "have the router ask another one"
    BUSY = "peer_busy", Actor.PEER, "add decode nodes"
    PREFILL_ENDED = "prefill_ended", Actor.NONE
    EVICTED = "evicted", Actor.NONE
    REPLACED = "replaced_while_loaded", Actor.NONE
    ENGINE = "engine_failed", Actor.PEER, "see its log and `kvconnect doctor`"
    DIGEST = "digest", Actor.DEVELOPER, "report it, if it repeats: the fabric or the engine is faulty"
    EPOCH = "epoch", Actor.DEVELOPER, "report it, if it repeats"
    LANDING = "landing", Actor.DEVELOPER, "report it"
    PROTOCOL = "protocol", Actor.DEVELOPER, "report it with both logs"
    RESTORE = "offload_restore_failed", Actor.NONE, "see the lines before"
    INTERNAL = "not_planned", Actor.DEVELOPER, "report it, with the log at level DEBUG"

    def __new__(cls, value: str, actor: Actor, remedy: str = "") -> Cause:
        made = object.__new__(cls)
        made._value_, made.actor, made.remedy = value, actor, remedy
        return made

    def __call__(self, text: str) -> Reason:
        """A reason of this cause, with a text (cut to its longest length)."""
        return Reason(self, text[:_MOST_TEXT])


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

"""What one seed stands for: nodes, requests and faults. See ``draw`` for where they come from."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from kvconnect.config import ExtraConfig
from kvconnect.offload.tier import Content
from tests.simulator.engine import EngineFaults
from tests.simulator.memory import Model, Prompt, Shape
from tests.simulator.network import Weather

FAULTS = (
    "cuts",
    "partitions",
    "slow network",
    "stops",
    "kills",
    "drains",
    "engine",
    "aborts",
    "stalls",
    "repeats",
)
FORGERIES = ("", "expired", "of another key", "changed", "of another kind")
"""What may have been done to a handle: nothing, or what no node may take."""


class Hint(enum.StrEnum):
    """Sources that are of no use."""

    NOBODY = "nobody listens there"
    RANK_1 = "another rank"
    TOO_MANY = "too many"
    NO_ADDRESS = "no address"


REQUESTS_S = 8.0
"""For how long requests come."""
FAULTS_S = 12.0
"""For how long things go wrong."""


@dataclass
class ReplayPlan:
    """Somebody presents at a decode node what another request was given, so long after that.

    ``forgery`` is one of ``FORGERIES``; empty for the parameters as they are.
    """

    number: int
    host: str
    after_s: float
    forgery: str = ""


@dataclass
class HandlePlan:
    """How handles are made and read; without it nothing signs them, and none expires.

    ``secret`` is empty where they are not signed. ``skew_s`` is how far each host's clock is ahead.
    ``is_listed``: the nodes are known by a list of their hosts, and not by what handles name alone.
    """

    secret: bytes
    skew_s: dict[str, float]
    is_listed: bool
    replays: list[ReplayPlan] = field(default_factory=list)


@dataclass
class KeepPlan:
    """What a node keeps in host memory by name: so many ``rows`` of each cache group.

    Names are made by ``hashing`` for every ``name_tokens``, and what they stand for is made with ``weights``:
    0 for those that all others have. States and windows are kept every ``checkpoint`` tokens.
    ``tokens_per_s`` is how fast the node takes itself to compute prompts, 0 where it does not know. The
    sessions of a tenant may pin ``pin_quota``; what names a tenant is ``tenant_key``, or the salt if that is
    empty. It ``shares`` what its device's prefix cache has. There is a disk if it has ``disk_bytes``: by rank
    what is on it, also after a restart. KV of requests that wait for blocks for ``park_after_s`` is parked,
    in ``park_share`` of the rows.
    """

    rows: int
    name_tokens: int
    hashing: int = 0
    weights: int = 0
    checkpoint: int = 0
    tokens_per_s: float = 0.0
    pin_quota: float = 0.25
    tenant_key: str = ""
    shares: bool = False
    disk_bytes: int = 0
    park_share: float = 0.0
    park_after_s: float = 0.0
    on_disk: dict[int, OrderedDict[Content, bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionPlan:
    """What a request asks to be done with the KV of a session: actions, each a kind and a payload.

    ``in_params``: they come in ``kv_transfer_params``, not as fields of the request. ``is_garbage``: they
    cannot be read.
    """

    tenant: str
    session_id: str
    actions: tuple[tuple[str, dict[str, Any]], ...]
    in_params: bool = True
    is_garbage: bool = False

    @property
    def envelope(self) -> Any:
        if self.is_garbage:
            return "what is this"
        actions = [
            {"action_id": f"a{number}", "action_type": kind, "action_version": "1", "payload": payload}
            for number, (kind, payload) in enumerate(self.actions)
        ]
        return {"protocol_version": "1", "message_id": self.session_id, "actions": actions}

    def session_of(self, payload: dict[str, Any]) -> tuple[str, str]:
        """Which session an action is about."""
        return self.tenant, payload.get("session_id", self.session_id)


@dataclass
class NodePlan:
    """One host and the node that is started on it.

    ``step_tokens`` bounds what a step computes, ``chunk_tokens`` what it computes of one request.
    ``kernel_s`` is what the device takes for a token or a chunk. ``keeps_engine_id`` and ``keeps_ports``: so
    it is after a restart. ``is_stranger``: it lies, and writes to slots that it was not granted.
    ``longest_tokens`` is what a request has at most; 0 where no pool is small. ``runs_ahead``: it begins a
    step before it has the results of the last. ``reuses_windows``: what blocks of a window hold is taken for
    prompts that begin alike; otherwise these are restored or pulled.
    """

    host: str
    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    model: Model
    shape: Shape
    world_size: int
    num_blocks: int
    extra: ExtraConfig
    slot_bytes: int
    scratch_bytes: int
    step_tokens: int
    chunk_tokens: int
    step_s: float
    kernel_s: float
    max_bytes: int
    max_batches: int
    engine_faults: EngineFaults
    recomputes: bool
    keeps_engine_id: bool
    keeps_ports: bool
    runs_ahead: bool
    is_stranger: bool = False
    handles: HandlePlan | None = None
    longest_tokens: int = 0
    reuses_windows: bool = False
    keeps: KeepPlan | None = None


@dataclass
class RequestPlan:
    """One client's request. ``leaves_s`` is how long after its start the client goes away, if it does.

    ``copies``: so many answers are wanted of one prefill. ``flow``: who is asked when; ``local`` is served
    by the decode node alone. ``is_strange``: its KV comes from a stranger, and may be anything. ``sources``
    are hosts that its parameters name, or a ``Hint``. ``turn_of``: what the answer of this request says of
    sources is passed on.
    """

    number: int
    start_s: float
    flow: Literal["sequential", "parallel", "local"]
    prompt: Prompt
    max_tokens: int
    prefill: str
    decode: str
    copies: int = 1
    leaves_s: float | None = None
    forward_s: float = 0.01
    is_strange: bool = False
    sources: tuple[str, ...] = ()
    turn_of: int | None = None
    session: SessionPlan | None = None


@dataclass
class FaultPlan:
    """Something that goes wrong, and for how long.

    ``aim``: it waits for the next batch that this host gives to its engine, and comes while that is under
    way.
    """

    start_s: float
    kind: str
    host: str
    other: str = ""
    lasts_s: float = 0.0
    aim: str = ""


@dataclass
class Scenario:
    seed: int
    theme: str
    model: Model
    weather: Weather
    nodes: list[NodePlan]
    requests: list[RequestPlan]
    faults: list[FaultPlan]
    kinds: list[str] = field(default_factory=list)
    handles: HandlePlan | None = None

    @property
    def has_stranger(self) -> bool:
        """One of the nodes keeps to no rule."""
        return any(node.is_stranger for node in self.nodes)

    def describe(self) -> dict[str, Any]:
        """What is special about it, in a few words."""
        replays = () if self.handles is None else self.handles.replays
        return {
            "theme": self.theme,
            "model": self.model.name,
            "nodes": " ".join(f"{node.host}x{node.world_size}" for node in self.nodes),
            "blocks": " ".join(
                f"{node.shape.block_tokens}/{node.shape.kernel_tokens}" for node in self.nodes
            ),
            "roles": "both" if self.nodes[0].role == "kv_both" else "one each",
            "presented again": ", ".join(replay.forgery or "as it is" for replay in replays) or "none",
            "nodes that keep KV": sum(node.keeps is not None for node in self.nodes),
            "requests of sessions": sum(request.session is not None for request in self.requests),
            "requests": len(self.requests),
            "faults": ", ".join(self.kinds) or "none",
        }

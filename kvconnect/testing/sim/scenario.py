"""What one seed stands for: nodes, requests and faults. See ``draw`` for where they come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvconnect.config import ExtraConfig
from kvconnect.testing.sim.content import Prompt
from kvconnect.testing.sim.engine import EngineFaults
from kvconnect.testing.sim.network import Weather
from kvconnect.testing.sim.shapes import Model, Shape

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
REQUESTS_S = 8.0
"""For how long requests come."""
FAULTS_S = 12.0
"""For how long things go wrong."""


@dataclass
class NodePlan:
    """One host and the node that is started on it.

    ``step_tokens`` bounds what a step computes, ``chunk_tokens`` what it computes of one request.
    ``kernel_s`` is what the device takes for a token or a chunk. ``keeps_engine_id`` and ``keeps_ports``: so
    it is after a restart.
    """

    host: str
    role: Literal["kv_producer", "kv_consumer"]
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
    max_copies: int
    max_bytes: int
    max_batches: int
    engine_faults: EngineFaults
    recomputes: bool
    keeps_engine_id: bool
    keeps_ports: bool


@dataclass
class RequestPlan:
    """One client's request. ``leaves_s`` is how long after its start the client goes away, if it does.

    ``copies``: so many answers are wanted of one prefill. ``flow``: who is asked when; ``local`` is served
    by the decode node alone.
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
    """A whole run."""

    seed: int
    theme: str
    model: Model
    weather: Weather
    nodes: list[NodePlan]
    requests: list[RequestPlan]
    faults: list[FaultPlan]
    kinds: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """What is special about it, in a few words."""
        first = self.nodes[0].extra
        return {
            "theme": self.theme,
            "model": self.model.name,
            "path": first.path,
            "nodes": " ".join(f"{node.host}x{node.world_size}" for node in self.nodes),
            "blocks": " ".join(
                f"{node.shape.block_tokens}/{node.shape.kernel_tokens}" for node in self.nodes
            ),
            "requests": len(self.requests),
            "faults": ", ".join(self.kinds) or "none",
        }

"""Draws the scenario of a seed: from one generator of random numbers, in one order, but for its twists."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from kvconnect.config import ExtraConfig
from tests.simulator.content import Prompt
from tests.simulator.engine import EngineFaults
from tests.simulator.network import Weather
from tests.simulator.scenario import (
    FAULTS,
    REQUESTS_S,
    FaultPlan,
    NodePlan,
    RequestPlan,
    Scenario,
)
from tests.simulator.shapes import MODELS, Model, Shape
from tests.simulator.twists import twist


@dataclass(frozen=True)
class Theme:
    """What some seeds have in common, so that what is rare elsewhere is not rare everywhere.

    What is empty or None is drawn. ``is_small``: P has room for little more than one prompt, and computes
    it in small steps.
    """

    name: str
    weight: float
    kinds: tuple[str, ...] = ()
    counts: tuple[int, int] | None = None
    flows: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (3, 9, 16, 24, 40)
    forward_s: tuple[float, ...] = (0.001, 0.001, 0.1, 1.0)
    is_small: bool = False
    busy: float = 0.0
    times: dict[str, float] = field(default_factory=dict)


THEMES = (
    Theme("any", 0.75),
    # Prompts that are sent while they are computed, and lose their blocks meanwhile.
    Theme(
        "streams",
        0.15,
        kinds=("stalls",),
        counts=(1, 1),
        flows=("parallel",),
        lengths=(24, 40),
        forward_s=(0.001,),
        is_small=True,
    ),
    # Leases that end while the library goes on with what it said that it failed at.
    Theme("busy", 0.1, kinds=("engine",), busy=0.5, times={"lease_s": 1.5, "load_timeout_s": 6.0}),
)


def draw_scenario(seed: int, rng: random.Random) -> Scenario:
    """The run of a seed."""
    kinds = [] if rng.random() < 0.15 else rng.sample(FAULTS, rng.choice((1, 1, 2, 2, 3, 5)))
    model = rng.choice(MODELS)
    theme = rng.choices(THEMES, [theme.weight for theme in THEMES])[0]
    kinds += [kind for kind in theme.kinds if kind not in kinds]
    weather = Weather(
        delay_s=rng.choice((0.0002, 0.002, 0.02)),
        jitter_s=rng.choice((0.0, 0.001, 0.05)),
        slow=0.1 if "slow network" in kinds else 0.0,
        slow_s=rng.choice((0.3, 2.0)),
        repeats=0.5 if "repeats" in kinds else 0.0,
    )
    times = _draw_times(rng, calm=not kinds) | theme.times
    weather.heartbeat_s = max(times["peer_timeout_s"], 4.0)
    nodes = _draw_nodes(rng, model, times, kinds, theme)
    requests = _draw_requests(rng, nodes, theme, aborts="aborts" in kinds)
    faults = _draw_faults(rng, kinds, nodes)
    scenario = Scenario(seed, theme.name, model, weather, nodes, requests, faults, kinds)
    twist(scenario)
    return scenario


def _draw_times(rng: random.Random, calm: bool) -> dict[str, float]:
    transfer_s = rng.choice((2.0, 5.0))
    load_s = rng.choice((6.0, 12.0)) if not calm else 60.0
    return {
        "lease_s": rng.choice((3.0, 8.0, 20.0)) if not calm else 60.0,
        "handshake_timeout_s": rng.choice((1.0, 3.0)),
        "transfer_timeout_s": transfer_s,
        "load_timeout_s": load_s,
        "peer_timeout_s": rng.choice((2.0, 5.0)),
        "quarantine_s": transfer_s + rng.choice((0.5, 5.0)),
        "early_fetch_s": rng.choice((1.0, 4.0)) if not calm else 30.0,
    }


def _draw_nodes(
    rng: random.Random,
    model: Model,
    times: dict[str, float],
    kinds: list[str],
    theme: Theme,
) -> list[NodePlan]:
    counts = theme.counts or rng.choice(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)))
    ranks = rng.choice(((1, 1), (1, 1), (1, 1), (2, 2), (2, 1), (1, 2)))
    shapes = _draw_shapes(rng, model)
    small = theme.is_small or (rng.random() < 0.4 and bool(kinds))
    faults = _draw_engine(rng, times, kinds, theme)
    extra = _draw_config(rng, times, theme, small)
    nodes = []
    for side, count, world_size, shape in (
        ("P", counts[0], ranks[0], shapes[0]),
        ("D", counts[1], ranks[1], shapes[1]),
    ):
        for number in range(count):
            tokens = rng.choice((48, 64) if theme.is_small else (48, 64, 96)) if small else 400
            if theme.is_small and side == "D":
                tokens = 400
            nodes.append(
                NodePlan(
                    host=f"{side}{number}",
                    role="kv_producer" if side == "P" else "kv_consumer",
                    model=model,
                    shape=shape,
                    world_size=world_size,
                    num_blocks=1 + len(model.kinds) * tokens // shape.block_tokens + rng.randrange(7),
                    extra=extra,
                    slot_bytes=rng.choice((256, 256, 512, 1024)),
                    scratch_bytes=rng.choice((0, 1024)),
                    step_tokens=rng.choice((16, 64)),
                    chunk_tokens=4 if theme.is_small else rng.choice((4, 8, 64)),
                    step_s=rng.choice((0.005, 0.03)),
                    kernel_s=rng.choice((0.0001, 0.002)),
                    # One choice more than is used: seeds that tests name go on to draw what they did.
                    max_bytes=rng.choice((3, 64)) and rng.choice((1024, 1 << 20)),
                    max_batches=rng.choice((1, 4, 8)),
                    engine_faults=faults,
                    recomputes=rng.random() < 0.5,
                    keeps_engine_id=rng.random() < 0.5,
                    keeps_ports=rng.random() < 0.7,
                    runs_ahead=rng.random() < 0.5,
                )
            )
    return nodes


def _draw_shapes(rng: random.Random, model: Model) -> tuple[Shape, Shape]:
    """How P and D keep the model."""
    block = rng.choice((4, 4, 8))
    split = rng.choice((1, 1, 2)) if not model.has("state") else 1
    first = Shape(block, block // split, rng.random() < 0.5)
    second = first
    if not model.has("state") and rng.random() < 0.4:
        other = rng.choice((4, 8, 16))
        second = Shape(other, other // rng.choice((1, 2)), rng.random() < 0.5)
    return first, second


def _draw_engine(rng: random.Random, times: dict[str, float], kinds: list[str], theme: Theme) -> EngineFaults:
    faults = EngineFaults(batch_s=rng.choice((0.0005, 0.005, 0.05)), late_s=times["quarantine_s"] * 0.5)
    if "stops" in kinds and rng.random() < 0.5:
        faults.resumes = 0.5
    if "engine" in kinds:
        for name in ("stall", "fail", "busy", "cut", "corrupt"):
            if rng.random() < 0.6:
                setattr(faults, name, rng.choice((0.02, 0.1, 0.3)))
        faults.busy = theme.busy or faults.busy
    return faults


def _draw_config(rng: random.Random, times: dict[str, float], theme: Theme, small: bool) -> ExtraConfig:
    shared: dict[str, Any] = {
        "engine": "memory",
        "insecure": True,
        "num_slots": rng.choice((1, 2, 4, 4)),
        "stream_min_tokens": 8 if theme.is_small else rng.choice((0, 8, 8)),
        "max_loads": rng.choice((1, 2, 256)),
        "max_leases": rng.choice((2, 4096)) if small else 4096,
        "max_peers": rng.choice((1, 2)) if small and rng.random() < 0.15 else 256,
        "max_inflight_bytes": rng.choice((256, 512, 1 << 20)),
        "lease_max_s": times["lease_s"] * rng.choice((1.0, 4.0)),
        "heartbeat_s": rng.choice((1.0, 3.0)),
        "drain_s": rng.choice((1.0, 5.0)),
        "retry_max_s": rng.choice((0.5, 4.0)),
        **times,
    }
    return ExtraConfig(**shared)


def _draw_requests(
    rng: random.Random, nodes: list[NodePlan], theme: Theme, aborts: bool
) -> list[RequestPlan]:
    prefills = [node.host for node in nodes if node.role == "kv_producer"]
    decodes = [node.host for node in nodes if node.role == "kv_consumer"]
    prefix_tokens = rng.choice((0, 8, 16))
    bursts = [REQUESTS_S * rng.random() ** 2 for _ in range(1 if theme.is_small else rng.choice((1, 2, 6)))]
    flows = theme.flows or rng.choice(
        (("sequential",), ("parallel",), ("sequential", "parallel"), ("sequential", "parallel", "local"))
    )
    requests = []
    for number in range(rng.choice((6, 9) if theme.is_small else (2, 4, 6, 9))):
        length = rng.choice(theme.lengths)
        shared = min(prefix_tokens, length - 1) if rng.random() < 0.5 else 0
        request = RequestPlan(
            number=number,
            start_s=rng.choice(bursts) + 0.05 * rng.random(),
            flow=rng.choice(flows),  # type: ignore[arg-type]
            prompt=Prompt(1000 + number, length, 1 + rng.randrange(2), shared),
            max_tokens=rng.choice((1, 2, 5)),
            prefill=rng.choice(prefills),
            decode=rng.choice(decodes),
            copies=2 if rng.random() < 0.1 else 1,
            forward_s=rng.choice(theme.forward_s),
        )
        if aborts and rng.random() < 0.4:
            request.leaves_s = rng.choice((0.01, 0.3, 3.0)) * rng.random()
        requests.append(request)
    return requests


def _draw_faults(rng: random.Random, kinds: list[str], nodes: list[NodePlan]) -> list[FaultPlan]:
    faults = []
    hosts = [node.host for node in nodes]
    prefills = [host for host in hosts if host.startswith("P")]
    decodes = [host for host in hosts if host.startswith("D")]
    for kind, most, lengths in (
        ("cuts", 4, (0.0,)),
        ("partitions", 2, (0.3, 3.0, 12.0)),
        ("stops", 2, (0.5, 6.0, 25.0)),
        ("kills", 2, (0.05, 1.0, 6.0)),
        ("stalls", 2, (1.0, 10.0)),
        ("drains", 1, (0.1, 3.0)),
    ):
        if kind not in kinds:
            continue
        for _ in range(rng.randint(1, most)):
            host, other = rng.choice(prefills), rng.choice(decodes)
            aim = host if rng.random() < 0.5 and kind != "drains" else ""
            if kind in ("stops", "kills", "stalls") and rng.random() < 0.5:
                host = rng.choice(decodes)
            faults.append(
                FaultPlan(
                    start_s=(REQUESTS_S + 2) * rng.random() ** 1.5,
                    kind=kind,
                    host=host,
                    other=other,
                    lasts_s=rng.choice(lengths) * (0.5 + rng.random()),
                    aim=aim,
                )
            )
    return sorted(faults, key=lambda fault: fault.start_s)

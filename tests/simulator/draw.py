"""Draws the scenario of a seed: from one generator of random numbers, in one order, but for its twists.

Twists are what a scenario may have besides: nodes of both roles, replayed handles, a stranger, clients that
leave, pulls by name, sessions. Each is drawn from a stream of its own, after the scenario: seeds without it
stay what they were.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvconnect.config import ExtraConfig
from kvconnect.offload.scheduler.sessions import MOST_TTL_S
from tests.simulator.engine import EngineFaults
from tests.simulator.memory import MODELS, Model, Prompt, Shape
from tests.simulator.network import Weather
from tests.simulator.scenario import (
    FAULTS,
    FORGERIES,
    REQUESTS_S,
    FaultPlan,
    HandlePlan,
    Hint,
    KeepPlan,
    NodePlan,
    ReplayPlan,
    RequestPlan,
    Scenario,
    SessionPlan,
)


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


STRANGER = "X0"
"""The host of the node that lies and writes where it should not."""

LEAVERS = "leavers"
"""Clients leave, and nothing else goes wrong."""

_FIRST_TEXT = 50_000
"""Texts of what a stranger computes: nobody else's prompt begins like them."""
_BOTH, _HANDLES, _STRANGER, _LEAVERS, _PULLS = 0.15, 0.2, 0.12, 0.4, 0.4
_SESSIONS = 0.45
"""Of the seeds with pulls."""
_WINDOWS = 0.3
_WALLS = 0.12
_SMALL, _SMALL_AND_CALM = 0.1, 0.5
"""Where nothing else goes wrong it is seen at once that nothing moves."""


def twist(scenario: Scenario) -> None:
    """Add what else is drawn for a seed."""
    for name, share, add in (
        ("both", _BOTH, _make_both),
        ("kept", _PULLS, add_pulls),
        ("handles", _HANDLES, _add_handles),
        ("stranger", _STRANGER, _add_stranger),
        ("leavers", _LEAVERS, _add_leavers),
        ("sessions", _SESSIONS, add_sessions),
        ("windows", _WINDOWS, _reuse_windows),
        # Last, since all requests must have room. A small scenario has no walls.
        ("small", _SMALL if scenario.kinds else _SMALL_AND_CALM, _make_small),
        ("walls", _WALLS, add_walls),
    ):
        # Text seeds a generator alike in every process.
        rng = random.Random(f"{scenario.seed} {name}")
        if rng.random() < share:
            add(scenario, rng)


def _make_both(scenario: Scenario, rng: random.Random) -> None:
    """Every node prefills for others and decodes what others prefilled."""
    scenario.nodes = [replace(node, role="kv_both") for node in scenario.nodes]
    hosts = [node.host for node in scenario.nodes]
    for request in scenario.requests:
        if rng.random() < 0.5:
            request.prefill, request.decode = request.decode, request.prefill
    for fault in scenario.faults:
        if fault.aim and rng.random() < 0.5:
            fault.aim = rng.choice(hosts)


def _reuse_windows(scenario: Scenario, rng: random.Random) -> None:
    """Nodes take what is in a window from the device, too."""
    for node in scenario.nodes:
        node.reuses_windows = True


def _make_small(scenario: Scenario, rng: random.Random) -> None:
    """All nodes have room for 4 to 12 blocks of each kind, and most requests ask both nodes at once."""
    if any(node.role == "kv_both" for node in scenario.nodes if not node.is_stranger):
        # Two nodes that are full of what they hold for each other wait for leases, whoever asks when.
        return
    rooms = []
    for node in scenario.nodes:
        blocks = rng.randint(4, 12)
        node.num_blocks = 1 + blocks * len(scenario.model.kinds)
        rooms.append(blocks * node.shape.block_tokens)
    most = max(request.max_tokens for request in scenario.requests)
    longest = min(rooms) - most
    begin_s = min(request.start_s for request in scenario.requests)
    for request in scenario.requests:
        length = rng.choice((longest, max(3, longest // 2), rng.randint(3, longest)))
        shared = min(request.prompt.prefix_tokens, length - 1)
        request.prompt = replace(request.prompt, num_tokens=length, prefix_tokens=shared)
        if scenario.handles is None:
            # Otherwise somebody may present again what only one of the flows has.
            request.flow = "parallel" if rng.random() < 0.75 else "sequential"
        request.start_s = begin_s + 0.5 * rng.random()
    for node in scenario.nodes:
        node.longest_tokens = longest + most


_WALL_TEXT = 80_000


def add_walls(scenario: Scenario, rng: random.Random) -> None:
    """Decode nodes have room for one or two requests, and host memory for the KV of some that wait."""
    honest_nodes = [node for node in scenario.nodes if not node.is_stranger]
    if any(node.role == "kv_both" or node.longest_tokens for node in honest_nodes):
        return
    begin_s = min(request.start_s for request in scenario.requests)
    honest = [request for request in scenario.requests if not request.is_strange]
    for other in rng.choices(honest, k=rng.choice((2, 4, 8))):
        number = len(scenario.requests)
        prompt = Prompt(_WALL_TEXT + number, rng.choice((9, 16, 24, 40)))
        flow = other.flow if rng.random() < 0.3 else "sequential"
        scenario.requests.append(replace(other, number=number, prompt=prompt, flow=flow, turn_of=None))
    for request in scenario.requests:
        request.start_s = begin_s + 0.5 * rng.random()
        if request.decode != STRANGER:
            # Whose room is that of a prefill node.
            request.max_tokens = rng.choice((1, 5, 20, 40))
    longest = max(request.prompt.num_tokens + request.max_tokens for request in scenario.requests)
    share, after_s = rng.choice((0.2, 0.5, 1.0, 1.0)), rng.choice((0.0, 0.02, 0.3))
    for node in scenario.nodes:
        rows = rng.choice((12, 40, 200))
        node.keeps = node.keeps or KeepPlan(
            rows, node.shape.block_tokens, park_share=share, park_after_s=after_s
        )
        node.longest_tokens = longest
        if node.role == "kv_consumer":
            blocks = -(-longest // node.shape.block_tokens) + 1
            node.num_blocks = 1 + blocks * len(scenario.model.kinds) * rng.choice((1, 2))


def _add_handles(scenario: Scenario, rng: random.Random) -> None:
    """Handles that are signed and expire by clocks which differ, and some that are presented by others."""
    handles = HandlePlan(
        secret=b"a secret of this cluster" if rng.random() < 0.75 else b"",
        skew_s={node.host: 25.0 * (2 * rng.random() - 1) for node in scenario.nodes},
        # Where nothing goes wrong everything must work: with an empty list some routers cannot vouch.
        is_listed=not scenario.kinds or rng.random() < 0.75,
    )
    decodes = [node.host for node in scenario.nodes if node.role != "kv_producer"]
    shared = [request for request in scenario.requests if request.flow != "local"]
    for _ in range(rng.randrange(4) if shared else 0):
        request = rng.choice(shared)
        # Whoever presents a handle that is good takes it from whom it was for.
        forgeries = FORGERIES[1:] if not scenario.kinds or rng.random() < 0.5 else FORGERIES
        forgery = rng.choice(forgeries) if request.flow == "sequential" else ""
        if forgery or scenario.kinds:
            handles.replays.append(
                ReplayPlan(request.number, rng.choice(decodes), rng.choice((0.0, 0.1, 3.0)), forgery)
            )
    scenario.handles = handles
    for node in scenario.nodes:
        node.handles = handles
    if any(not replay.forgery for replay in handles.replays):
        scenario.kinds.append("replays")


def _add_stranger(scenario: Scenario, rng: random.Random) -> None:
    """A node with a key that some requests name, and that keeps to no rule."""
    model = next(node for node in scenario.nodes if node.host.startswith("P"))
    stranger: NodePlan = replace(
        model,
        host=STRANGER,
        role="kv_both",
        engine_faults=EngineFaults(batch_s=model.engine_faults.batch_s),
        is_stranger=True,
    )
    honest = list(scenario.requests)
    for number in range(rng.randint(1, 4)):
        # At the same time as somebody else's, and at the same node.
        other, is_fetched = rng.choice(honest), rng.random() < 0.8
        scenario.requests.append(
            RequestPlan(
                number=len(scenario.requests),
                start_s=other.start_s + 0.05 * rng.random(),
                flow=rng.choice(("sequential", "parallel")),
                prompt=Prompt(_FIRST_TEXT + number, rng.choice((3, 9, 16, 24, 40))),
                max_tokens=rng.choice((1, 5)),
                prefill=STRANGER if is_fetched else model.host,
                decode=other.decode if is_fetched else STRANGER,
                is_strange=True,
            )
        )
    if model.keeps is not None:
        _add_strange_pulls(scenario, rng)
    if scenario.handles is not None:
        scenario.handles.skew_s[STRANGER] = 0.0
        for replay in scenario.handles.replays:
            if rng.random() < 0.3:
                replay.host = STRANGER
    scenario.nodes.append(stranger)
    scenario.kinds.append("stranger")


def _add_strange_pulls(scenario: Scenario, rng: random.Random) -> None:
    """Others ask the stranger by name for what it may have computed; nobody else's KV has these names."""
    strange = [request for request in scenario.requests if request.is_strange]
    hosts = [node.host for node in scenario.nodes]
    for request in strange:
        request.sources = (STRANGER,)
    for _ in range(rng.randint(1, 5)):
        other = rng.choice(strange)
        scenario.requests.append(
            replace(
                other,
                number=len(scenario.requests),
                start_s=other.start_s + rng.random(),
                flow="local",
                decode=rng.choice((STRANGER, *hosts)),
            )
        )


def _add_leavers(scenario: Scenario, rng: random.Random) -> None:
    """Clients that leave while their KV is on its way, over an engine that cannot call bytes back.

    Only where nothing else goes wrong: then all others must be served. What a client leaves behind between
    its two legs is nobody's until the lease ends, so that leases are short beside the time of a load.
    """
    if scenario.kinds:
        return
    for request in scenario.requests:
        if rng.random() < 0.4:
            request.leaves_s = rng.choice((0.1, 0.5, 1.0)) * rng.random()
    for node in scenario.nodes:
        node.extra = msgspec.structs.replace(node.extra, lease_s=4.0, num_slots=4)
        # Many batches, and several of them under way to one peer when one is cancelled.
        node.slot_bytes, node.max_batches = 256, 8
        node.engine_faults.settles = True
        node.engine_faults.batch_s = rng.choice((0.05, 0.3))
    scenario.kinds.append(LEAVERS)


SOURCE = "S0"
"""The host of a plain server that others may ask, perhaps one whose KV is useless to them."""

_BUSY_TEXT = 40_000
_LONGEST_TOKENS = 40
"""All nodes have room for it."""


def add_pulls(scenario: Scenario, rng: random.Random) -> None:
    """All nodes keep, ask and answer; some prompts are used again, longer or as they are, elsewhere too."""
    if rng.random() < 0.6:
        scenario.nodes.append(_plain_server(rng, rng.choice(scenario.nodes)))
    ports, port = {}, 1
    for node in scenario.nodes:
        ports[node.host], port = f"{node.host}:{port}", port + node.world_size
    find_s = rng.choice((0.05, 0.5, 0.5, 3.0))
    for node in scenario.nodes:
        others = [address for host, address in ports.items() if host != node.host]
        sources = rng.sample(others, rng.randint(0, len(others))) if rng.random() < 0.7 else []
        if rng.random() < 0.15:
            sources.insert(0, "nobody:9998")
        node.role = "kv_both"
        # So much moves in the time of one batch: links that it pays to pull over.
        node.scratch_bytes, node.max_bytes = 1 << 16, 1 << 20
        node.keeps = node.keeps or _keeps(rng, node)
        node.extra = msgspec.structs.replace(node.extra, sources=tuple(sources), find_s=find_s)
        if not scenario.kinds:
            # What was found may be gone when it is fetched: a miss, and no failure by this policy.
            node.recomputes = True
    hosts = list(ports)
    for request in scenario.requests:
        longer = rng.choice((0, 8, 16, 24))
        tokens = min(_LONGEST_TOKENS, request.prompt.num_tokens + longer)
        request.prompt = replace(request.prompt, num_tokens=tokens)
    for _ in range(rng.choice((4, 8, 12))):
        scenario.requests.append(_again(rng, scenario, hosts))
    if rng.random() < 0.5:
        _make_busy(scenario, rng, hosts)
    for request in scenario.requests:
        if rng.random() < 0.3:
            request.sources += tuple(rng.sample([*hosts, *Hint], rng.choice((1, 1, 2, 4))))
    for node in scenario.nodes:
        assert node.keeps is not None
        # Not drawn, so that all else of a seed is as it was.
        node.keeps.shares = (len(scenario.requests) + node.num_blocks) % 2 == 0


def _make_busy(scenario: Scenario, rng: random.Random, hosts: list[str]) -> None:
    """Rows are few, fetches take long, and other prompts want the rows meanwhile."""
    for node in scenario.nodes:
        assert node.keeps is not None
        node.keeps.rows = rng.choice((4, 6, 10))
        node.slot_bytes = 256
        node.engine_faults.batch_s = 0.05
        node.max_batches = 1
    for other in [request for request in scenario.requests if request.sources] * 2:
        scenario.requests.append(
            replace(
                other,
                number=len(scenario.requests),
                start_s=other.start_s + rng.choice((0.1, 0.3)) * (0.3 + rng.random()),
                flow="local",
                prompt=Prompt(_BUSY_TEXT + len(scenario.requests), rng.choice((24, _LONGEST_TOKENS))),
                decode=rng.choice([host for host in other.sources if host in hosts] or hosts),
                sources=(),
                turn_of=None,
            )
        )


def _keeps(rng: random.Random, node: NodePlan) -> KeepPlan:
    tokens = node.shape.block_tokens
    return KeepPlan(
        rows=rng.choice((6, 24, 200, 200)),
        name_tokens=tokens if rng.random() < 0.85 else tokens // 2,
        checkpoint=rng.choice((0, tokens)),
        tokens_per_s=rng.choice((0.0, 0.0, 30.0, 1e5)),
    )


def _plain_server(rng: random.Random, like: NodePlan) -> NodePlan:
    """Of the same model, and perhaps of other weights, or with names of another kind."""
    made: NodePlan = replace(like, host=SOURCE)
    made.keeps = _keeps(rng, made)
    kind = rng.random()
    if kind < 0.25:
        made.keeps.weights = 1
    elif kind < 0.5:
        made.keeps.hashing = 1
    return made


def _again(rng: random.Random, scenario: Scenario, hosts: list[str]) -> RequestPlan:
    """A prompt that was there before, or soon will be, and what follows it in a conversation."""
    other = rng.choice(scenario.requests)
    longer = rng.choice((0, 0, 1, 8, 16))
    prompt: Prompt = replace(other.prompt, num_tokens=min(_LONGEST_TOKENS, other.prompt.num_tokens + longer))
    had = [other.decode] if other.flow == "local" else [other.prefill, other.decode]
    later_s = rng.choice((0.01, 0.5, 1.0, 2.0, 4.0)) * (0.5 + rng.random())
    is_pair = other.prefill != other.decode and other.flow != "local" and rng.random() < 0.4
    return RequestPlan(
        number=len(scenario.requests),
        start_s=min(REQUESTS_S + 1, other.start_s + later_s),
        flow=other.flow if is_pair else "local",
        prompt=prompt,
        max_tokens=rng.choice((1, 2, 5)),
        prefill=other.prefill,
        decode=other.decode if is_pair else rng.choice([host for host in hosts if host not in had] or hosts),
        forward_s=other.forward_s,
        sources=(rng.choice(had),) if rng.random() < 0.6 else (),
        turn_of=other.number if rng.random() < 0.5 else None,
    )


TENANT_KEY = "tenant"
_TENANTS = ("", "acme", "zoo")
_TALK_TEXT, _PRESS_TEXT = 60_000, 70_000
_DISK_BYTES = 1 << 20


def add_sessions(scenario: Scenario, rng: random.Random) -> None:
    """Conversations with hints beside the other requests, some of which have hints too."""
    keepers = [node for node in scenario.nodes if node.keeps is not None]
    if not keepers:
        return
    key = TENANT_KEY if rng.random() < 0.4 else ""
    quota = rng.choice((0.1, 0.25, 0.5, 0.5, 0.75, 1.0))
    has_disk, is_tight = rng.random() < 0.5, rng.random() < 0.7
    for node in keepers:
        assert node.keeps is not None
        rows = min(node.keeps.rows, rng.choice((8, 12, 24))) if is_tight else node.keeps.rows
        disk_bytes = _DISK_BYTES if has_disk else 0
        node.keeps = replace(
            node.keeps, rows=rows, pin_quota=quota, tenant_key=key, disk_bytes=disk_bytes, on_disk={}
        )
    for request in list(scenario.requests):
        if not request.is_strange and rng.random() < 0.25:
            request.session = _session(rng, rng.choice(_TENANTS), f"s{rng.randrange(3)}")
            if not key:
                request.prompt = replace(request.prompt, salt=request.session.tenant)
    hosts = [node.host for node in keepers if not node.is_stranger]
    for number in range(rng.randint(1, 4)):
        _add_talk(scenario, rng, rng.choice(hosts), number, has_salt=not key)
    for number in range(rng.choice((3, 6, 10))):
        prompt = Prompt(_PRESS_TEXT + number, rng.choice((16, 24, _LONGEST_TOKENS)))
        _add(scenario, rng.choice(hosts), (REQUESTS_S + 1) * rng.random(), prompt, rng.choice((1, 5)))
    # Some only announce their prompt. Drawn last, so that all else is as without them.
    for request in scenario.requests:
        session = request.session
        if session is not None and not session.is_garbage and request.flow == "local" and rng.random() < 0.2:
            payload = {
                "of": "prompt",
                **rng.choice(({}, {}, {"to": "host"}, {"to": "device"}, {"to": "disk"})),
            }
            request.session = replace(session, actions=(("prefetch", payload),))


def _add_talk(scenario: Scenario, rng: random.Random, host: str, number: int, *, has_salt: bool) -> None:
    """Turns of a conversation at one node: each prompt begins with what was there before, as a rule."""
    tenant = rng.choice(_TENANTS)
    prompt = Prompt(_TALK_TEXT + number, rng.choice((8, 12, 16)), salt=tenant if has_salt else "")
    start_s = 0.6 * REQUESTS_S * rng.random()
    for turn in range(rng.randint(2, 5)):
        session = _session(rng, tenant, f"s{rng.randrange(3) if rng.random() < 0.2 else number}")
        request = _add(scenario, host, start_s, prompt, rng.choice((1, 2, 5)))
        request.session = session
        if scenario.kinds and rng.random() < 0.1:
            request.leaves_s = rng.choice((0.05, 0.5)) * rng.random()
        longer = rng.choice((0, 1, 4, 8, 12))
        prompt = replace(prompt, num_tokens=min(_LONGEST_TOKENS, prompt.num_tokens + longer))
        if rng.random() < 0.15:
            # Another branch of the conversation, or another one in the same session.
            prompt = replace(prompt, text=_TALK_TEXT + 100 * (turn + 1) + number)
        start_s += rng.choice((0.05, 0.5, 2.0)) * (0.5 + rng.random())


def _add(scenario: Scenario, host: str, start_s: float, prompt: Prompt, max_tokens: int) -> RequestPlan:
    plan = RequestPlan(
        number=len(scenario.requests),
        start_s=min(start_s, REQUESTS_S + 1),
        flow="local",
        prompt=prompt,
        max_tokens=max_tokens,
        prefill=host,
        decode=host,
    )
    scenario.requests.append(plan)
    return plan


def _session(rng: random.Random, tenant: str, name: str) -> SessionPlan:
    if rng.random() < 0.04:
        return SessionPlan(tenant, name, (), in_params=rng.random() < 0.5, is_garbage=True)
    kinds = rng.choice(
        (("pin",), ("pin",), ("pin",), ("pin", "demote"), ("prefetch", "pin"), ("any",), ("any", "any"))
    )
    actions = tuple(_action(rng, kind) for kind in kinds)
    return SessionPlan(tenant, name, actions, in_params=rng.random() < 0.6)


def _action(rng: random.Random, kind: str) -> tuple[str, dict[str, Any]]:
    if kind == "any":
        kind = rng.choice(("release", "demote", "prefetch", "pin", "explode"))
    payload: dict[str, Any] = {}
    if kind == "pin":
        payload["ttl_s"] = rng.choice((0.3, 2.0, 6.0, 20.0, 2 * MOST_TTL_S))
    elif kind == "prefetch" and rng.random() < 0.3:
        payload["to"] = rng.choice(("device", "host", "disk"))
    if kind != "pin" and rng.random() < 0.3:
        payload["session_id"] = f"s{rng.randrange(4)}"
    if rng.random() < 0.03:
        payload["ttl_s"] = -1.0
    return kind, payload

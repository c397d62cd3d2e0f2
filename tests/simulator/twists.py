"""What a scenario may have besides: nodes of both roles, replayed handles, a stranger, leaving clients.

Each is drawn from a stream of its own, after the scenario: seeds without it stay what they were.
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec

from tests.simulator.content import Prompt
from tests.simulator.engine import EngineFaults
from tests.simulator.scenario import (
    FORGERIES,
    HandlePlan,
    NodePlan,
    ReplayPlan,
    RequestPlan,
    Scenario,
)
from tests.simulator.twist_pulls import add_pulls
from tests.simulator.twist_sessions import add_sessions

STRANGER = "X0"
"""The host of the node that lies and writes where it should not."""

LEAVERS = "leavers"
"""Clients leave, and nothing else goes wrong."""

_FIRST_TEXT = 50_000
"""Texts of what a stranger computes: nobody else's prompt begins like them."""
_BOTH, _HANDLES, _STRANGER, _LEAVERS, _PULLS = 0.15, 0.2, 0.12, 0.4, 0.4
_SESSIONS = 0.45
"""Of the seeds with pulls."""
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
        # Last, since all requests must have room.
        ("small", _SMALL if scenario.kinds else _SMALL_AND_CALM, _make_small),
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
        node.engine_faults.settle_s = 1.0
        node.engine_faults.batch_s = rng.choice((0.05, 0.3))
    scenario.kinds.append(LEAVERS)

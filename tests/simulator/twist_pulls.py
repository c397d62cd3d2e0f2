"""The twist of pulls: nodes that keep KV by name and ask one another for it, for prompts that were there."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec

from tests.simulator.content import Prompt
from tests.simulator.scenario import REQUESTS_S, Hint, KeepPlan, NodePlan, RequestPlan, Scenario

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

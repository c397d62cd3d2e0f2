"""The twist of sessions: requests pin, release, demote and prefetch what nodes keep, too little for all.

Conversations at one node pin what they have, others press, and some hints are of no use.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from kvconnect.offload.scheduler.sessions import MOST_TTL_S
from tests.simulator.content import Prompt
from tests.simulator.scenario import REQUESTS_S, RequestPlan, Scenario, SessionPlan

TENANT_KEY = "tenant"
_TENANTS = ("", "acme", "zoo")
_TALK_TEXT, _PRESS_TEXT = 60_000, 70_000
_LONGEST_TOKENS = 40
"""All nodes have room for it."""
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

"""First tokens of announced turns: ``python -m tests.vllm.measure_notices --help``.

One conversation after the other has a first turn, is driven off the device by others, is announced 500 ms
before its second turn, and that turn is timed to its first token; in turns with it one that never left the
device, one that comes unannounced, and one that was computed anew. Its KV is in host memory or on disk of its
own server, or in host memory of the other one. Every finding is a JSON line; nothing here asserts a time.

    python -m tests.vllm.measure_notices --cpu
    python -m tests.vllm.measure_notices --gpus 0,1
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.vllm.pairs import GPU_BLOCK, ask, command_line, named_variant, prepared, served
from tests.vllm.servers import Server, random_prompt, running
from tests.vllm.tiny_models import Recipe

AHEAD_S = 0.5
_KINDS = ("resident", "announced", "unannounced", "computed")
_POOL, _SMALL, _LARGE = 2.0, 2.85, 36.0
"""Tokens that a device and the servers' host memory have room for, in prompts of a first turn."""
_OTHERS = 2
"""Prompts, a little longer, that take the whole device and most of the smaller server's host memory."""


def notice(to: str) -> dict[str, Any]:
    """Parameters that announce a prompt."""
    action = {"action_id": "a", "action_type": "prefetch", "action_version": "1"}
    actions = [{**action, "payload": {"of": "prompt", "to": to}}]
    return {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": actions}}


def overwrite(server: Server, given: Any) -> None:
    """Drive everything else off the device."""
    for _ in range(_OTHERS):
        server.tokens(random_prompt(given.tokens * 19 // 18, random.getrandbits(30)), max_tokens=1)


def timed(kind: str, where: str, server: Server, other: Server, given: Any) -> tuple[float, str]:
    """One conversation's second turn: its time to the first token, and the outcome of its notice."""
    first, more = (random_prompt(length, random.getrandbits(30)) for length in (given.tokens, given.new))
    source = other if where == "peer" else server
    if kind != "computed":
        source.tokens(first, max_tokens=8)
    if where == "disk" and kind != "computed":
        time.sleep(0.3)
        overwrite(server, given)
    overwrite(server, given)
    if kind == "resident":
        server.tokens(first, max_tokens=8)
    outcome, began = "", time.perf_counter()
    if kind == "announced":
        answer = server.ask(first, kv_transfer_params=notice("device"))
        (done,) = answer["kv_transfer_params"]["kv_hint_results"]["actions"]
        outcome = f"{done['outcome']} {done.get('num_tokens', 0)}"
    else:
        # A server that has been idle for longer answers later: all have been for about as long.
        server.tokens([1, 2, 3], max_tokens=1)
    time.sleep(max(0.0, AHEAD_S - (time.perf_counter() - began)))
    return ask(server.url, [*first, *more], 4).first_token_s, outcome


def _servers(recipe: Recipe, disks: Path, logs: Path, given: Any) -> list[Server]:
    ports, made = [free_port(), free_port()], []
    block, token_bytes = (128, 4096) if given.cpu else (GPU_BLOCK, 147456)
    for number, room in enumerate((_SMALL, _LARGE)):
        offload = {"cpu_bytes": int(room * given.tokens * token_bytes), "pin_quota": 0.75}
        offload |= {"disk_path": str(disks / f"{number}"), "disk_bytes": given.disk_gib << 30}
        sources = [f"127.0.0.1:{ports[1 - number]}"]
        own = {"insecure": True, "port": ports[number], "sources": sources, "offload": offload}
        variant = named_variant(given.engine, {**own, **given.extra})
        config = variant.config("both", kv_load_failure_policy="recompute")
        options = ["--num-gpu-blocks-override", str(int(_POOL * given.tokens) // block)]
        options += ["--max-model-len", str(given.tokens * 19 // 18 + given.new + 64)]
        where = given.gpus.split(",")[number]
        made.append(served(recipe, logs, f"server{number}", where, config, given, options))
    return made


def main() -> None:
    given = command_line(
        __doc__,
        None,
        {
            "tokens": "of the first turn",
            "new": "tokens of the second turn beyond it",
            "place": "host, disk or peer, where the KV is; repeatable; all",
            "disk_gib": "of each server",
        },
        rounds=15,
        tokens=(1800, 8192),
        new=(60, 256),
        place=[],
        engine=("mooncake:tcp", "nixl"),
        extra={},
        gpus="0,1",
        chunk=(512, 8192),
        kv_gib=(1, 4),
        disk_gib=(4, 32),
    )
    with (
        tempfile.TemporaryDirectory() as disks,
        prepared(given, tiny="gqa", forks=True) as (recipe, logs, lines),
        running(*_servers(recipe, Path(disks), logs, given)) as (small, large),
    ):
        # The links are measured, and the caches warm.
        for _ in range(3):
            prompt = random_prompt(given.tokens, random.getrandbits(30))
            for server in (small, large):
                server.tokens(prompt)
        places = {"host": (large, small), "disk": (small, large), "peer": (small, large)}
        for where in given.place or places:
            found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
            outcomes: set[str] = set()
            for _ in range(given.rounds):
                for kind in _KINDS:
                    took_s, outcome = timed(kind, where, *places[where], given)
                    found[kind].append(took_s)
                    outcomes |= {outcome} if outcome else set()
            medians = {kind: statistics.median(times) for kind, times in found.items()}
            lines.write(
                "announced",
                where=where,
                outcomes=sorted(outcomes),
                ms={kind: round(1e3 * median, 1) for kind, median in medians.items()},
                over_resident={k: round(median / medians["resident"], 3) for k, median in medians.items()},
            )


if __name__ == "__main__":
    main()

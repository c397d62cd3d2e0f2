"""First tokens of announced turns: ``python -m tests.vllm.measure_notices --help``.

One conversation after the other has a first turn, is driven off the device by others, is announced 500 ms
before its second turn, and that turn is timed to its first token; in turns with it one that never left the
device, one that comes unannounced, and one that was computed anew. Its KV is in host memory or on disk of its
own server, or in host memory of the other one. Every finding is a JSON line; nothing here asserts a time.

    python -m tests.vllm.measure_notices --rounds 15
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from tests.ports import free_port
from tests.vllm.servers import Server, forked, random_prompt, running, transfer_config
from tests.vllm.tiny_models import write_model

AHEAD_S = 0.5
POOL = 28
OTHERS = 2
"""Prompts that take the whole pool, and most of the smaller server's host memory."""


def notice(to: str) -> dict:
    """Parameters that announce a prompt."""
    action = {"action_id": "a", "action_type": "prefetch", "action_version": "1"}
    actions = [{**action, "payload": {"of": "prompt", "to": to}}]
    return {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": actions}}


def first_token_s(server: Server, prompt: list[int]) -> float:
    """Seconds from the request to its first token, of a stream."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True}
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    began = time.perf_counter()
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = client.getresponse()
    answer.readline()
    took = time.perf_counter() - began
    answer.read()
    client.close()
    return took


def overwrite(server: Server, times: int = OTHERS) -> None:
    """Drive everything else off the device."""
    for _ in range(times):
        server.tokens(random_prompt(1900, random.getrandbits(30)), max_tokens=1)


def timed(kind: str, where: str, server: Server, other: Server, length: int, new: int) -> tuple[float, str]:
    """One conversation's second turn: its time to the first token, and the outcome of its notice."""
    first, more = random_prompt(length, random.getrandbits(30)), random_prompt(new, random.getrandbits(30))
    source = other if where == "peer" else server
    if kind != "computed":
        source.tokens(first, max_tokens=8)
    if where == "disk" and kind != "computed":
        time.sleep(0.3)
        overwrite(server)
    overwrite(server)
    if kind == "resident":
        server.tokens(first, max_tokens=8)
    outcome = ""
    if kind == "announced":
        began = time.perf_counter()
        answer = server.ask(first, kv_transfer_params=notice("device"))
        (done,) = answer["kv_transfer_params"]["kv_hint_results"]["actions"]
        outcome = f"{done['outcome']} {done.get('num_tokens', 0)}"
        time.sleep(max(0.0, AHEAD_S - (time.perf_counter() - began)))
    else:
        time.sleep(AHEAD_S)
    return first_token_s(server, [*first, *more]), outcome


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--length", type=int, default=1800, help="tokens of the first turn")
    parser.add_argument("--new", type=int, default=60, help="tokens of the second turn beyond it")
    parser.add_argument("--places", nargs="+", default=["host", "disk", "peer"])
    given = parser.parse_args()
    with forked(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, ports, made = write_model("gqa", folder), [free_port(), free_port()], []
        for number, cpu_bytes in enumerate((20 << 20, 256 << 20)):
            offload = {"cpu_bytes": cpu_bytes, "pin_quota": 0.75, "disk_path": str(folder / f"disk{number}")}
            config = transfer_config(
                "both",
                "mooncake",
                kv_load_failure_policy="recompute",
                insecure=True,
                port=ports[number],
                sources=[f"127.0.0.1:{ports[1 - number]}"],
                offload={**offload, "disk_bytes": 4 << 30},
            )
            options = ["--num-gpu-blocks-override", str(POOL), "--max-model-len", "2048"]
            made.append(
                Server(recipe, folder, f"{number}", f"{number}", config, options, {"PYTHONHASHSEED": "0"})
            )
        with running(*made) as (small, large):
            # The links are measured, and the caches warm.
            for _ in range(3):
                prompt = random_prompt(1800, random.getrandbits(30))
                for server in (small, large):
                    server.tokens(prompt)
            places = (("host", large, small), ("disk", small, large), ("peer", small, large))
            for where, server, other in (place for place in places if place[0] in given.places):
                found: dict[str, list[float]] = {}
                outcomes: set[str] = set()
                for _ in range(given.rounds):
                    for kind in ("resident", "announced", "unannounced", "computed"):
                        took, outcome = timed(kind, where, server, other, given.length, given.new)
                        found.setdefault(kind, []).append(took)
                        outcomes |= {outcome} if outcome else set()
                medians = {kind: statistics.median(times) for kind, times in found.items()}
                line = {"where": where, "outcomes": sorted(outcomes)}
                line |= {f"{kind}_ms": round(median * 1e3, 2) for kind, median in medians.items()}
                line |= {
                    f"{kind}_ratio": round(median / medians["resident"], 3)
                    for kind, median in medians.items()
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

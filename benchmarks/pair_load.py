"""What an idle connected node costs.

Seen from outside, over HTTP and the operating system's accounts, like the demo.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

from kvconnect.demo.children import Children
from kvconnect.demo.pair import ask, start_nodes, start_reference, start_router
from kvconnect.errors import KVConnectError


def bench_idle(*, engine: str, model: str, seconds: float) -> int:
    """Measure the processor time of idle nodes: one without a connector, and a pair that has met.

    Prints one JSON object; ``cores`` are fractions of one core. Returns the exit code, always 0.

    Raises:
        KVConnectError: a node did not start.
    """
    with tempfile.TemporaryDirectory(prefix="kvconnect-bench-") as folder, Children(Path(folder)) as children:
        nodes = start_nodes(children, engine, model)
        pair = start_router(children, engine, model, nodes)
        single = start_reference(children, model)
        single.wait_ready()
        for url in (single.url, pair.router.url):
            ask(url, model, list(range(1, 100)))
        time.sleep(1.0)
        watched = {"alone": single, "prefill": pair.prefill, "decode": pair.decode}
        before = {name: _cpu_seconds(child.pid) for name, child in watched.items()}
        started = time.monotonic()
        time.sleep(seconds)
        waited = time.monotonic() - started
        cores = {
            name: round((_cpu_seconds(child.pid) - before[name]) / waited, 4)
            for name, child in watched.items()
        }
    extra = {side: round(cores[side] - cores["alone"], 4) for side in ("prefill", "decode")}
    print(
        json.dumps(
            {
                "engine": engine,
                "model": model,
                "seconds": round(waited, 1),
                "cores": cores,
                "more_than_alone": extra,
            }
        )
    )
    return 0


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads so far.

    Raises:
        KVConnectError: this is no Linux, or the process is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise KVConnectError(f"the processor time of process {pid} cannot be read: {error}") from error
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

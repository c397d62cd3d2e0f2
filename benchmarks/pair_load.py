"""What an idle connected node costs.

Seen from outside, over HTTP and the operating system's accounts, like the demo.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import Options as BaseOptions
from benchmarks.options import option
from benchmarks.report import Report
from kvconnect.errors import KVConnectError
from kvconnect.node.children import Children
from kvconnect.node.pair_demo import ask, start_nodes, start_router


@dataclass(frozen=True)
class Options(BaseOptions):
    """The pair, and how long it is watched."""

    engine: str = option("nixl", "Engine of the pair.")
    model: str = option("gqa", "Model of the pair.")
    seconds: float = option(30.0, "How long to watch.", least=1.0)


def bench_idle(options: Options, report: Report) -> None:
    """Measure the processor time of idle nodes: one without a connector, and a pair that has met.

    ``cores`` are fractions of one core.

    Raises:
        KVConnectError: a node did not start.
    """
    engine, model = options.engine, options.model
    with tempfile.TemporaryDirectory(prefix="kvconnect-bench-") as folder, Children(Path(folder)) as children:
        serve = ("serve", "--model", model, "--port", "0")
        prefill, decode = start_nodes(children, engine, model, *serve)
        router = start_router(children, prefill, decode)
        single = children.start("single", *serve)
        single.wait_ready()
        for url in (single.url, router.url):
            ask(url, model, list(range(1, 100)))
        time.sleep(1.0)
        watched = {"alone": single, "prefill": prefill, "decode": decode}
        before = {name: _cpu_seconds(child.pid) for name, child in watched.items()}
        started = time.monotonic()
        time.sleep(options.seconds)
        waited = time.monotonic() - started
        cores = {
            name: round((_cpu_seconds(child.pid) - before[name]) / waited, 4)
            for name, child in watched.items()
        }
    extra = {side: round(cores[side] - cores["alone"], 4) for side in ("prefill", "decode")}
    report.add(
        {
            "engine": engine,
            "model": model,
            "seconds": round(waited, 1),
            "cores": cores,
            "more_than_alone": extra,
        }
    )


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

"""A worker's metrics in files that another process reads."""

from __future__ import annotations

import os
import subprocess
import sys

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

WRITES = """
from kvconnect.halves.multiprocess_metrics import MultiprocessMetrics
from kvconnect.metrics import Metrics

metrics = Metrics()
shown = MultiprocessMetrics(metrics.changes, rank=3)
for _ in range(2):
    metrics.failures.labels("digest").inc()
    metrics.leases.set(4)
    metrics.load_seconds.observe(0.5)
    metrics.streamed.inc(2)
    shown.update()
shown.update()
"""


def test_changes_are_added_where_another_process_reads_them(tmp_path):
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WRITES], env=environment, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    lines = generate_latest(registry).decode().splitlines()
    assert 'kvconnect_failures_total{reason="digest"} 2.0' in lines
    assert "kvconnect_streamed_requests_total 2.0" not in lines
    assert "kvconnect_streamed_requests_total 4.0" in lines
    assert "kvconnect_load_seconds_count 2.0" in lines
    assert [line for line in lines if line.startswith("kvconnect_leases_held{") and line.endswith("4.0")]

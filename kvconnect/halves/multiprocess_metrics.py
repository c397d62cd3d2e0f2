"""A worker's metrics for a serving stack whose ``/metrics`` another process serves, from shared files.

That is the multiprocess mode of ``prometheus_client``, which it enters at its import by the environment.
"""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvconnect.halves.worker_half import WorkerHalf
from kvconnect.metrics import FAMILIES, PREFIX

_EVERY_S = 1.0


class MultiprocessMetrics:
    """Adds the changes of a rank's metrics, once a second, on a thread of its own."""

    def __init__(self, worker: WorkerHalf, rank: int) -> None:
        self._worker, self._rank = worker, str(rank)
        # Values are written to the shared files, whichever registry lists them here.
        registry, self._families = CollectorRegistry(), {}
        for family in FAMILIES:
            name, text = f"{PREFIX}_{family.name}", f"{family.text}."
            made: Any
            if family.kind == "counter":
                made = Counter(name, text, family.labels, registry=registry)
            elif family.kind == "gauge":
                labels = ("rank", *family.labels)
                made = Gauge(name, text, labels, registry=registry, multiprocess_mode="mostrecent")
            else:
                made = Histogram(name, text, buckets=family.buckets, registry=registry)
            self._families[family.name] = made
        threading.Thread(target=self._run, name="kvconnect-metrics", daemon=True).start()

    def _run(self) -> None:
        stop = threading.Event()
        while not stop.wait(_EVERY_S):
            self.update()

    def update(self) -> None:
        """Add what has changed since the last call."""
        changes = self._worker.changes()
        if changes is None:
            return
        for name, numbers in changes.counters.items():
            for labels, growth in numbers.items():
                family = self._families[name]
                (family.labels(*labels.split(",")) if labels else family).inc(growth)
        for name, values in changes.gauges.items():
            for labels, value in values.items():
                own = labels.split(",") if labels else ()
                self._families[name].labels(self._rank, *own).set(value)
        for name, observed in changes.observed.items():
            for value in observed:
                self._families[name].observe(value)

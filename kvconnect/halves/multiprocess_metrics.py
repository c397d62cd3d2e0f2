"""A worker's metrics for a serving stack whose ``/metrics`` another process serves, from shared files.

That is the multiprocess mode of ``prometheus_client``, which it enters at its import by the environment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvconnect.metrics import PREFIX, Changes, Series

_EVERY_S = 1.0


class MultiprocessMetrics:
    """Adds the ``changes`` of a rank's metrics, once a second, on a thread of its own."""

    def __init__(self, changes: Callable[[], Changes | None], rank: int) -> None:
        self._changes, self._rank = changes, str(rank)
        # Values are written to the shared files, whichever registry lists them here.
        kinds = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._series = Series(PREFIX, kinds, ranks=["rank"], registry=CollectorRegistry())
        threading.Thread(target=self._run, name="kvconnect-metrics", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self.update()

    def update(self) -> None:
        """Add what has changed since the last call."""
        if changes := self._changes():
            self._series.add(changes.counters, {self._rank: changes.gauges}, changes.observed)

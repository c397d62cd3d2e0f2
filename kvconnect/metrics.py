"""The counters of a worker, as Prometheus metrics.

One ``Metrics`` per worker, on the registry that its process exports. Everything that can go wrong
without an exception is counted here.
"""

from __future__ import annotations

import functools

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What a worker moves and what goes wrong. Counters only grow; gauges are set by their owner."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.transfers = Counter(
            "kvconnect_transfers",
            "Requests whose KV was sent or received, by outcome",
            ["direction", "outcome"],
            registry=registry,
        )
        self.transfer_bytes = Counter(
            "kvconnect_transfer_bytes", "KV bytes moved", ["direction", "path"], registry=registry
        )
        self.transfer_seconds = Counter(
            "kvconnect_transfer_seconds",
            "Seconds from the first post to the last completion, summed over requests",
            ["direction"],
            registry=registry,
        )
        self.load_seconds = Histogram(
            "kvconnect_load_seconds",
            "Seconds from the order to load a request to its arrival",
            buckets=_SECONDS,
            registry=registry,
        )
        self.copies = Counter(
            "kvconnect_copies", "Copies given to the engine", ["direction", "path"], registry=registry
        )
        self.failures = Counter(
            "kvconnect_failures", "What went wrong, by reason", ["reason"], registry=registry
        )
        self.leases = Gauge("kvconnect_leases_held", "Requests that wait to be fetched", registry=registry)
        self.loads = Gauge("kvconnect_loads_in_flight", "Requests that are being fetched", registry=registry)
        self.quarantined = Gauge(
            "kvconnect_quarantined", "Requests whose blocks may still be written", registry=registry
        )
        self.inflight_bytes = Gauge("kvconnect_inflight_bytes", "Bytes under way to peers", registry=registry)


@functools.cache
def metrics_on(registry: CollectorRegistry = REGISTRY) -> Metrics:
    """The metrics of a registry: several workers of one process share them."""
    return Metrics(registry)

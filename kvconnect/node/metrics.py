"""The node's own numbers for Prometheus, read from the engine's snapshot when they are asked for.

They live in a registry of their own, so that several nodes fit into one process; what the connector
counts is in the default registry and is rendered with them.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvconnect.node.engine import Engine

PREFIX = "kvconnect_node"


class NodeMetrics(Collector):
    """Renders the metrics of ``engine``, labelled with the model's name."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> tuple[bytes, str]:
        """The text of all metrics of the process and of this node, and its content type."""
        return generate_latest(REGISTRY) + generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        snapshot = self._engine.snapshot
        requests = dict(snapshot.requests)
        waiting = requests["waiting"] + requests["waiting_for_kv"]
        yield self._gauge("requests_running", "Requests that are computed", requests["running"])
        yield self._gauge("requests_waiting", "Requests that wait for blocks, a row or their KV", waiting)
        yield self._gauge(
            "requests_waiting_for_kv", "Requests whose KV is being loaded", requests["waiting_for_kv"]
        )
        yield self._gauge(
            "requests_unsent",
            "Ended requests whose blocks wait to be fetched",
            requests["waiting_to_be_fetched"],
        )
        for name, count in snapshot.blocks.items():
            yield self._gauge(f"blocks_{name}", f"Cache blocks: {name}", count)
        used = snapshot.blocks["held"] / snapshot.blocks["total"]
        yield self._gauge("kv_cache_usage", "Held share of the cache blocks, 0 to 1", used)
        for name, count in snapshot.counts.items():
            text = f"Since the start: {name.replace('_', ' ')}"
            counter = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["model"])
            counter.add_metric([self._model], count)
            yield counter

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["model"])
        gauge.add_metric([self._model], value)
        return gauge

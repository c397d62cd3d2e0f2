"""The router's metrics, in their own registry. Owns names and help texts, and no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvconnect.router.pool import NodeState, Pool

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RouterMetrics:
    """Metrics of one router. Several routers can live in one process."""

    def __init__(self, *pools: Pool) -> None:
        self._registry = CollectorRegistry()
        counter, seconds, gauge = (
            partial(self._made, kind) for kind in (Counter, partial(Histogram, buckets=_SECONDS), Gauge)
        )
        self.requests = counter("requests", "Answered requests.", "endpoint", "status")
        self.in_flight = gauge("in_flight", "Requests being served now.")
        text = "Seconds that a node took to answer a request wholly."
        self.node_request_seconds = seconds("node_request_seconds", text, "role")
        text = "Seconds from a request's arrival to its answer's first byte."
        self.first_byte_seconds = seconds("first_byte_seconds", text)
        text = "Requests to nodes that gave no whole answer."
        self.node_request_failures = counter("node_request_failures", text, "role", "reason")
        self.retries = counter("retries", "Requests tried again on another node.", "role")
        text = "Requests run again, once, since a node failed before the client had got anything."
        self.repeats = counter("repeats", text)
        text = "Requests that a decode node served alone; prefill_* where prefill failed."
        self.fallbacks = counter("fallbacks", text, "reason")
        text = (
            "Requests to both nodes; resumed: in parallel, with D's request given up; room: SGLang servers."
        )
        self.flows = counter("flows", text, "flow")
        text = (
            "First tokens of streams, by where they came from: prefill; D, where P's was withheld (no whole "
            "text) or not_tried; repeated where D was asked again with P's token; differs where D kept its "
            "own. Answers of one token count as only."
        )
        self.first_tokens = counter("first_tokens", text, "outcome")
        text = "Releases, sent or failed, of what a prefill node holds in vain."
        self.releases = counter("releases", text, "outcome")
        self.clients_gone = counter("clients_gone", "Clients that left before their answer ended.")
        text = "Requests of policy prefix, by what decided: prefix or load."
        self.placements = counter("placements", text, "by")
        self.known_blocks = gauge("known_blocks", "Blocks that nodes are known to have.")
        text = "Published blocks left out: too many, or the one before is unknown."
        self.blocks_left_out = counter("blocks_left_out", text)
        self.kv_events_missed = counter("kv_events_missed", "KV event messages that did not arrive.")
        text = "KV event messages that could not be read."
        self.kv_events_unread = counter("kv_events_unread", text, "node")
        self._registry.register(_PoolCollector(pools))

    def _made(self, kind: Callable[..., Any], name: str, text: str, *labels: str) -> Any:
        return kind(f"kvconnect_router_{name}", text, labels, registry=self._registry)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _PoolCollector(Collector):
    """Reads the pools on each scrape, so that no second copy of their state exists."""

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "node"]
        load = GaugeMetricFamily("kvconnect_router_node_in_flight", "Requests on a node now.", labels=labels)
        healthy = GaugeMetricFamily(
            "kvconnect_router_node_healthy", "1 if a node is in rotation.", labels=labels
        )
        ejections = CounterMetricFamily(
            "kvconnect_router_ejections", "Times that a node left rotation.", labels=labels
        )
        for pool in self._pools:
            for node in pool.view():
                names = [pool.role, node.url]
                load.add_metric(names, node.in_flight)
                healthy.add_metric(names, float(node.state is NodeState.HEALTHY))
                ejections.add_metric(names, node.ejections)
        yield from (load, healthy, ejections)

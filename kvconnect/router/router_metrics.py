"""The router's numbers, in a registry of its own. Owns names and help texts, and no behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvconnect.router.pool import NodeState, Pool

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RouterMetrics:
    """Counters of one router. Several can live in one process."""

    def __init__(self, *pools: Pool) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.requests = counter("kvconnect_router_requests", "Answered requests.", ["endpoint", "status"])
        self.in_flight = Gauge("kvconnect_router_in_flight", "Requests being served now.", registry=registry)
        self.node_request_seconds = histogram(
            "kvconnect_router_node_request_seconds",
            "Seconds from the start of a request to a node to the end of its answer.",
            ["role"],
        )
        self.first_byte_seconds = histogram(
            "kvconnect_router_first_byte_seconds",
            "Seconds from a request's arrival to the first byte of its answer.",
        )
        self.node_request_failures = counter(
            "kvconnect_router_node_request_failures",
            "Requests to nodes that gave no whole answer, by what happened.",
            ["role", "reason"],
        )
        self.retries = counter("kvconnect_router_retries", "Requests tried again on another node.", ["role"])
        self.fallbacks = counter(
            "kvconnect_router_fallbacks",
            "Requests that the decode node served alone, by why; prefill_* where prefill failed.",
            ["reason"],
        )
        self.flows = counter(
            "kvconnect_router_flows",
            "Requests that went to both nodes: sequential, parallel, or resumed, which is a parallel one "
            "whose decode request had to be given up.",
            ["flow"],
        )
        self.clients_gone = counter(
            "kvconnect_router_clients_gone", "Clients that left before their answer ended."
        )
        self.placements = counter(
            "kvconnect_router_placements",
            "Requests of policy prefix, by what decided: prefix where a node has some of the prompt, load.",
            ["by"],
        )
        self.known_blocks = Gauge(
            "kvconnect_router_known_blocks", "Blocks that nodes are known to have.", registry=registry
        )
        self.blocks_left_out = counter(
            "kvconnect_router_blocks_left_out",
            "Published blocks that are not known: there are too many, or the block before them is not known.",
        )
        self.kv_events_missed = counter(
            "kvconnect_router_kv_events_missed", "Messages of KV events that did not arrive."
        )
        self.kv_events_unread = counter(
            "kvconnect_router_kv_events_unread", "Messages of KV events that could not be read.", ["node"]
        )
        registry.register(_PoolCollector(pools))

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


class _PoolCollector(Collector):
    """Reads the pools when asked, so that no second copy of their state exists."""

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "node"]
        load = GaugeMetricFamily("kvconnect_router_node_in_flight", "Requests on a node now.", labels=labels)
        healthy = GaugeMetricFamily(
            "kvconnect_router_node_healthy", "1 if a node answered and is in rotation.", labels=labels
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

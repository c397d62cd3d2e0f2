"""A worker's metrics on their way through vLLM to its log line and its ``/metrics``.

A worker reports its changes of a step (``TransferStats``). vLLM adds up its ranks, sends the sum to the API
server, adds up the sums of one log line, and passes each dictionary to ``TransferPromMetrics``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvconnect.metrics import FAMILIES, PREFIX, Changes, summarize

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VLLM_PREFIX = f"vllm:{PREFIX}"


@dataclass
class TransferStats(KVConnectorStats):
    """Changes of one or more workers' metrics, as strings and numbers only, since they cross processes.

    ``counters``: family -> labels -> growth. ``gauges``: rank -> family -> labels -> value. ``observed``:
    histogram -> observed values.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of_worker(cls, rank: int, changes: Changes) -> TransferStats:
        """The changes of one worker."""
        gauges = {str(rank): changes.gauges} if changes.gauges else {}
        return cls({"counters": changes.counters, "gauges": gauges, "observed": changes.observed})

    def reset(self) -> None:
        """Drop all changes."""
        self.data = {"counters": {}, "gauges": {}, "observed": {}}

    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add the changes of another worker, or later changes of the same one. ``other`` is not changed."""
        counters = self.data["counters"]
        for name, numbers in other.data["counters"].items():
            ours = counters.setdefault(name, {})
            for labels, growth in numbers.items():
                ours[labels] = ours.get(labels, 0) + growth
        for rank, gauges in other.data["gauges"].items():
            self.data["gauges"].setdefault(rank, {}).update(gauges)
        for name, values in other.data["observed"].items():
            self.data["observed"].setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers of vLLM's log line."""
        return summarize(self.data["counters"], self.data["gauges"].values(), self.data["observed"])


class TransferPromMetrics(KVConnectorPromMetrics):
    """The ``vllm:kvconnect_*`` series: vLLM's labels first, then ours; gauges have a rank label too."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # A family's own look-up of a child takes a lock.
        self._child = functools.cache(self._find_child)
        self._families: dict[str, Any] = {}
        kinds: dict[str, tuple[Any, dict[str, Any]]] = {
            "counter": (self._counter_cls, {}),
            # With several API servers each receives only some steps: the latest value is right.
            "gauge": (self._gauge_cls, {"multiprocess_mode": "mostrecent"}),
        }
        for family in FAMILIES:
            cls, more = kinds.get(family.kind, (self._histogram_cls, {"buckets": list(family.buckets)}))
            rank = ["rank"] if family.kind == "gauge" else []
            self._families[family.name] = cls(
                name=f"{VLLM_PREFIX}_{family.name}",
                documentation=f"{family.text}.",
                labelnames=[*labelnames, *rank, *family.labels],
                **more,
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the changes of one ``TransferStats.data``."""
        for name, numbers in transfer_stats_data["counters"].items():
            for labels, growth in numbers.items():
                self._child(name, engine_idx, labels).inc(growth)
        for rank, gauges in transfer_stats_data["gauges"].items():
            for name, numbers in gauges.items():
                for labels, value in numbers.items():
                    self._child(name, engine_idx, f"{rank},{labels}" if labels else rank).set(value)
        for name, values in transfer_stats_data["observed"].items():
            child = self._child(name, engine_idx, "")
            for value in values:
                child.observe(value)

    def _find_child(self, name: str, engine_idx: int, labels: str) -> Any:
        ours = labels.split(",") if labels else ()
        return self._families[name].labels(*self.per_engine_labelvalues[engine_idx], *ours)

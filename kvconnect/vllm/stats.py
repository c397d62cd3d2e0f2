"""A worker's metrics on their way through vLLM to its log line and its ``/metrics``.

A worker reports its changes of a step (``TransferStats``). vLLM adds up its ranks, sends the sum to the API
server, adds up the sums of one log line, and passes each dictionary to ``TransferPromMetrics``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvconnect.metrics import PREFIX, Changes, Series, add_to, summarize

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
            add_to(counters.setdefault(name, {}), numbers)
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
        kinds = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}
        self._series = Series(VLLM_PREFIX, kinds, labelnames, ["rank"])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the changes of one ``TransferStats.data``."""
        self._series.add(**transfer_stats_data, labels=tuple(self.per_engine_labelvalues[engine_idx]))

"""The router's log line every few seconds, and its warning where nothing was fetched for a minute."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from kvconnect.router.bodies import DIRECT
from kvconnect.router.metrics import RouterMetrics

logger = logging.getLogger("kvconnect.router")

SUMMARY_S = 10.0
_WINDOWS = 6
"""Of so many summaries a minute consists."""


class Summaries:
    """What was counted since the last summary, and within the current minute."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._before = metrics.counts()
        self._minute: Counter[str] = Counter()
        self._windows = 0

    async def run(self) -> None:
        """Log for ever."""
        while True:
            await asyncio.sleep(SUMMARY_S)
            self.log()

    def log(self) -> None:
        """Log what happened since the last call, if that is anything."""
        now = self._metrics.counts()
        grown = {key: value - self._before.get(key, 0) for key, value in now.items()}
        self._before = now

        def growth(name: str) -> dict[str, int]:
            return {labels: round(n) for (of, labels), n in grown.items() if of.endswith(name) and n}

        answers, alone = growth("_requests"), growth("_fallbacks")
        if answers:
            logger.info(
                "%s; to both nodes: %s; by the decode node alone: %s; legs that failed: %s",
                f"{sum(answers.values())} requests in {SUMMARY_S:g} s ({_listed(answers)})",
                _listed(growth("_flows")),
                _listed(alone),
                _listed(growth("_node_request_failures")),
            )
        self._minute.update(asked=sum(growth("_flows").values()))
        self._minute.update({reason: n for reason, n in alone.items() if reason not in DIRECT})
        self._windows += 1
        if self._windows == _WINDOWS:
            self._judge()

    def _judge(self) -> None:
        minute, asked = self._minute, self._minute.pop("asked", 0)
        if asked and minute.total() >= asked:
            logger.warning(
                "all of the last minute's %d requests were computed by the decode node alone: %s",
                asked,
                _listed(minute),
            )
        self._minute, self._windows = Counter(), 0


def _listed(numbers: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{what} {number}" for what, number in numbers.items()) or "none"

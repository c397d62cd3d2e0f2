"""What the ranks of a node report, put together as a serving stack does: over when every rank said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvconnect.outcome import Reason
from kvconnect.transfer.orders import Found, OffloadReport, Results


class RankReports:
    """Reports of ``world_size`` ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._said: Counter[tuple[str, str]] = Counter()
        self._failed: dict[str, Reason] = {}

    def take(self, reports: Iterable[Results]) -> Results:
        """Add what was reported. What is over at every rank by now; failed, if it failed at one."""
        over: dict[str, list[str]] = {"sent": [], "received": []}
        settled: list[str] = []
        found: list[Found] = []
        ragged: list[str] = []
        offload: list[OffloadReport] = []
        for results in reports:
            for what, names in (("sent", results.sent), ("received", results.received)):
                for name in names:
                    self._said[what, name] += 1
                    if self._said[what, name] == self._world_size:
                        del self._said[what, name]
                        over[what].append(name)
            settled += results.settled
            found += results.found
            ragged += results.ragged
            offload += results.offload
            for name, why in results.failed.items():
                self._failed.setdefault(name, why)
        failed = {name: self._failed.pop(name) for name in over["received"] if name in self._failed}
        return Results(
            tuple(over["sent"]),
            tuple(over["received"]),
            failed,
            tuple(offload),
            tuple(settled),
            tuple(found),
            tuple(ragged),
        )

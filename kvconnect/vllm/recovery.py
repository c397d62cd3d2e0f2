"""How long an idle vLLM must step so that its scheduler gets the reports that its workers begin with.

These are what lower tiers hold from before, and the size of a worker's rows where another connector has the
handshake. vLLM takes reports with its steps only, and steps only while it has something to do: without this,
prompts that come first after a restart would find nothing. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvconnect.orders import OffloadReport

WAIT_S = 5.0
"""How long no report may come after the start. What takes longer comes with the first requests."""


class Recovery:
    """Whether more is on its way, of what was expected or what a step began to bring."""

    def __init__(self, *, expects: bool, clock: Callable[[], float]) -> None:
        self._expects = expects
        self._clock = clock
        self._until: float | None = None
        self._is_bringing = False

    def expect(self, *, expects: bool) -> None:
        """What was expected has come, and whether something else is."""
        self._expects, self._until = expects, None

    def step(self) -> None:
        """A step begins."""
        self._is_bringing = False

    def reported(self, reports: Iterable[OffloadReport]) -> None:
        """What a step brought. Reports are of bounded length, so that more may follow."""
        if any(report.changes for report in reports):
            self._is_bringing = True
            self._expects = False

    @property
    def is_under_way(self) -> bool:
        """Whether the next step may bring more."""
        if self._is_bringing or not self._expects:
            return self._is_bringing
        if self._until is None:
            self._until = self._clock() + WAIT_S
        self._expects = self._clock() < self._until
        return self._expects

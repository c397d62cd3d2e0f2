"""The orders of the next step, as they come together, and the failures that are counted with them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvconnect.orders import (
    Await,
    Expect,
    Hold,
    LetGo,
    Load,
    Orders,
    Preempted,
    Progress,
    RankAddress,
    Withdraw,
)

logger = logging.getLogger(__name__)


class OrdersDraft:
    """Orders in the making, named as in ``Orders``; ``awaited`` by handle, since each replaces the last."""

    def __init__(self, directory: Sequence[RankAddress]) -> None:
        self._directory = tuple(directory)
        self._logged: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self.holds: list[Hold] = []
        self.loads: list[Load] = []
        self.let_go: list[LetGo] = []
        self.awaited: dict[str, Await] = {}
        self.aborted: list[str] = []
        self.expected: list[Expect] = []
        self.withdrawn: list[Withdraw] = []
        self.failures: list[str] = []

    def withdraw(self, handle: str, reason: str) -> None:
        """Nothing is held under this handle."""
        # Ordered before what is expected: an id that is withdrawn may be used again in the same step.
        self.expected = [expected for expected in self.expected if expected.handle != handle]
        self.withdrawn.append(Withdraw(handle, f"no KV comes under this handle: {reason}"))

    def warn(self, reason: str, text: str, *values: object) -> None:
        """Count a failure, and log the first of its reason."""
        self.failures.append(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                text + " (further ones are only counted, as failures with reason %s)", *values, reason
            )

    def take(self, preempted: Sequence[Preempted], progress: Sequence[Progress]) -> Orders:
        """The orders since the last call; ``directory`` goes with the first."""
        orders = Orders(
            holds=tuple(self.holds),
            loads=tuple(self.loads),
            let_go=tuple(self.let_go),
            aborted=tuple(self.aborted),
            directory=self._directory,
            expected=tuple(self.expected),
            withdrawn=tuple(self.withdrawn),
            failures=tuple(self.failures),
            preempted=tuple(preempted),
            progress=tuple(progress),
            awaited=tuple(self.awaited.values()),
        )
        self._directory = ()
        self._begin()
        return orders

"""What the reports of all fault batteries have in common."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.load import Tally


def progress(text: str) -> None:
    """Show how far a battery is, beside its report."""
    print(text, file=sys.stderr, flush=True)


@dataclass(kw_only=True)
class Report:
    """What was injected, and what came of it. ``problems`` is empty exactly if nothing was wrong."""

    problems: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class ServedReport(Report):
    """The report of a battery that clients were served beside.

    ``exact`` and ``refused`` count their answers, ``reasons`` the refusals by text; ``slowest_s`` is the
    longest that one of them waited.
    """

    exact: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)

    def take(self, tally: Tally) -> None:
        """Add what the clients were told, once all have their answers."""
        self.exact, self.refused = tally.count("exact"), tally.count("refused")
        self.slowest_s, self.reasons = round(tally.slowest_s, 2), tally.reasons()
        self.problems += tally.problems()


@dataclass(kw_only=True)
class HitReport(ServedReport):
    """The report of a battery that aims at transfers. ``hits`` are the times that one was under way."""

    hits: int = 0


@dataclass(kw_only=True)
class RowReport(Report):
    """The report of a battery against a disk tier.

    ``served`` are the rows that were read afterwards, ``wrong`` those of them that are not what was written,
    ``failures`` what the tier counted, by reason.
    """

    served: int = 0
    wrong: int = 0
    failures: dict[str, int] = field(default_factory=dict)

"""What the checkers remember of each worker, and what is left at a node."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvconnect.transfer.orders import Hold, Load

if TYPE_CHECKING:
    from tests.simulator.node import SimNode
    from tests.simulator.worker import SimWorker


@dataclass(eq=False)
class Owed:
    """An order that must be reported once. ``blocks`` are those that it names."""

    order: Hold | Load
    blocks: frozenset[int]
    since: float
    stopped_s: float


@dataclass(eq=False)
class Asked:
    """A question to a peer that must be answered once, by whomever."""

    since: float
    stopped_s: float


@dataclass(eq=False)
class Books:
    """What one worker owes, by request; and the generation of each taken slot, by address, and since when."""

    holds: dict[str, Owed] = field(default_factory=dict)
    loads: dict[str, Owed] = field(default_factory=dict)
    finds: dict[str, list[Asked]] = field(default_factory=dict)
    restores: set[str] = field(default_factory=set)
    slots: dict[int, tuple[int, float]] = field(default_factory=dict)


class Exceptions(logging.Handler):
    """Takes note of every exception that the code under test logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, _ = record.exc_info
            self.texts.append(f"{record.getMessage()}: {kind.__name__}: {error}")


def left_at(node: SimNode, books: Mapping[SimWorker, Books]) -> dict[str, int]:
    """What a node holds, owes and remembers."""
    left = {f"the scheduler half's {name}": count for name, count in node.connector.state().items()}
    left["blocks"] = node.pool.held
    left["requests"] = len(node.requests) + len(node.loading) + len(node.abandoned) + len(node.unsent)
    for worker in node.workers:
        prefill, decode, owed = worker.prefill, worker.decode, books[worker]
        for what, count in (
            ("unreported holds", len(owed.holds)),
            ("unreported loads", len(owed.loads)),
            ("unreported finds", sum(map(len, owed.finds.values()))),
            ("unreported restores", len(owed.restores)),
            ("finds", len(decode.finds)),
            ("leases", len(prefill.leases)),
            ("expected prefills", len(prefill.pending.expected)),
            ("waiting fetches", len(prefill.pending)),
            ("streaming prefills", len(prefill.book.streaming)),
            ("sendings", len(prefill.sender.sendings)),
            ("send slots", worker.send.taken),
            ("loads", len(decode.loads)),
            ("awaited handles", len(decode.renewals.awaited)),
            ("landing slots", decode.bay.taken),
            ("landings", len(decode.bay)),
        ):
            left[f"{worker.who}'s {what}"] = count
        for what, count in worker.tiers.state().items() if worker.tiers is not None else ():
            left[f"{worker.who}'s offload {what}"] = count
    return left

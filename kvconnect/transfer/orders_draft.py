"""The orders of the next step, as they come together, and the failures that are counted with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.specs import KVCacheGroup
from kvconnect.orders import (
    Await,
    Find,
    GroupBlocks,
    Hold,
    LetGo,
    Load,
    Orders,
    Progress,
    RankAddress,
    Withdraw,
)
from kvconnect.outcome import Reason
from kvconnect.timeline import Record
from kvconnect.transfer.stack import BlockIdsByGroup

logger = logging.getLogger(__name__)


@dataclass
class OrdersDraft:
    """Orders in the making, named as in ``Orders``; ``awaited`` by handle, since each replaces the last.

    ``step`` is that of the orders taken last, with which the device was given everything known so far.
    """

    directory: list[RankAddress]
    clock: InitVar[Callable[[], float] | None] = None
    notes: list[Record] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    let_go: list[LetGo] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    withdrawn: list[Withdraw] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    awaited: dict[str, Await] = field(default_factory=dict)
    finds: list[Find] = field(default_factory=list)
    pulls: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self, clock: Callable[[], float] | None) -> None:
        self._parts = dict(vars(self))
        self._clock = clock
        self.step = 0
        self._logged: set[str] = set()

    def withdraw(self, handle: str, reason: Reason) -> None:
        """Nothing is held under this handle."""
        # Carried out before what is expected: an id that is withdrawn may be used again in the same step.
        if handle in self.expected:
            self.expected.remove(handle)
        self.withdrawn.append(Withdraw(handle, reason.after("no KV comes under this handle: ")))

    def note(self, event: str, handle: str, request_id: str, number: int = 0) -> None:
        """Record what happens now, for the timeline of rank 0."""
        if self._clock is not None:
            self.notes.append((self._clock(), event, handle, request_id, 0, number))

    def warn(self, reason: str, text: str, *values: object) -> None:
        """Count a failure, and log the first of its reason."""
        self.failures.append(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                text + " (further ones are only counted, as failures with reason %s)", *values, reason
            )

    def take(self) -> Orders:
        """The orders since the last call."""
        taken: dict[str, Any] = {name: tuple(part) for name, part in self._parts.items() if part}
        if self.awaited:
            taken["awaited"] = tuple(self.awaited.values())
        for part in self._parts.values():
            part.clear()
        self.step += 1
        return Orders(step=self.step, **taken)


def blocks_of(
    groups: Sequence[KVCacheGroup], block_ids: BlockIdsByGroup, first_token: int, end_token: int
) -> tuple[GroupBlocks, ...]:
    """The blocks of every group that hold tokens ``first_token`` to ``end_token - 1``."""
    made = []
    for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
        if not group.has_cache:
            continue
        if group.is_state:
            made.append(GroupBlocks(index, 0, tuple(ids[-1:])))
            continue
        first = first_token // group.block_size
        end = div_ceil(end_token, group.block_size)
        made.append(GroupBlocks(index, first, tuple(ids[first:end])))
    return tuple(made)

"""Which contents make room for others: the least recently used, or what ARC says.

A policy knows cells and their order, neither hashes nor rows. It is told what happens to cells that hold
something, and asked who makes room. All of it is for many cells at a time, and none of it takes longer
because many cells are kept or pinned: those that must not make room are in no order.
"""

from __future__ import annotations

from typing import Literal, Protocol

from kvconnect.errors import LocalError
from kvconnect.offload.index.columns import Cells, joined
from kvconnect.offload.index.ordered import NOWHERE, Orders

Policy = Literal["lru", "arc"]


class EvictionPolicy(Protocol):
    """The order in which the contents of one cache group make room.

    A cell is *kept* from ``admit`` until it is evicted or forgotten. Wherever cells are given, those that
    come later count as used later.
    """

    def recall(self, cells: Cells) -> None:
        """Cells that were evicted or forgotten, and are not spared yet, are wanted again."""
        ...

    def admit(self, cells: Cells) -> None:
        """Cells hold something from now on, and may make room."""
        ...

    def use(self, cells: Cells) -> None:
        """Kept cells were used."""
        ...

    def refresh(self, cells: Cells) -> None:
        """Kept cells are the newest, but that is no further use."""
        ...

    def park(self, cells: Cells) -> None:
        """Kept cells must not make room for now."""
        ...

    def unpark(self, cells: Cells) -> None:
        """Parked cells may make room again. They were just used, but that is no further use."""
        ...

    def evict(self, count: int) -> Cells:
        """Choose ``count`` cells that make room, or all that may, in the order in which they leave."""
        ...

    def forget(self, cells: Cells) -> None:
        """Cells hold nothing any more, for a reason that is none of this policy's."""
        ...

    def spare(self, count: int) -> Cells:
        """Up to ``count`` cells that hold nothing and are not remembered: they mean nothing from now on."""
        ...

    @property
    def num_remembered(self) -> int:
        """Cells that made room and are remembered."""
        ...

    @property
    def num_parked(self) -> int:
        """Cells that are parked."""
        ...

    @property
    def num_spare(self) -> int:
        """How many ``spare`` would give at most."""
        ...


class Lru:
    """The least recently used makes room."""

    _KEPT, _PARKED, _GONE = 1, 2, 3

    def __init__(self, num_cells: int) -> None:
        self._orders = Orders(num_cells, 3, unordered=frozenset({self._PARKED}))

    @property
    def num_remembered(self) -> int:
        """None: what made room counts as new when it comes back."""
        return 0

    @property
    def num_parked(self) -> int:
        """Cells that are parked."""
        return self._orders.size(self._PARKED)

    @property
    def num_spare(self) -> int:
        """How many ``spare`` would give at most."""
        return self._orders.size(self._GONE)

    def recall(self, cells: Cells) -> None:
        """They are not to be spared."""
        self._orders.move(cells, NOWHERE)

    def admit(self, cells: Cells) -> None:
        """They are the newest."""
        self._orders.move(cells, self._KEPT)

    def use(self, cells: Cells) -> None:
        """They are the newest; what is parked will be when it is unparked."""
        self._orders.move(self._orders.kinds.having(cells, self._KEPT), self._KEPT)

    def refresh(self, cells: Cells) -> None:
        """As if they were used."""
        self.use(cells)

    def park(self, cells: Cells) -> None:
        """They leave the order."""
        self._orders.move(cells, self._PARKED)

    def unpark(self, cells: Cells) -> None:
        """They are the newest."""
        self._orders.move(cells, self._KEPT)

    def evict(self, count: int) -> Cells:
        """The oldest ones."""
        return self._orders.take(self._KEPT, count, into=self._GONE)

    def forget(self, cells: Cells) -> None:
        """They are not remembered."""
        self._orders.move(cells, self._GONE)

    def spare(self, count: int) -> Cells:
        """Those that left first."""
        return self._orders.take(self._GONE, count)


class Arc:
    """Adaptive replacement (Megiddo and Modha, 2003): what was used once and what was used again apart.

    Room is made by the oldest of those used once while they are more than a target, else by the oldest of
    the others. What made room is remembered, as many as there are rows in all; when it comes back, the target
    moves in favour of the side that it left. Parked cells count for neither side. Where several cells come
    back at once, all of them move the target by the same step.
    """

    _ONCE, _OFTEN, _PARKED_ONCE, _PARKED_OFTEN = 1, 2, 3, 4
    _LEFT_ONCE, _LEFT_OFTEN, _GONE, _RETURNED = 5, 6, 7, 8

    def __init__(self, num_cells: int, capacity: int) -> None:
        self._orders = Orders(
            num_cells, 8, unordered=frozenset({self._PARKED_ONCE, self._PARKED_OFTEN, self._RETURNED})
        )
        self._capacity = capacity
        self._target = 0.0

    @property
    def target(self) -> float:
        """How many of those used once are kept before others make room."""
        return self._target

    @property
    def num_remembered(self) -> int:
        """Cells that made room and are remembered."""
        return self._orders.size(self._LEFT_ONCE) + self._orders.size(self._LEFT_OFTEN)

    @property
    def num_parked(self) -> int:
        """Cells that are parked."""
        return self._orders.size(self._PARKED_ONCE) + self._orders.size(self._PARKED_OFTEN)

    @property
    def num_spare(self) -> int:
        """How many ``spare`` would give at most."""
        return self._orders.size(self._GONE)

    def recall(self, cells: Cells) -> None:
        """Those that are remembered move the target, and count as used again once they are admitted."""
        kinds = self._orders.kinds
        from_once, from_often = (kinds.having(cells, kind) for kind in (self._LEFT_ONCE, self._LEFT_OFTEN))
        forgotten = kinds.having(cells, self._GONE)
        once, often = self._orders.size(self._LEFT_ONCE), self._orders.size(self._LEFT_OFTEN)
        if len(from_once):
            self._target = min(float(self._capacity), self._target + len(from_once) * max(1.0, often / once))
        if len(from_often):
            self._target = max(0.0, self._target - len(from_often) * max(1.0, once / often))
        self._orders.move(from_once, self._RETURNED)
        self._orders.move(from_often, self._RETURNED)
        self._orders.move(forgotten, NOWHERE)

    def admit(self, cells: Cells) -> None:
        """They were used once, or more often if they were remembered."""
        self._move(cells, {NOWHERE: self._ONCE, self._RETURNED: self._OFTEN})

    def use(self, cells: Cells) -> None:
        """They were used more than once."""
        self._move(
            cells,
            {
                self._ONCE: self._OFTEN,
                self._OFTEN: self._OFTEN,
                self._PARKED_ONCE: self._PARKED_OFTEN,
            },
        )

    def refresh(self, cells: Cells) -> None:
        """They are the newest of their side."""
        self._move(cells, {self._ONCE: self._ONCE, self._OFTEN: self._OFTEN})

    def park(self, cells: Cells) -> None:
        """They leave their order."""
        self._move(cells, {self._ONCE: self._PARKED_ONCE, self._OFTEN: self._PARKED_OFTEN})

    def unpark(self, cells: Cells) -> None:
        """They are the newest of the side that they left."""
        self._move(cells, {self._PARKED_ONCE: self._ONCE, self._PARKED_OFTEN: self._OFTEN})

    def evict(self, count: int) -> Cells:
        """The oldest of those used once while these are more than the target, then of the others."""
        once, often = self._orders.size(self._ONCE), self._orders.size(self._OFTEN)
        over = min(count, max(0, once - int(self._target)))
        from_often = min(count - over, often)
        from_once = min(count - from_often, once)
        evicted = joined(
            self._orders.take(self._ONCE, from_once, into=self._LEFT_ONCE),
            self._orders.take(self._OFTEN, from_often, into=self._LEFT_OFTEN),
        )
        self._trim()
        return evicted

    def forget(self, cells: Cells) -> None:
        """They are not remembered."""
        self._orders.move(cells, self._GONE)

    def spare(self, count: int) -> Cells:
        """Those that were forgotten first."""
        return self._orders.take(self._GONE, count)

    def _move(self, cells: Cells, into: dict[int, int]) -> None:
        """Move the cells of each kind to another, those of the others nowhere."""
        kinds = self._orders.kinds
        for kind, cells_of_kind in [(kind, kinds.having(cells, kind)) for kind in into]:
            if len(cells_of_kind):
                self._orders.move(cells_of_kind, into[kind])

    def _trim(self) -> None:
        """Forget the oldest of what is remembered, where it is too much."""
        size = self._orders.size
        over = size(self._ONCE) + size(self._LEFT_ONCE) - self._capacity
        if over > 0:
            self._orders.take(self._LEFT_ONCE, over, into=self._GONE)
        over = self.num_remembered - self._capacity
        if over > 0:
            from_often = min(over, size(self._LEFT_OFTEN))
            self._orders.take(self._LEFT_OFTEN, from_often, into=self._GONE)
            self._orders.take(self._LEFT_ONCE, over - from_often, into=self._GONE)


def make_policy(name: Policy, num_rows: int, num_cells: int) -> EvictionPolicy:
    """The policy of that name, for a group of so many rows and cells.

    Raises:
        LocalError: there is none of that name.
    """
    if name == "lru":
        return Lru(num_cells)
    if name == "arc":
        return Arc(num_cells, num_rows)
    raise LocalError(f"no policy {name!r}; known: lru, arc")


def num_remembered(name: Policy, num_rows: int) -> int:
    """How many cells that hold nothing a policy remembers at most."""
    return num_rows if name == "arc" else 0

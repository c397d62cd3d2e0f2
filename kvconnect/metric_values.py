"""Numbers that one thread writes and others read, without a lock: what a set of metrics is made of."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

_MAX_OBSERVATIONS = 4096


class Owner(Protocol):
    """What numbers belong to; in ``changed`` is each that has changed since the reader took it out."""

    changed: deque[Number | Observations]


@dataclass(frozen=True)
class Family:
    """Numbers of one name that differ in their labels. Counters only grow; gauges are set.

    A histogram has ``buckets``, and no labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Number:
    """One number. Only the owner's thread calls ``inc`` and ``set``, and one reader ``take``."""

    __slots__ = ("_is_noted", "_labels", "_owner", "_seen", "family", "value")

    def __init__(self, owner: Owner, family: Family, labels: tuple[str, ...] = ()) -> None:
        self.family = family
        self._owner, self._labels = owner, ",".join(labels)
        self.value: float = 0
        self._seen: float = 0
        self._is_noted = False

    def inc(self, amount: float = 1) -> None:
        # What was read of a clock in two threads may differ by less than nothing, and a counter that shrinks
        # ends a server of vLLM.
        if amount > 0:
            self.value += amount
            self.note()

    def set(self, value: float) -> None:
        if value != self.value:
            self.value = value
            self.note()

    def note(self) -> None:
        """It is to be taken. After a change, as who takes it comes at any time."""
        if not self._is_noted:
            self._is_noted = True
            self._owner.changed.append(self)

    def take(self, changes: Changes) -> None:
        """Write down what has changed since the last call."""
        # Before it is read: what is written meanwhile is noted anew.
        self._is_noted = False
        name, value = self.family.name, self.value
        if self.family.kind == "gauge":
            # What was reported before stays as it was.
            changes.gauges[name] = {**changes.gauges[name], self._labels: value}
        elif growth := value - self._seen:
            changes.counters.setdefault(name, {})[self._labels] = growth
            self._seen = value


class Numbers:
    """The numbers of one family."""

    def __init__(self, owner: Owner, family: Family) -> None:
        self.family = family
        self._owner = owner
        self._numbers: dict[tuple[str, ...], Number] = {}

    def labels(self, *values: str) -> Number:
        """The number with these labels, made when it is first asked for."""
        found = self._numbers.get(values)
        if found is None:
            if len(values) != len(self.family.labels):
                raise ValueError(f"{self.family.name} has labels {self.family.labels}, not {values}")
            found = self._numbers[values] = Number(self._owner, self.family, values)
            if values and self.family.kind == "gauge":
                # From now on it is shown, though it may never be anything but 0.
                found.note()
        return found

    def values(self) -> dict[tuple[str, ...], float]:
        """All numbers as they are now. For any thread: a dict is copied in one go."""
        return {labels: number.value for labels, number in self._numbers.copy().items()}


class Observations:
    """A histogram, and the observations that the reader of ``Metrics.changes`` has not seen yet."""

    def __init__(self, owner: Owner, family: Family) -> None:
        self.family = family
        self.counts = [0] * (len(family.buckets) + 1)
        self.total = 0.0
        # Where no reader asks, the oldest go. They stay counted above.
        self._unseen: deque[float] = deque(maxlen=_MAX_OBSERVATIONS)
        self._owner = owner
        self._is_noted = False

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(self.family.buckets, value)] += 1
        self.total += value
        self._unseen.append(value)
        if not self._is_noted:
            self._is_noted = True
            self._owner.changed.append(self)

    def values(self) -> dict[tuple[str, ...], float]:
        """The sum of what was observed, and by the upper edge of each bucket how often it was in there."""
        edges = [*map(str, self.family.buckets), "+Inf"]
        return {(): self.total, **{(edge,): count for edge, count in zip(edges, self.counts, strict=True)}}

    def take(self, changes: Changes) -> None:
        """Write down what it has observed since the last call."""
        self._is_noted = False
        if values := [self._unseen.popleft() for _ in range(len(self._unseen))]:
            changes.observed[self.family.name] = values


@dataclass(frozen=True)
class Changes:
    """What changed at a worker since it was last asked.

    ``counters`` maps a family to what each label set, joined with commas, grew by; ``gauges`` are all
    gauges as they are now, likewise; ``observed`` maps a histogram to what it observed.
    """

    counters: dict[str, dict[str, float]]
    gauges: dict[str, dict[str, float]]
    observed: dict[str, list[float]]


def merge_changes(first: Changes | None, second: Changes | None) -> Changes | None:
    """What changed at one of two parts of a worker that share no gauge and no histogram."""
    if first is None or second is None:
        return first or second
    counters = {**first.counters, **second.counters}
    for name in first.counters.keys() & second.counters.keys():
        counters[name] = dict(first.counters[name])
        add_to(counters[name], second.counters[name])
    return Changes(counters, {**first.gauges, **second.gauges}, {**first.observed, **second.observed})


def add_to(total: dict[K, float], more: Mapping[K, float]) -> None:
    for labels, value in more.items():
        total[labels] = total.get(labels, 0) + value

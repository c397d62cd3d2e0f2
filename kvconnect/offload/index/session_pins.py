"""What sessions have pinned, until when, and how much of each tier a tenant may pin.

A pin holds one prefix. What it holds does not make room, in host memory or on disk, before its time. Pure
bookkeeping: no clock, and a call takes time for the contents that it is given.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.offload.disk.folder import bytes_on_disk
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.offload.index.tier_index import TierIndex
from kvconnect.offload.tier import DISK, HOST, Content

MOST_PINNED = 0.75
"""Which part of a tier all tenants together may pin: the rest is for what is in use."""
MOST_SESSIONS = 4096
"""Sessions with pins, a quarter of them of one tenant: what sessions share counts once for the quota."""
_MOST_BRANCHES = 16
"""Pins of one session; a new one takes the place of the one that ends first."""

_OVER = -math.inf

Place = tuple[str, int]
"""A tier and a cache group: each has a quota of its own, so that none is short of what a hit needs."""


class Ledger:
    """What tenants have pinned in one place. A content counts once for each tenant that has it.

    ``all`` are the contents, each with how many tenants have it.
    """

    def __init__(self, limit: float, share: float) -> None:
        self._quota, self._most = int(limit * share), int(limit * MOST_PINNED)
        self._by_tenant: dict[str, Counter[bytes]] = {}
        self.all: Counter[bytes] = Counter()

    def room(self, tenant: str) -> int:
        """How many contents more a tenant may have that none has."""
        return min(self._quota - len(self._by_tenant.get(tenant, ())), self._most - len(self.all))

    def add(self, tenant: str, names: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """A pin gets these, from the first on, as far as there is room: how many, and what none had."""
        own = self._by_tenant.get(tenant, Counter())
        new = [name for name in names if name not in own]
        fresh = [name for name in new if name not in self.all]
        over = {*new[self._quota - len(own) :][:1], *fresh[self._most - len(self.all) :][:1]}
        if over:
            return self.add(tenant, names[: next(at for at, name in enumerate(names) if name in over)])
        if names:
            self._by_tenant.setdefault(tenant, own).update(names)
            self.all.update(new)
        return len(names), fresh

    def remove(self, tenant: str, names: Sequence[bytes]) -> list[bytes]:
        """A pin has these no more; what none has now."""
        own = self._by_tenant[tenant]
        free = _discount(self.all, _discount(own, names))
        if not own:
            del self._by_tenant[tenant]
        return free


def _discount(counts: Counter[bytes], names: Sequence[bytes]) -> list[bytes]:
    """Those that are not counted any more."""
    gone = [name for name in names if counts[name] == 1]
    # Faster than to subtract them one by one.
    dict.update(counts, {name: counts[name] - 1 for name in names})
    for name in gone:
        del counts[name]
    return gone


@dataclass(eq=False)
class Pin:
    """One prefix of a session, until ``deadline``; while a request runs that continues it that is never.

    ``until`` is what it was before that request.
    ``held`` are contents by place, in their order. It stands for ``num_tokens``, and a prompt continues it
    whose first ``end[0]`` names end with ``end[1]``.
    """

    tenant: str
    session: str
    deadline: float = math.inf
    until: float = _OVER
    held: dict[Place, dict[bytes, None]] = field(default_factory=dict)
    num_tokens: int = 0
    end: tuple[int, bytes] = (0, b"")


class SessionPins:
    """All pins. Of what host memory and disk have for a cache group a tenant may pin ``share``.

    The ``disk_bytes`` count as divided like host memory.
    """

    def __init__(self, index: TierIndex, plan: ArenaPlan, share: float, disk_bytes: int = 0) -> None:
        self._index = index
        index.session_pins_lost = self._lost
        file_bytes = {group: bytes_on_disk(plan.row_class(group).row_bytes) for group in plan.groups}
        times = disk_bytes / sum(count * file_bytes[group] for group, count in plan.limits.items())
        self._ledgers: dict[Place, Ledger] = {}
        self._bytes_of: dict[Place, int] = {}
        for group, limit in plan.limits.items():
            self._ledgers[HOST, group] = Ledger(limit, share)
            self._ledgers[DISK, group] = Ledger(limit * times, share)
            self._bytes_of[HOST, group] = plan.row_class(group).row_bytes
            self._bytes_of[DISK, group] = file_bytes[group]
        self._sessions: dict[tuple[str, str], list[Pin]] = {}
        self._counts = Counter[str]()
        self._ends: list[tuple[float, int, Pin]] = []
        self._numbers = itertools.count()
        self.disk_changes: dict[Content, bool] = {}
        """What is pinned on disk, or not any more, since that was taken last."""

    def counts(self) -> dict[Place, int]:
        """How many contents are pinned."""
        return {place: len(ledger.all) for place, ledger in self._ledgers.items()}

    def pinned_bytes(self) -> tuple[tuple[str, int], ...]:
        """By tier."""
        found = dict.fromkeys((HOST, DISK), 0)
        for place, count in self.counts().items():
            found[place[0]] += count * self._bytes_of[place]
        return tuple(found.items())

    def of(self, tenant: str, session: str) -> Sequence[Pin]:
        return tuple(self._sessions.get((tenant, session), ()))

    def admits(self, tenant: str, session: str) -> bool:
        """Whether a session may have a pin: it has one, or there are not too many that have."""
        few = len(self._sessions) < MOST_SESSIONS and self._counts[tenant] < MOST_SESSIONS // 4
        return few or (tenant, session) in self._sessions

    def begin(self, tenant: str, session: str, names: Sequence[bytes]) -> Pin:
        """A request runs whose prompt has these names: the session's pin that it continues, or a new one."""
        if (pins := self._sessions.get((tenant, session))) is None:
            pins = self._sessions[tenant, session] = []
            self._counts[tenant] += 1
        for pin in sorted(pins, key=lambda pin: pin.end[0], reverse=True):
            count, last = pin.end
            if 0 < count <= len(names) and names[count - 1] == last and pin.deadline < math.inf:
                pin.until, pin.deadline = pin.deadline, math.inf
                return pin
        pins.append(pin := Pin(tenant, session))
        if len(pins) > _MOST_BRANCHES:
            self.release(min(pins, key=lambda pin: pin.deadline))
        return pin

    def add(self, pin: Pin, place: Place, names: Sequence[bytes]) -> int:
        """Pin contents, from the first on, as far as the quota goes; in host memory, as they are there.

        Returns how many, from the first on, are pinned now. To a pin that was released nothing is added.
        """
        if pin.deadline == _OVER:
            return 0
        own, (tier, group) = pin.held.setdefault(place, {}), place
        if tier == HOST and not all(kept := self._index.has(group, names)):
            names = names[: kept.index(False)]
        new = [name for name in names if name not in own]
        count, fresh = self._ledgers[place].add(pin.tenant, new)
        own.update(dict.fromkeys(new[:count]))
        self._apply(place, fresh, True)
        return len(names) if count == len(new) else names.index(new[count])

    def room(self, pin: Pin, place: Place) -> int:
        """How many contents more a pin may have there that none has."""
        return self._ledgers[place].room(pin.tenant)

    def let_go(self, pin: Pin, place: Place, names: Sequence[bytes]) -> None:
        """A pin holds these no more; those that it does not are skipped."""
        own = pin.held.get(place, {})
        if gone := [name for name in names if own.pop(name, names) is None]:
            self._apply(place, self._ledgers[place].remove(pin.tenant, gone), False)

    def end(self, pin: Pin, deadline: float) -> None:
        """Its request has ended: from now on it is until ``deadline``."""
        if deadline == _OVER or not any(pin.held.values()):
            self.release(pin)
        elif pin.deadline != _OVER:
            pin.deadline = deadline
            heapq.heappush(self._ends, (deadline, next(self._numbers), pin))

    def expire(self, now: float) -> None:
        """Release what had its time, which a turn of its session may have put off."""
        while self._ends and self._ends[0][0] <= now:
            if (pin := heapq.heappop(self._ends)[2]).deadline <= now:
                self.release(pin)

    def release(self, pin: Pin) -> None:
        """It holds nothing any more, and is over, also if its request runs yet."""
        pin.deadline = _OVER
        for place, own in pin.held.items():
            self.let_go(pin, place, list(own))
        pins = self._sessions.get((pin.tenant, pin.session), [])
        if pin in pins:
            pins.remove(pin)
        if not pins and self._sessions.pop((pin.tenant, pin.session), None) is not None:
            self._counts[pin.tenant] -= 1
            if not self._counts[pin.tenant]:
                del self._counts[pin.tenant]

    def begin_anew(self, pin: Pin) -> None:
        """What it stood for before its request is released; it is that of the request alone."""
        pin.until, pin.num_tokens, pin.end = _OVER, 0, (0, b"")

    def clear(self) -> None:
        """Release all, and order nothing of the disk, which is cleared too."""
        for pins in list(self._sessions.values()):
            for pin in list(pins):
                self.release(pin)
        self.disk_changes.clear()

    def _apply(self, place: Place, names: Sequence[bytes], is_pinned: bool) -> None:
        tier, group = place
        if tier == HOST:
            self._index.set_session_pins(group, names, is_pinned)
        else:
            self.disk_changes.update({(group, name): is_pinned for name in names})

    def _lost(self, group: int, names: Sequence[bytes]) -> None:
        """Contents of host memory are dropped: they could not be stored, or restored."""
        place = (HOST, group)
        # Of thousands of sessions, for a name that none has, that would take its time.
        names = [name for name in names if name in self._ledgers[place].all]
        for pins in self._sessions.values() if names else ():
            for pin in pins:
                self.let_go(pin, place, names)

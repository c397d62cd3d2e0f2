"""Session pins: the prefixes that sessions pin, their deadlines, and each tenant's quota in each tier.

A pin holds the contents of one prefix: host memory and disk do not evict them before the pin's deadline. Pure
bookkeeping: no clock and no I/O; a call costs time in proportion to its contents.
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
"""The part of a tier that all tenants together may pin; the rest stays free for running requests."""
MOST_SESSIONS = 4096
"""The most sessions with pins, a quarter of them of one tenant: contents that sessions share count once."""
_MOST_BRANCHES = 16
"""The most pins of one session; a further pin replaces the one with the earliest deadline."""

_OVER = -math.inf

Place = tuple[str, int]
"""A tier and a cache group. Each pair has its own quota, so that a hit finds its blocks in every group."""


class Ledger:
    """The contents that tenants have pinned in one place, of whose ``limit`` contents each may pin ``share``.

    A content counts once for each tenant that pins it; ``all`` has the number of these tenants by content.
    """

    def __init__(self, limit: float, share: float) -> None:
        self.quota, self._most = int(limit * share), int(limit * MOST_PINNED)
        self._by_tenant: dict[str, Counter[bytes]] = {}
        self.all: Counter[bytes] = Counter()

    def room(self, tenant: str) -> int:
        """The number of contents that a tenant may still pin, if no tenant has pinned them yet."""
        return min(self.quota - len(self._by_tenant.get(tenant, ())), self._most - len(self.all))

    def add(self, tenant: str, names: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Count a pin's contents, from the first on, up to the quota: how many, and those no tenant had."""
        own = self._by_tenant.get(tenant, Counter())
        new = [name for name in names if name not in own]
        fresh = [name for name in new if name not in self.all]
        over = {*new[self.quota - len(own) :][:1], *fresh[self._most - len(self.all) :][:1]}
        if over:
            return self.add(tenant, names[: next(at for at, name in enumerate(names) if name in over)])
        if names:
            self._by_tenant.setdefault(tenant, own).update(names)
            self.all.update(new)
        return len(names), fresh

    def remove(self, tenant: str, names: Sequence[bytes]) -> list[bytes]:
        """Discount contents of a pin of a tenant; returns those that no tenant has pinned any more."""
        own = self._by_tenant[tenant]
        free = _discount(self.all, _discount(own, names))
        if not own:
            del self._by_tenant[tenant]
        return free


def _discount(counts: Counter[bytes], names: Sequence[bytes]) -> list[bytes]:
    """Subtract one from the count of each name; returns the names whose count is 0 now."""
    gone = [name for name in names if counts[name] == 1]
    # One update is faster than a subtraction for each name.
    dict.update(counts, {name: counts[name] - 1 for name in names})
    for name in gone:
        del counts[name]
    return gone


@dataclass(eq=False)
class Pin:
    """One pinned prefix of a session.

    Attributes:
        deadline: when the pin ends, in the caller's seconds; infinite while a request runs that continues it.
        until: the deadline before that request.
        held: the pinned contents by place, in the order of the sequence.
        num_tokens: the length of the prefix.
        end: a count of names, and the last of them; a prompt with that name there continues the prefix.
    """

    tenant: str
    session: str
    deadline: float = math.inf
    until: float = _OVER
    held: dict[Place, dict[bytes, None]] = field(default_factory=dict)
    num_tokens: int = 0
    end: tuple[int, bytes] = (0, b"")


class SessionPins:
    """All pins. A tenant may pin ``share`` of each cache group's part of host memory, and of the disk.

    The quota divides ``disk_bytes`` among the cache groups as ``plan`` divides host memory.
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
        """Contents pinned on disk (True) or unpinned (False) since the owner last took these changes."""

    def quota(self) -> dict[int, int]:
        """By cache group, the most contents of host memory that one tenant may pin."""
        return {group: ledger.quota for (tier, group), ledger in self._ledgers.items() if tier == HOST}

    def counts(self) -> dict[Place, int]:
        """The number of pinned contents by place."""
        return {place: len(ledger.all) for place, ledger in self._ledgers.items()}

    def pinned_bytes(self) -> tuple[tuple[str, int], ...]:
        """The pinned bytes of each tier."""
        found = dict.fromkeys((HOST, DISK), 0)
        for place, count in self.counts().items():
            found[place[0]] += count * self._bytes_of[place]
        return tuple(found.items())

    def of(self, tenant: str, session: str) -> Sequence[Pin]:
        return tuple(self._sessions.get((tenant, session), ()))

    def admits(self, tenant: str, session: str) -> bool:
        """Whether a session may have a pin: it has one, or the bounds of ``MOST_SESSIONS`` allow one more."""
        few = len(self._sessions) < MOST_SESSIONS and self._counts[tenant] < MOST_SESSIONS // 4
        return few or (tenant, session) in self._sessions

    def begin(self, tenant: str, session: str, names: Sequence[bytes]) -> Pin:
        """The session's longest idle pin that a prompt of these names continues, or a new one."""
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
        """Pin contents, from the first on, up to the quota, and in host memory up to the first absent one.

        Returns how many, from the first on, are pinned now; 0 if the pin was released before.
        """
        if pin.deadline == _OVER:
            return 0
        own, (tier, group) = pin.held.setdefault(place, {}), place
        if tier == HOST and not all(kept := self._index.has(group, names)):
            names = names[: kept.index(False)]
        new = [name for name in dict.fromkeys(names) if name not in own]
        count, fresh = self._ledgers[place].add(pin.tenant, new)
        own.update(dict.fromkeys(new[:count]))
        self._apply(place, fresh, True)
        return len(names) if count == len(new) else names.index(new[count])

    def room(self, pin: Pin, place: Place) -> int:
        """The number of contents that a pin may still add in a place, if no tenant has pinned them yet."""
        return self._ledgers[place].room(pin.tenant)

    def let_go(self, pin: Pin, place: Place, names: Sequence[bytes]) -> None:
        """Remove contents from a pin; those that it does not hold are skipped."""
        own = pin.held.get(place, {})
        if gone := [name for name in names if own.pop(name, names) is None]:
            self._apply(place, self._ledgers[place].remove(pin.tenant, gone), False)

    def end(self, pin: Pin, deadline: float) -> None:
        """The pin's request has ended: set its deadline, or release the pin if it holds nothing."""
        if deadline == _OVER or not any(pin.held.values()):
            self.release(pin)
        elif pin.deadline != _OVER:
            pin.deadline = deadline
            heapq.heappush(self._ends, (deadline, next(self._numbers), pin))

    def expire(self, now: float) -> None:
        """Release pins whose deadline has passed. A request since may have moved a deadline."""
        while self._ends and self._ends[0][0] <= now:
            if (pin := heapq.heappop(self._ends)[2]).deadline <= now:
                self.release(pin)

    def release(self, pin: Pin) -> None:
        """Unpin all contents of a pin and end it, even while its request runs."""
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
        """Forget the prefix from before the running request: the pin is that request's alone."""
        pin.until, pin.num_tokens, pin.end = _OVER, 0, (0, b"")

    def clear(self) -> None:
        """Release all pins. The disk gets no orders for that, since it is cleared too."""
        for pins in list(self._sessions.values()):
            for pin in list(pins):
                self.release(pin)
        self.disk_changes.clear()

    def _apply(self, place: Place, names: Sequence[bytes], is_pinned: bool) -> None:
        tier, group = place
        if tier == HOST:
            (self._index.pin if is_pinned else self._index.unpin)(group, names)
        else:
            self.disk_changes.update({(group, name): is_pinned for name in names})

    def _lost(self, group: int, names: Sequence[bytes]) -> None:
        """Host memory drops contents: remove them from all pins."""
        place = (HOST, group)
        # The loop over thousands of sessions is slow, so skip names that no session has pinned.
        names = [name for name in names if name in self._ledgers[place].all]
        for pins in self._sessions.values() if names else ():
            for pin in pins:
                self.let_go(pin, place, names)

"""Which node of a role takes the next request, and which nodes are out of rotation.

Pure: no socket, no clock, no task. Time is an argument, in seconds on any monotonic clock. The owner of a
lease gives at most one verdict (``answered`` or ``unreachable``) and exactly one ``release``; everything else
follows from that.

A node that cannot be reached several times in a row is ejected. After ``eject_s`` it is half open: one
probe, a health check or a request when nothing better is left, decides whether it returns.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvconnect.errors import ConfigError, LocalError
from kvconnect.router.limits import RouterLimits


class State(enum.Enum):
    """Where a node stands. ``UNKNOWN`` takes requests, but is not counted as ready."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    EJECTED = "ejected"
    PROBING = "probing"


_IN_ROTATION = (State.UNKNOWN, State.HEALTHY)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to talk to one node once. ``is_load`` leases count as load, health checks do not."""

    number: int
    url: str
    is_load: bool


@dataclass(slots=True)
class _Node:
    url: str
    state: State = State.UNKNOWN
    in_flight: int = 0
    failures: int = 0
    ejections: int = 0
    retry_at: float = 0.0
    last_taken: int = 0
    probe: int | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """What can be read of a node, for metrics and readiness."""

    url: str
    state: State
    in_flight: int
    ejections: int


@dataclass(slots=True)
class Pool:
    """The nodes of one role. Owned by one event loop; no method waits.

    Raises:
        ConfigError: there is no node, or one is named twice.
    """

    role: str
    urls: Sequence[str]
    limits: RouterLimits = field(default_factory=RouterLimits)
    _nodes: dict[str, _Node] = field(init=False, repr=False)
    _leases: dict[int, Lease] = field(init=False, repr=False, default_factory=dict)
    _numbers: itertools.count[int] = field(init=False, repr=False, default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigError(f"no {self.role} node is given; name at least one URL")
        doubled = sorted({url for url in self.urls if list(self.urls).count(url) > 1})
        if doubled:
            raise ConfigError(f"{self.role} node {doubled[0]} is given twice")
        self._nodes = {url: _Node(url) for url in self.urls}

    def take(self, now: float, avoid: Collection[str] = ()) -> Lease | None:
        """Lease the least loaded node in rotation that is not in ``avoid``.

        Among equals the one that waited longest. With none in rotation, an ejected node whose time
        is up is leased as its probe. None if there is no such node either.
        """
        candidates = [n for n in self._nodes.values() if n.state in _IN_ROTATION and n.url not in avoid]
        if candidates:
            return self._lease(min(candidates, key=lambda n: (n.in_flight, n.last_taken)), is_load=True)
        due = [n for n in self._nodes.values() if self._is_due(n, now) and n.url not in avoid]
        if due:
            return self._lease(min(due, key=lambda n: (n.retry_at, n.last_taken)), is_load=True)
        return None

    def take_check(self, url: str, now: float) -> Lease | None:
        """Lease ``url`` for a health check; None while it is ejected, or already being probed."""
        node = self._nodes[url]
        if node.state in _IN_ROTATION or self._is_due(node, now):
            return self._lease(node, is_load=False)
        return None

    def answered(self, lease: Lease) -> bool:
        """The node answered: it is healthy, whatever its state was. True if that is new."""
        node = self._node_of(lease)
        is_new = node.state is not State.HEALTHY
        node.state, node.failures, node.probe = State.HEALTHY, 0, None
        return is_new

    def unreachable(self, lease: Lease, now: float) -> bool:
        """The node could not be reached. True if it left rotation because of this."""
        node = self._node_of(lease)
        if node.probe == lease.number:
            node.state, node.retry_at, node.probe = State.EJECTED, now + self.limits.eject_s, None
            return False
        if node.state not in _IN_ROTATION:
            return False  # sent before the ejection
        node.failures += 1
        if node.failures < self.limits.failures_to_eject:
            return False
        node.state, node.retry_at = State.EJECTED, now + self.limits.eject_s
        node.ejections += 1
        return True

    def release(self, lease: Lease) -> None:
        """Give a lease back. A probe without a verdict leaves the node half open for the next one.

        Raises:
            LocalError: the lease was given back before.
        """
        node = self._node_of(lease)
        del self._leases[lease.number]
        if lease.is_load:
            node.in_flight -= 1
        if node.probe == lease.number:
            node.state, node.probe = State.EJECTED, None

    def is_ready(self) -> bool:
        """At least one node has answered and is in rotation."""
        return any(node.state is State.HEALTHY for node in self._nodes.values())

    def is_out(self) -> bool:
        """Every node has left rotation."""
        return not any(node.state in _IN_ROTATION for node in self._nodes.values())

    def view(self) -> list[NodeView]:
        """Every node, in the order given."""
        return [NodeView(n.url, n.state, n.in_flight, n.ejections) for n in self._nodes.values()]

    def _is_due(self, node: _Node, now: float) -> bool:
        return node.state is State.EJECTED and now >= node.retry_at

    def _lease(self, node: _Node, *, is_load: bool) -> Lease:
        lease = Lease(next(self._numbers), node.url, is_load)
        self._leases[lease.number] = lease
        if is_load:
            node.in_flight += 1
            node.last_taken = lease.number
        if node.state is State.EJECTED:
            node.state, node.probe = State.PROBING, lease.number
        return lease

    def _node_of(self, lease: Lease) -> _Node:
        if lease.number not in self._leases:
            raise LocalError(f"lease {lease.number} of {lease.url} was given back before")
        return self._nodes[lease.url]

"""Which node of a role takes the next request, and which nodes are out of rotation.

Time is an argument, in seconds on any monotonic clock. The owner of a lease gives at most one verdict
(``answered`` or ``unreachable``) and exactly one ``release``. A node that cannot be reached several times in
a row is ejected. After ``eject_s`` it is half open: one probe, a health check or a request when no other node
is left, decides whether it returns. One that never answered is being started, and may be checked at any time.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvconnect.errors import ConfigError, LocalError
from kvconnect.router.options import NAME, RouterLimits


class State(enum.Enum):
    """Where a node stands. ``UNKNOWN`` takes requests, but is not counted as ready."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    EJECTED = "ejected"
    PROBING = "probing"
    DRAINING = "draining"


_IN_ROTATION = (State.UNKNOWN, State.HEALTHY)


@dataclass(slots=True, eq=False)
class Node:
    """A node as its pool knows it. ``probe`` is the lease whose verdict decides whether it returns.

    ``work`` is what its requests have to compute yet, where that is known.
    """

    url: str
    state: State = State.UNKNOWN
    in_flight: int = 0
    work: float = 0.0
    failures: int = 0
    ejections: int = 0
    retry_at: float = 0.0
    last_taken: int = 0
    was_seen: bool = False
    probe: Lease | None = None
    leases: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """The right to talk to one node once. ``is_load`` leases count as load, health checks do not."""

    url: str
    is_load: bool
    work: float = 0.0
    is_open: bool = True


class Pool:
    """The nodes of one role. Owned by one event loop; no method waits.

    Raises:
        ConfigError: there is no node, or one is named twice.
    """

    def __init__(self, role: str, urls: Sequence[str], limits: RouterLimits | None = None) -> None:
        if not urls:
            raise ConfigError(f"no {role} node is given; name at least one URL")
        doubled = sorted({url for url in urls if list(urls).count(url) > 1})
        if doubled:
            raise ConfigError(f"{role} node {doubled[0]} is given twice")
        self.role = role
        self.limits = limits or RouterLimits()
        self.names = [url for url in urls if url.startswith(NAME)]
        self._nodes = {url: Node(url) for url in urls if url not in self.names}
        self._taken = itertools.count(1)

    @property
    def urls(self) -> Sequence[str]:
        """Every node's, also of one that is being drained."""
        return tuple(self._nodes)

    def add(self, url: str) -> None:
        """One node more, or again, as one that is being started."""
        node = self._nodes.setdefault(url, Node(url))
        if node.state is State.DRAINING:
            node.state = State.UNKNOWN

    def drain(self, url: str) -> None:
        """Give a node no more, and forget it with its last request. Raises ``ConfigError``: there is none."""
        if url not in self._nodes:
            raise ConfigError(f"{url} is no {self.role} node; there are {', '.join(self._nodes) or 'none'}")
        node = self._nodes[url]
        node.state, node.probe = State.DRAINING, None
        self._forget_if_drained(node)

    def take(
        self,
        now: float,
        avoid: Collection[str] = (),
        work: Mapping[str, float] | None = None,
        prefers: str = "",
    ) -> Lease | None:
        """Lease the least loaded node in rotation that is not in ``avoid``.

        Where ``work`` has what the request costs at each node, the one that is done with it first. Among
        equals, and where nothing is known, the one that it ``prefers``, unless that has far more requests
        than another. Then the one that waited longest. With none in rotation, an ejected node whose time is
        up is leased as its probe. None if there is no such node either.
        """
        work = work or {}
        others = [node for node in self._nodes.values() if node.url not in avoid]

        def load(node: Node) -> tuple[float, bool, int, int]:
            until = node.work + work.get(node.url, 0.0) if work else 0.0
            is_other = node.url != prefers or node.in_flight > most
            return until, is_other, node.in_flight, node.last_taken

        most = 2 * min((node.in_flight for node in others if node.state in _IN_ROTATION), default=0) + 2
        if candidates := [node for node in others if node.state in _IN_ROTATION]:
            node = min(candidates, key=load)
        elif due := [node for node in others if self._is_due(node, now)]:
            node = min(due, key=lambda node: (node.retry_at, node.last_taken))
        else:
            return None
        return self._lease(node, is_load=True, work=work.get(node.url, 0.0))

    def computed(self, lease: Lease) -> None:
        """The node has begun its answer: it has nothing of the prompt left to compute."""
        node = self._node_of(lease)
        node.work -= lease.work
        lease.work = 0.0

    def take_check(self, url: str, now: float) -> Lease | None:
        """Lease ``url`` for a health check; None while it is ejected or gone, or already being probed."""
        node = self._nodes.get(url)
        if node is None:
            return None
        is_new = node.state is State.EJECTED and not node.was_seen
        if node.state in _IN_ROTATION or is_new or self._is_due(node, now):
            return self._lease(node, is_load=False)
        return None

    def answered(self, lease: Lease) -> bool:
        """The node answered: it becomes healthy from any state. True if it was not."""
        node = self._node_of(lease)
        is_new = node.state is not State.HEALTHY
        if node.state is State.DRAINING:
            return False
        node.state, node.failures, node.probe, node.was_seen = State.HEALTHY, 0, None, True
        return is_new

    def unreachable(self, lease: Lease, now: float) -> bool:
        """The node could not be reached. True if it left rotation because of this."""
        node = self._node_of(lease)
        if node.probe is lease:
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

    def unseen(self) -> list[str]:
        """Nodes that never answered."""
        return [url for url, node in self._nodes.items() if not node.was_seen]

    def release(self, lease: Lease) -> None:
        """Give a lease back. A probe without a verdict leaves the node half open for the next one.

        Raises:
            LocalError: the lease was given back before.
        """
        self.computed(lease)
        node = self._node_of(lease)
        lease.is_open = False
        if lease.is_load:
            node.in_flight -= 1
        node.leases -= 1
        if node.probe is lease:
            node.state, node.probe = State.EJECTED, None
        self._forget_if_drained(node)

    def _forget_if_drained(self, node: Node) -> None:
        if node.state is State.DRAINING and not node.leases:
            del self._nodes[node.url]

    def is_ready(self) -> bool:
        """At least one node has answered and is in rotation."""
        return any(node.state is State.HEALTHY for node in self._nodes.values())

    def is_out(self) -> bool:
        """Every node has left rotation."""
        return not any(node.state in _IN_ROTATION for node in self._nodes.values())

    def view(self) -> list[Node]:
        """Copies of every node, in the order given."""
        return [replace(node) for node in self._nodes.values()]

    def _is_due(self, node: Node, now: float) -> bool:
        return node.state is State.EJECTED and now >= node.retry_at

    def _lease(self, node: Node, *, is_load: bool, work: float = 0.0) -> Lease:
        lease = Lease(node.url, is_load, work)
        node.leases += 1
        if is_load:
            node.in_flight += 1
            node.work += work
            node.last_taken = next(self._taken)
        if node.state is State.EJECTED:
            node.state, node.probe = State.PROBING, lease
        return lease

    def _node_of(self, lease: Lease) -> Node:
        if not lease.is_open:
            raise LocalError(f"a lease of {lease.url} was given back before")
        return self._nodes[lease.url]

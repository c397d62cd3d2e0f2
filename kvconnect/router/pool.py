"""Which node of a role takes the next request, and which nodes are out of rotation.

The owner of a lease calls ``release`` once. A node that cannot be reached several times in a row is
ejected, and takes no request until it answers a health check.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvconnect.errors import ConfigError
from kvconnect.router.router_options import NAME, RouterLimits


class NodeState(enum.Enum):
    """A node's state. ``UNKNOWN`` takes requests, but does not count as ready."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    EJECTED = "ejected"
    DRAINING = "draining"


_IN_ROTATION = (NodeState.UNKNOWN, NodeState.HEALTHY)


@dataclass(slots=True, eq=False)
class Node:
    """A node of a pool; ``name`` is the DNS name that it was found by, if any.

    ``work`` is the known cost that its requests have still to compute, in tokens.
    """

    url: str
    name: str = ""
    state: NodeState = NodeState.UNKNOWN
    in_flight: int = 0
    work: float = 0.0
    failures: int = 0
    ejections: int = 0
    last_taken: int = 0
    was_seen: bool = False


@dataclass(slots=True, eq=False)
class NodeUse:
    """A lease: the right to ask one node once."""

    url: str
    work: float = 0.0


class Pool:
    """The nodes of one role. Owned by one event loop; no method waits.

    Raises:
        ConfigError: there is no node, or a node is given twice.
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
        """The URLs of all nodes, including draining ones."""
        return tuple(self._nodes)

    def add(self, url: str, name: str = "") -> None:
        """Add a node in state UNKNOWN; a draining node returns to that state."""
        node = self._nodes.setdefault(url, Node(url, name))
        if node.state is NodeState.DRAINING:
            node.state = NodeState.UNKNOWN

    def drain(self, url: str) -> None:
        """Give a node no new request, and drop it after its last. ``ConfigError`` for an unknown node."""
        if url not in self._nodes:
            raise ConfigError(f"{url} is no {self.role} node; there are {', '.join(self._nodes) or 'none'}")
        self._nodes[url].state = NodeState.DRAINING
        self._forget_if_drained(url)

    def take(
        self, avoid: Collection[str] = (), work: Mapping[str, float] | None = None, prefers: str = ""
    ) -> NodeUse | None:
        """Lease the least loaded node in rotation that is not in ``avoid``; None if there is none.

        With ``work``, the cost of the request at each node, the node that finishes first. Among equals, and
        without ``work``, the node that it ``prefers``, unless that has far more requests than another; then
        the node with the fewest requests, then the one that waited longest.
        """
        work = work or {}
        others = [node for node in self.in_rotation() if node.url not in avoid]
        most = 2 * min((node.in_flight for node in others), default=0) + 2

        def load(node: Node) -> tuple[float, bool, int, int]:
            until = node.work + work.get(node.url, 0.0) if work else 0.0
            is_other = node.url != prefers or node.in_flight > most
            return until, is_other, node.in_flight, node.last_taken

        node = min(others, key=load, default=None)
        if node is None:
            return None
        lease = NodeUse(node.url, work.get(node.url, 0.0))
        node.in_flight += 1
        node.work += lease.work
        node.last_taken = next(self._taken)
        return lease

    def computed(self, lease: NodeUse) -> None:
        """The node has begun its answer: no work of this prompt is left."""
        self._nodes[lease.url].work -= lease.work
        lease.work = 0.0

    def release(self, lease: NodeUse) -> None:
        """Return a lease."""
        self.computed(lease)
        self._nodes[lease.url].in_flight -= 1
        self._forget_if_drained(lease.url)

    def answered(self, url: str) -> bool:
        """A node answered: it is healthy now, unless drained or gone. True if it was not healthy before."""
        node = self._nodes.get(url)
        if node is None or node.state is NodeState.DRAINING:
            return False
        is_new = node.state is not NodeState.HEALTHY
        node.state, node.failures, node.was_seen = NodeState.HEALTHY, 0, True
        return is_new

    def unreachable(self, url: str) -> bool:
        """A node could not be reached. True if it left rotation because of this."""
        node = self._nodes.get(url)
        if node is None or node.state not in _IN_ROTATION:
            return False
        node.failures += 1
        if node.failures < self.limits.failures_to_eject:
            return False
        node.state = NodeState.EJECTED
        node.ejections += 1
        return True

    def unseen(self) -> list[str]:
        """Nodes that never answered."""
        return [url for url, node in self._nodes.items() if not node.was_seen]

    def is_ready(self) -> bool:
        """Whether a node has answered and is in rotation."""
        return any(node.state is NodeState.HEALTHY for node in self._nodes.values())

    def in_rotation(self) -> list[Node]:
        """The nodes that take requests. They are the pool's own: read them, and keep none."""
        return [node for node in self._nodes.values() if node.state in _IN_ROTATION]

    def view(self) -> list[Node]:
        """Copies of all nodes, in the order given."""
        return [replace(node) for node in self._nodes.values()]

    def _forget_if_drained(self, url: str) -> None:
        if self._nodes[url].state is NodeState.DRAINING and not self._nodes[url].in_flight:
            del self._nodes[url]

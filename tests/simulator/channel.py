"""The channel that a simulated worker speaks through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvconnect.peer.channel import Arrival, Frame
from tests.simulator.grants import Grants

if TYPE_CHECKING:
    from tests.simulator.network import Connection, Network

_MOST_ARRIVALS = 64


class SimChannel:
    """See ``Channel``. ``stopped``: the process behind it is, and reads nothing.

    ``grants`` is what was said over it about landing slots.
    """

    def __init__(self, network: Network, host: str, port: int, wake: Callable[[], None]) -> None:
        self.host = host
        self.opened: dict[str, Connection] = {}
        self.closed = False
        self.stopped = False
        self._network = network
        self._port = port
        self._wake = wake
        self._inbox: deque[Arrival] = deque()
        self._held: deque[Arrival] = deque()
        self.grants = Grants()

    @property
    def port(self) -> int:
        """See ``Channel``."""
        return self._port

    def connect(self, link: str, host: str, port: int) -> None:
        """See ``Channel``."""
        self.drop(link)
        self._network.open(link, self, port)

    def send(self, link: str, data: bytes) -> bool:
        """See ``Channel``."""
        self._network.world.note(f"{self.host}:{self._port}", "says", link, data)
        connection = self.opened.get(link)
        for listener in self._network.listeners:
            listener(self, link, data)
        if connection is None:
            return self._network.answer(link, data)
        self.grants.said(link, data)
        connection.said.append(data)
        if connection.up:
            self._network.say(connection, data, connection.there)
        else:
            connection.waiting.append(data)
        return True

    def drop(self, link: str) -> None:
        """See ``Channel``."""
        connection = self.opened.get(link)
        if connection is not None:
            self._network.close(connection)

    def receive(self) -> list[Arrival]:
        """See ``Channel``."""
        count = min(len(self._inbox), _MOST_ARRIVALS)
        arrived = [self._inbox.popleft() for _ in range(count)]
        taken = [item for item in arrived if item.link.startswith("in:") or item.link in self.opened]
        for item in taken:
            if isinstance(item, Frame) and item.link in self.opened:
                self.grants.heard(item.link, item.data)
        return taken

    def take(self, item: Arrival) -> None:
        """Called by the network."""
        # Of one connection nothing overtakes what came before it, the news that it was lost included.
        is_behind = any(held.link == item.link for held in self._held)
        (self._held if is_behind else self._inbox).append(item)
        self._wake()

    def go_on(self) -> None:
        """The process runs again: its I/O thread takes a moment to hand over what came meanwhile."""
        self.stopped = False
        world = self._network.world
        self._held.extend(self._inbox)
        self._inbox.clear()

        def hand_over() -> None:
            self._inbox.extendleft(reversed(self._held))
            self._held.clear()
            self._wake()

        world.after(0.01 * world.random.random(), hand_over)

    def wait(self, timeout_s: float) -> None:
        """Returns at once: time is the simulation's."""

    def wake(self) -> None:
        """See ``Channel``."""
        self._wake()

    def close(self) -> None:
        """See ``Channel``."""
        self._network.kill(self._port)

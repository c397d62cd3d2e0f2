"""Channels that reach each other inside one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kvconnect.peer.channel import Arrival, Frame, LinkLost
from kvconnect.peer.loss import PeerLoss


class MemoryNetwork:
    """Channels that reach each other inside one process, ``127.0.0.1``; ``clock`` is what their owners go by.

    Frames arrive at once. ``cut`` severs the way between two ports until ``mend``; frames on a severed way
    are lost. Deterministic: no threads, no sockets.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._ports = itertools.count(1)
        self._channels: dict[int, MemoryChannel] = {}
        self._cut: set[frozenset[int]] = set()

    def channel(self) -> MemoryChannel:
        """A new channel on the next port."""
        channel = MemoryChannel(self, next(self._ports))
        self._channels[channel.port] = channel
        return channel

    def cut(self, first: int, second: int) -> None:
        """Lose every frame between two ports from now on."""
        self._cut.add(frozenset((first, second)))

    def mend(self, first: int, second: int) -> None:
        """Carry frames between two ports again."""
        self._cut.discard(frozenset((first, second)))

    def kill(self, port: int) -> None:
        """The process behind a port is gone: those connected to it lose their link."""
        self._channels.pop(port, None)
        for channel in self._channels.values():
            channel.lose_links_to(port)

    def deliver(self, source: int, target: int, link: str, data: bytes) -> bool:
        """Put a frame on its way. False if there is nobody at the target."""
        if target not in self._channels:
            return False
        if frozenset((source, target)) not in self._cut:
            host = "127.0.0.1" if link.startswith("in:") else ""
            self._channels[target].arrived.append(Frame(link, data, host))
        return True


class MemoryChannel:
    """One end of a ``MemoryNetwork``. ``arrived`` is what was not received yet."""

    def __init__(self, network: MemoryNetwork, port: int) -> None:
        self._network = network
        self.port = port
        self._opened: dict[str, int] = {}
        self.arrived: list[Arrival] = []

    def connect(self, link: str, host: str, port: int) -> None:
        """Open a link to a port; ``host`` is ignored."""
        self._opened[link] = port

    def send(self, link: str, data: bytes) -> bool:
        """Send over a link we opened, or answer over one that came (``in:PORT:LINK``)."""
        if link in self._opened:
            target = self._opened[link]
            delivered = self._network.deliver(self.port, target, f"in:{self.port}:{link}", data)
            if not delivered:
                self._lose(link)
            return True
        _, port, theirs = link.split(":", 2)
        return self._network.deliver(self.port, int(port), theirs, data)

    def drop(self, link: str) -> None:
        """Forget a link."""
        self._opened.pop(link, None)

    def receive(self) -> list[Arrival]:
        """What has arrived by now."""
        arrived, self.arrived = self.arrived, []
        return [item for item in arrived if item.link.startswith("in:") or item.link in self._opened]

    def lose_links_to(self, port: int) -> None:
        """Called by the network when a process is gone."""
        for link, target in self._opened.items():
            if target == port:
                self._lose(link)

    def _lose(self, link: str) -> None:
        self.arrived.append(LinkLost(link, PeerLoss.PROCESS_GONE))

    def wait(self, timeout_s: float) -> None:
        """Returns at once: time is the caller's."""

    def wake(self) -> None:
        """Nothing sleeps."""

    def close(self) -> None:
        """Leave the network."""
        self._network.kill(self.port)

"""The interface of the side channel, which carries opaque frames. One thread owns it, except for ``wake``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvconnect.peer.loss import PeerLoss


@dataclass(frozen=True)
class Frame:
    """One received frame. ``host`` is the sender's address if the peer opened the connection, else empty."""

    link: str
    data: bytes
    host: str = ""


@dataclass(frozen=True)
class LinkLost:
    """A connection that this worker opened is lost. ``reason``, if known, is why it was never established."""

    link: str
    loss: PeerLoss
    reason: str = ""


Arrival = Frame | LinkLost


class Channel(Protocol):
    """A worker's side channel. A link is the name of a connection: chosen by the caller for connections that
    it opens, by the channel for connections that peers open."""

    @property
    def port(self) -> int: ...

    def connect(self, link: str, host: str, port: int) -> None:
        """Open a connection under the name ``link``. Does not wait; frames sent before it is up are kept."""
        ...

    def send(self, link: str, data: bytes) -> bool:
        """Send a frame. False: it was dropped, because the peer does not keep up or the link is unknown."""
        ...

    def drop(self, link: str) -> None:
        """Close a connection that ``connect`` opened. Unknown names are ignored."""
        ...

    def receive(self) -> list[Arrival]:
        """A bounded number of received frames and lost connections, in order per connection. Never waits."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until a frame arrives, a connection is lost, ``wake`` is called, or the time is over."""
        ...

    def wake(self) -> None:
        """End a ``wait`` early. May be called from any thread."""
        ...

    def close(self) -> None:
        """Close all connections. Idempotent."""
        ...

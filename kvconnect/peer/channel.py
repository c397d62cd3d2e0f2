"""How frames travel between workers. A channel belongs to one thread, except for ``wake``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvconnect.peer.loss import PeerLoss


@dataclass(frozen=True)
class Frame:
    """One message that came over a connection; over one that a peer opened, from ``host`` if known."""

    link: str
    data: bytes
    host: str = ""


@dataclass(frozen=True)
class LinkLost:
    """A connection that we opened broke. ``reason`` is why it never was one, most likely, where known."""

    link: str
    loss: PeerLoss
    reason: str = ""


Arrival = Frame | LinkLost


class Channel(Protocol):
    """A worker's side channel. Links are names: ours that we open, and the channel's for those that come."""

    @property
    def port(self) -> int: ...

    def connect(self, link: str, host: str, port: int) -> None:
        """Open a connection under a name of ours. Does not wait; frames sent meanwhile are kept."""
        ...

    def send(self, link: str, data: bytes) -> bool:
        """Send a frame. False if it cannot be sent now and was dropped: the peer does not keep up."""
        ...

    def drop(self, link: str) -> None:
        """Close a connection that we opened. Unknown names are ignored."""
        ...

    def receive(self) -> list[Arrival]:
        """What arrived, at most a bounded number, in order per connection. Never waits."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives, ``wake`` is called, or the time is over."""
        ...

    def wake(self) -> None:
        """End a ``wait`` early. May be called from any thread."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...

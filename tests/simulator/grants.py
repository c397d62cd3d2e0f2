"""Which landing slot was granted to whom, as it was said on the wire, and who said that it wrote there.

Knows nothing of what the worker believes: only the frames that it sends and takes.
"""

from __future__ import annotations

from collections.abc import Callable

from kvconnect.errors import PeerError
from kvconnect.peer.messages import CreditGrant, Fetch, Landed
from tests.simulator.frames import read_frame, tag_of

Grant = tuple[str, int, int]
"""The connection, the number of the fetch, and the generation."""


class Grants:
    """The landing slots of one worker. ``granted`` is told of the address of each that is."""

    def __init__(self) -> None:
        self.granted: Callable[[int], None] = lambda address: None
        self._granted: dict[int, Grant] = {}
        self._landed: set[Grant] = set()

    def said(self, link: str, data: bytes) -> None:
        """The worker says something to a peer that it fetches from."""
        tag = tag_of(data)
        if b"fetch" in tag or b"granted" in tag:
            message = read_frame(data, to_decode=False)
            assert isinstance(message, Fetch | CreditGrant)
            for grant in message.grants:
                self._granted[grant.address] = (link, message.transfer_id, grant.generation)
                self.granted(grant.address)

    def heard(self, link: str, data: bytes) -> None:
        """Such a peer says something."""
        if b"landed" in tag_of(data):
            try:
                message = read_frame(data, to_decode=True)
            except PeerError:
                return
            if isinstance(message, Landed):
                self._landed.add((link, message.transfer_id, message.generation))

    def use(self, address: int) -> bool:
        """The worker takes what lies in a slot. False: whom it granted that has not said that it is there.

        What was said is good for one use.
        """
        grant = self._granted.pop(address, None)
        if grant is None or grant not in self._landed:
            return False
        self._landed.discard(grant)
        return True

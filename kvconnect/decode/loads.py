"""D's records: one for each load, and within it one for each rank fetch."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.decode.landing import Landing
from kvconnect.outcome import Cause, Reason
from kvconnect.transfer.orders import Load, PeerKey
from kvconnect.transfer.parts import Timer
from kvconnect.transfer.slots import checked_move


class RankFetchState(enum.Enum):
    """The state of a rank fetch."""

    MEETING = "meeting the peer"
    ASKED = "asked"
    UNPACKING = "sent, being unpacked"
    LANDED = "landed"
    FAILED = "failed"


RANK_FETCH_MOVES: Mapping[RankFetchState, Sequence[RankFetchState]] = {
    RankFetchState.MEETING: (RankFetchState.ASKED, RankFetchState.FAILED),
    # To be asked again: the peer has forgotten this node, or lost what it was sending, and does nothing.
    RankFetchState.ASKED: (RankFetchState.UNPACKING, RankFetchState.MEETING, RankFetchState.FAILED),
    RankFetchState.UNPACKING: (RankFetchState.LANDED, RankFetchState.FAILED),
    # All of it is in its pages; or slots that the peer may still write are in quarantine.
    RankFetchState.LANDED: (),
    RankFetchState.FAILED: (),
}

OTHER_EPOCH = Cause.EPOCH("the prefill node holds something else under this handle than before")

_WAITING = (RankFetchState.MEETING, RankFetchState.ASKED)


@dataclass(eq=False)
class RankFetch:
    """One source rank's part of a load.

    ``landing``: its chunks and slots. ``repeats``: how often the peer lost it or its chunks before the end.
    """

    load: LoadRecord
    rank: int
    state: RankFetchState = RankFetchState.MEETING
    transfer_id: int = -1
    link: str = ""
    landing: Landing | None = None
    repeats: int = 0

    def move(self, after: RankFetchState) -> None:
        """Change state, or raise ``IllegalTransition``."""
        who = f"fetch {self.transfer_id} of rank {self.rank}"
        self.state = checked_move(RANK_FETCH_MOVES, self.state, after, who)

    @property
    def is_unpacking(self) -> bool:
        """A kernel unpacks chunks of the latest fetch, which may have ended for the peer."""
        return self.landing is not None and not self.landing.idle

    @property
    def over(self) -> bool:
        """No part of this fetch can write to D's pages any more."""
        return self.state in (RankFetchState.LANDED, RankFetchState.FAILED)


@dataclass(eq=False)
class LoadRecord:
    """D's record of one load.

    ``is_unused`` returns whether the device has finished all earlier use of the blocks. ``admitted``: the
    load has had its turn. ``fetches``: empty until the peer's ranks are known. ``given_back``: the peer was
    informed of the failure. ``moved``: bytes and chunks by lane. ``epochs``: those of the leases by rank, of
    a renewal or the fetch's acceptance. ``is_ragged``: see ``Results``. ``attachment``: what came with the
    KV. ``on_device``: all ranks that sent named KV so far had it on their device. ``changed`` is called with
    the load when it has to be advanced.
    """

    order: Load
    ordered_at: float
    deadline: float
    is_unused: Callable[[], bool]
    changed: Callable[[LoadRecord], None]
    timer: Timer
    admitted: bool = False
    given_back: bool = False
    fetches: dict[int, RankFetch] = field(default_factory=dict)
    error: Reason | None = None
    moved: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    epochs: dict[int, int] = field(default_factory=dict)
    is_ragged: bool = False
    attachment: bytes = b""
    on_device: bool = True

    @property
    def peer(self) -> PeerKey:
        return self.order.peer

    @property
    def handle(self) -> str:
        """The handle whose lease is renewed for this load; empty where the load is refused."""
        return self.order.handle

    def counts_on(self, rank: int) -> bool:
        """Whether the load still needs the lease of this rank of its peer."""
        fetch = self.fetches.get(rank)
        return not self.error and (fetch is None or fetch.state in _WAITING)

    def is_to_ask_of(self, rank: int) -> bool:
        """Whether this rank of the peer was not asked yet."""
        return rank not in self.fetches or self.fetches[rank].state is RankFetchState.MEETING

    @property
    def is_to_ask(self) -> bool:
        """A rank of the peer was not asked yet, or the peer's ranks are not known."""
        return not self.fetches or any(map(self.is_to_ask_of, self.fetches))

    def fail(self, reason: Reason) -> None:
        """Fail the load. The first reason is the one reported."""
        self.error = self.error or reason
        self.touch()

    def touch(self) -> None:
        """Have the load advanced in this turn."""
        self.changed(self)

    def digest(self) -> str:
        """A digest of the digests of all chunks that were committed, in hex; empty without any."""
        digest, count = hashlib.blake2b(digest_size=16), 0
        for rank, fetch in sorted(self.fetches.items()):
            for chunk, of_chunk in sorted(fetch.landing.committed.items() if fetch.landing else ()):
                digest.update(struct.pack("<IIQ", rank, chunk, of_chunk))
                count += 1
        return digest.hexdigest() if count else ""

    @property
    def over(self) -> bool:
        """Every rank fetch has ended; without any, the load has failed."""
        return all(fetch.over for fetch in self.fetches.values()) and bool(self.fetches or self.error)

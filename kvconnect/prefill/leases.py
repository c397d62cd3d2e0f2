"""P's record of one request behind a handle: while it is prefilled and streamed, and then held for others.

Pure, with the time as an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.region_table import GroupGeometry
from kvconnect.errors import PeerError
from kvconnect.orders import GroupBlocks, Hold, Progress
from kvconnect.outcome import Cause, Reason
from kvconnect.transfer.kept import Kept
from kvconnect.transfer.timers import Timer

Consumer = tuple[str, str, int]
"""Who fetches: engine id, incarnation, rank."""

TransferKey = tuple[str, int]
"""A fetch as P knows it: the connection it came over, and D's number for it."""


@dataclass(eq=False)
class Lease:
    """What P computes or holds for the ranks of one engine (``owner``), each of its ``consumers`` once.

    Computed: ``ready_tokens`` of ``num_tokens`` are, in ``blocks`` by group; ``marks`` are tokens that the
    device was given, each with a check whether they are computed. Until the request is held it may lose
    its blocks, and nothing that was sent of them counts. ``epoch`` is another whenever they are others.

    Held: ``hold`` is set, and ``is_computed`` returns whether all of it is. The lease ends at ``expires_at``,
    which may be moved as far as ``last_until``. ``renewers`` are the connections over which a peer
    renewed it. ``revoked`` states why it is given up before its time. What was sent counts while it
    ``is_intact``; the last ``replay`` tokens are computed again by who fetches. ``kept`` are the
    rows of one by name. ``timer`` is armed while it is held.
    """

    handle: str
    num_tokens: int
    epoch: int = 0
    owner: str | None = None
    consumers: int | None = None
    served: set[Consumer] = field(default_factory=set)
    released: set[Consumer] = field(default_factory=set)
    sending: set[TransferKey] = field(default_factory=set)
    ready_tokens: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    marks: deque[tuple[Callable[[], bool], int]] = field(default_factory=deque)
    hold: Hold | None = None
    is_computed: Callable[[], bool] = lambda: False
    held_at: float = 0.0
    expires_at: float = 0.0
    last_until: float = 0.0
    renewers: set[str] = field(default_factory=set)
    revoked: Reason | None = None
    replay: int = 1
    is_intact: Callable[[], bool] = lambda: True
    kept: Kept | None = None
    timer: Timer | None = None

    def __str__(self) -> str:
        return f"request {self.hold.request_id}" if self.hold is not None else "an unfinished prefill"

    def claim(self, consumer: Consumer, consumers: int) -> None:
        """A rank fetches, and states how many ranks of its engine will.

        Raises:
            PeerError: it has no right to.
        """
        if self.owner not in (None, consumer[0]):
            raise PeerError("another engine has fetched this request", Cause.FETCHED_BEFORE)
        if consumer in self.served or consumer in self.released:
            raise PeerError("this rank has had this request", Cause.FETCHED_BEFORE)
        self.owner, self.consumers = consumer[0], consumers

    @property
    def satisfied(self) -> bool:
        """Every rank that would fetch did, or released it."""
        ranks = {rank for _, _, rank in self.served | self.released}
        return self.consumers is not None and len(ranks) >= self.consumers

    @property
    def is_whole(self) -> bool:
        """The request is held, and all of it is computed."""
        return self.hold is not None and self.is_computed()

    def add(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """Take what is new. False: it does not follow from what is known, and nothing was taken."""
        if any(new.first_block != len(self.blocks.get(new.group, ())) for new in order.groups):
            return False
        for new in order.groups:
            self.blocks.setdefault(new.group, []).extend(new.block_ids)
        self.marks.append((is_computed, order.computed_tokens))
        return True

    def clear(self, epoch: int) -> None:
        """Its blocks are lost: what is computed from now on belongs to another epoch."""
        self.epoch = epoch
        self.ready_tokens = 0
        self.blocks.clear()
        self.marks.clear()

    def advance(self) -> None:
        """Take what the device has computed meanwhile."""
        while self.marks and self.marks[0][0]():
            self.ready_tokens = max(self.ready_tokens, self.marks.popleft()[1])

    def differs_from(self, order: Hold) -> str:
        """Why what was sent is not of what is held now, or nothing."""
        if order.num_tokens != self.num_tokens:
            return f"{self.num_tokens} tokens were to be held, {order.num_tokens} are"
        for held in order.groups:
            known = self.blocks.get(held.group, ())[held.first_block :]
            # A null block has left its window since.
            if any(a and b and a != b for a, b in zip(known, held.block_ids, strict=False)):
                return f"the blocks of cache group {held.group} are others now"
        return ""

    def blocks_of(
        self, geometry: Sequence[GroupGeometry], start_token: int, stop_token: int
    ) -> tuple[GroupBlocks, ...]:
        """The blocks that hold these tokens, by our groups; and the states, once they are held."""
        known: dict[int, tuple[int, Sequence[int]]]
        if self.hold is not None:
            known = {held.group: (held.first_block, held.block_ids) for held in self.hold.groups}
        else:
            known = {group: (0, ids) for group, ids in self.blocks.items()}
        made = []
        for group in geometry:
            first, ids = known.get(group.group, (0, ()))
            if not group.is_state:
                tokens = group.block_tokens * group.blocks_per_kv_block
                begin = max(first, start_token // tokens)
                ids = ids[begin - first : max(begin, div_ceil(stop_token, tokens)) - first]
                first = begin
                # What no later token sees may be another request's by now.
                ids = group.rule.only_kept(ids, first, self.num_tokens, tokens, replay=1)
            made.append(GroupBlocks(group.group, first, tuple(ids)))
        return tuple(made)

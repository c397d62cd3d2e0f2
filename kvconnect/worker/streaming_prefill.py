"""Prefills that P streams while it computes them: their blocks so far, and how much the device has computed.

What is computed can be sent while the rest is not. Whether it was of any use is known only when the
request is held: until then it may lose its blocks, and nothing that was sent of it counts. Pure
bookkeeping; a prefill is forgotten when it is held, or nothing comes of it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterator, KeysView, Sequence
from dataclasses import dataclass, field

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.region_table import GroupGeometry
from kvconnect.orders import GroupBlocks, Hold, Progress
from kvconnect.worker.leases import Claims

logger = logging.getLogger(__name__)

_DEVICE_POLL_S = 2e-3
"""How often a prefill that a fetch waits for is looked after. More often would slow it down."""


@dataclass(eq=False)
class StreamingPrefill(Claims):
    """P's record of one prefill: ``ready_tokens`` of ``num_tokens`` are computed, ``blocks`` are by group.

    ``marks`` are tokens that the device has been given, each with what says whether they are computed.
    ``hold`` is set once the request is held, and ``is_computed`` then says whether all of it is.
    """

    handle: str
    num_tokens: int
    ready_tokens: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    marks: deque[tuple[Callable[[], bool], int]] = field(default_factory=deque)
    hold: Hold | None = None
    is_computed: Callable[[], bool] = lambda: False

    def add(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """Take what is new. False: it does not follow from what is known, and nothing was taken."""
        for news in order.groups:
            if news.first_block != len(self.blocks.get(news.group, ())):
                return False
        for news in order.groups:
            self.blocks.setdefault(news.group, []).extend(news.block_ids)
        self.marks.append((is_computed, order.computed_tokens))
        return True

    def clear(self, epoch: int) -> None:
        """Its blocks are lost: what is computed from now on is of another epoch."""
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

    @property
    def is_whole(self) -> bool:
        """The request is held, and all of it is computed."""
        return self.hold is not None and self.is_computed()

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


class StreamingPrefills:
    """All prefills under way that are told about, by handle.

    Args:
        epochs: numbers that nothing else that is held has.
    """

    def __init__(self, epochs: Iterator[int]) -> None:
        self._epochs = epochs
        self._prefills: dict[str, StreamingPrefill] = {}

    def __len__(self) -> int:
        return len(self._prefills)

    @property
    def handles(self) -> KeysView[str]:
        """Those of all prefills. A view."""
        return self._prefills.keys()

    def get(self, handle: str) -> StreamingPrefill | None:
        """The prefill behind a handle."""
        return self._prefills.get(handle)

    def pop(self, handle: str) -> StreamingPrefill | None:
        """The prefill behind a handle, which is over."""
        return self._prefills.pop(handle, None)

    def progress(self, order: Progress, is_computed: Callable[[], bool]) -> StreamingPrefill | None:
        """A prefill went on. What is returned is not known any further, and what was sent of it is void."""
        prefill = self._prefills.get(order.handle)
        if prefill is None:
            prefill = StreamingPrefill(order.handle, order.num_tokens, epoch=next(self._epochs))
            self._prefills[order.handle] = prefill
        if prefill.add(order, is_computed):
            return None
        logger.error("the progress of prefill %s does not follow from what is known of it", order.handle)
        prefill.clear(next(self._epochs))
        return prefill

    def preempted(self, handle: str) -> StreamingPrefill | None:
        """A prefill lost its blocks. What is returned is known, and what was sent of it is void."""
        prefill = self._prefills.get(handle)
        if prefill is not None:
            prefill.clear(next(self._epochs))
        return prefill

    def next_poll(self, waited: Container[str], now: float) -> float | None:
        """When to look whether the device is further, if anybody waits for that or for one of ``waited``."""
        for prefill in self._prefills.values():
            if prefill.marks and (prefill.sending or prefill.handle in waited):
                return now + _DEVICE_POLL_S
        return None

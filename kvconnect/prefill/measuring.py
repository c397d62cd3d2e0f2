"""How fast a link is, for a tool that asks: what P writes for a moment to scratch memory of that peer.

Packing is that of a request with blocks anywhere in the cache, but what leaves this node is scratch memory:
a peer without a handle gets nothing of a request. Owned by the transfer thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.specs import div_ceil
from kvconnect.engine.base import Completion
from kvconnect.errors import PeerError
from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import Grant, Introduction, Measure
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import TokenSpan
from kvconnect.prefill.outbox import BatchOutbox, ChunkSupply, Columns, Outbox, Parcel, SlotOutbox
from kvconnect.prefill.send_path import SendPath
from kvconnect.transfer.local import Local
from kvconnect.transfer.slots import SlotEvent

MEASUREMENT = -1
"""The number of a measurement among the transfers of a connection."""
LONGEST_S = 5.0
"""From its beginning to its answer."""
LEAST_PAUSE_S = 0.2
"""From the beginning of one to that of the next; twice the seconds of a longer one."""
_TOKENS = 4096

Clock = Callable[[], float]


def measuring_outbox(
    asked: Measure, local: Local, path: SendPath, peer: Introduction, clock: Clock = time.monotonic
) -> Outbox:
    """What is written to ``peer`` until ``asked.seconds`` are over. Raises ``PeerError``: it cannot be."""
    ours = local.introduction
    length = min(ours.scratch_bytes, local.engine.capabilities.max_bytes)
    if not length or peer.scratch_bytes < length or not peer.scratch_address:
        raise PeerError(
            f"scratch memory is {ours.scratch_bytes} bytes here, {peer.scratch_bytes} at the peer"
        )
    targets = _targets(peer, length)
    until = clock() + asked.seconds
    if not asked.packed:
        return BatchOutbox(_whole(ours.scratch_address, targets, length, clock, until), copies=0)
    if not local.send.slots:
        raise PeerError("there are no send slots")
    supply = _Requests(path.packer, local, min(length, path.slot_bytes), clock, until)
    return _PackedOutbox(path.packer, supply, path.name, local, targets)


def _targets(peer: Introduction, length: int) -> Iterator[int]:
    """Places in the peer's scratch memory, one after the other, for ever."""
    while True:
        for index in range(peer.scratch_bytes // length):
            yield peer.scratch_address + index * length


def _whole(source: int, targets: Iterator[int], length: int, clock: Clock, until: float) -> Iterator[Columns]:
    while clock() < until:
        column = np.array((source, next(targets), length), dtype=np.int64)
        yield column[:1], column[1:2], column[2:]


class _Requests(ChunkSupply):
    """The chunks of made-up requests, until the time is over."""

    count = taken = 0

    def __init__(self, packer: Packer, local: Local, most_bytes: int, clock: Clock, until: float) -> None:
        self._packer, self._clock, self._until = packer, clock, until
        self._blocks, self._tokens = any_blocks(local.table)
        streams = packer.chunker.wire.streams
        spans = {
            stream.target_group: TokenSpan(stream.target_group, 0, 1 if stream.is_state else self._tokens)
            for stream in streams
        }
        self._chunks = packer.chunker.cut(list(spans.values()), most_bytes)
        self._staged: list[StagedChunk] = []

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until

    @property
    def has_next(self) -> bool:
        return not self.is_over

    @property
    def is_due(self) -> bool:
        return not self.is_over

    @property
    def due(self) -> int:
        return self.taken + 1

    def take(self) -> tuple[int, StagedChunk]:
        if not self._staged:
            self._staged = list(self._packer.stage(self._blocks, self._chunks, self._tokens))
        self.taken += 1
        return self.taken, self._staged.pop()


def any_blocks(table: RegionTable) -> tuple[list[GroupBlocks], int]:
    """Blocks of a request, anywhere in every cache group, and how many tokens they hold."""
    rng, tokens, room = random.Random(0), _TOKENS, {}
    for group in table.groups:
        blocks = min(region.num_blocks for region in table.regions if region.group == group.group)
        room[group.group] = blocks // group.blocks_per_kv_block - 1
        if not group.is_state:
            tokens = min(tokens, room[group.group] * group.block_tokens * group.blocks_per_kv_block)
    chosen = []
    for group in table.groups:
        count = 1 if group.is_state else div_ceil(tokens, group.block_tokens * group.blocks_per_kv_block)
        ids = rng.sample(range(1, room[group.group] + 1), count)
        chosen.append(GroupBlocks(group.group, 0, tuple(ids)))
    return chosen, tokens


class _PackedOutbox(SlotOutbox):
    """Packs as for a fetch; the engine is given scratch memory in place of each slot."""

    def __init__(
        self, packer: Packer, supply: ChunkSupply, holder: str, local: Local, targets: Iterator[int]
    ) -> None:
        super().__init__(packer, supply, local.send, True, holder, lambda moment, number: None)
        self._source = np.array([local.introduction.scratch_address], dtype=np.int64)
        self._targets = targets
        self._most = len(local.send.slots)

    def advance(self, stopping: bool) -> Iterator[Parcel]:
        while len(self._grants) < self._most:
            self._grants.append(Grant(next(self._targets), self._pool.slot_bytes, 1))
        return super().advance(stopping)

    def peek(self) -> Columns | None:
        columns = super().peek()
        return columns and (self._source, *columns[1:])

    def ended(self, completion: Completion) -> Parcel | None:
        parcel = self._in_flight.pop(completion.batch_id)
        # However it ended: the engine was given no slot that it might still read.
        self._move(parcel, SlotEvent.RETURN)
        # As with a load, each chunk is reported to the peer, which unpacks as much.
        return parcel if completion.quiescent else None

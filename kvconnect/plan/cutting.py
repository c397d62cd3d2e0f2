"""Into which chunks a request is cut for the packed path. Pure; made once for a pair of caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.region_table import GroupGeometry
from kvconnect.errors import LayoutError
from kvconnect.orders import GroupBlocks
from kvconnect.plan.align import TableCard
from kvconnect.plan.chunks import Chunk, Chunker, TokenSpan, wanted_spans

SECONDS_PER_CHUNK = 400e-6
"""What a chunk costs whatever its size: a launch, a post and a message on either side."""

_MOST_CHUNKS = 16


class RequestCutter:
    """Cuts what a target wants of a source into chunks that fit a slot.

    Args:
        chunker: of the wire between the two.
        pack_bytes_per_s: about how fast pages are packed and unpacked.
    """

    def __init__(
        self,
        chunker: Chunker,
        source: TableCard,
        target: TableCard,
        slot_bytes: int,
        pack_bytes_per_s: float,
    ) -> None:
        self._chunker = chunker
        self._geometry = target.groups
        self._slot_bytes = slot_bytes
        self._pack_bytes_per_s = pack_bytes_per_s
        # The larger of both sides' blocks: no page is cut.
        self._align_tokens = max(
            (
                group.block_tokens * group.blocks_per_kv_block
                for group in (*source.groups, *target.groups)
                if not group.is_state
            ),
            default=1,
        )
        wired = {stream.target_group for stream in chunker.wire.streams}
        step = _one_step([group for group in target.groups if group.group in wired], self._align_tokens)
        self._step_bytes = self._bytes_of(step)

    def cut(self, wanted: Sequence[GroupBlocks], num_tokens: int) -> tuple[Chunk, ...]:
        """Chunks that fit a slot, and several of them where there is enough to move.

        Raises:
            LayoutError: a slot is too small for the fewest rows that can travel alone.
        """
        spans = wanted_spans(self._geometry, wanted, num_tokens)
        total_bytes = self._bytes_of(spans)
        chunk_bytes = div_ceil(total_bytes, chunks_in_turn(total_bytes, self._pack_bytes_per_s))
        for budget in (min(self._slot_bytes, chunk_bytes + self._step_bytes), self._slot_bytes):
            with suppress(LayoutError):
                return self._chunker.cut(spans, budget, self._align_tokens)
        # No slot holds a whole block: blocks are cut where they must be.
        return self._chunker.cut(spans, self._slot_bytes)

    def _bytes_of(self, spans: tuple[TokenSpan, ...]) -> int:
        return self._chunker.place(Chunk(0, len(self._chunker.wire.streams), spans)).total_bytes


def chunks_in_turn(total_bytes: int, pack_bytes_per_s: float) -> int:
    """Into how many chunks a transfer is best cut, slots aside.

    While one chunk is on its way the next is packed and the last unpacked, so that only the packing of the
    first and the unpacking of the last cost time: less with more chunks, each of which costs its own.
    """
    best = math.sqrt(2 * total_bytes / (pack_bytes_per_s * SECONDS_PER_CHUNK))
    return max(1, min(_MOST_CHUNKS, round(best)))


def _one_step(geometry: Sequence[GroupGeometry], align_tokens: int) -> tuple[TokenSpan, ...]:
    """What chunks grow by, in every group."""
    return tuple(TokenSpan(group.group, 0, 1 if group.is_state else align_tokens) for group in geometry)

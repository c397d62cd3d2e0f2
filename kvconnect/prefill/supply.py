"""The chunks of a fetch, as they can be packed: all from the start, or as a prefill goes on.

Owned by the transfer thread.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from kvconnect.cache.region_table import GroupGeometry
from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.packer import Packer
from kvconnect.plan.blocks import WHOLE, Share
from kvconnect.plan.chunks import Chunk
from kvconnect.prefill.leases import Lease


class ChunkSupply:
    """Chunks, each given out once. Of what is held, all can be packed, in the order of the fetch.

    Of a prefill under way, each can once its tokens are computed, states at the end: in the order in which
    that happens. ``count`` are all of them, of which ``taken`` were; ``largest_bytes`` is the largest.

    Raises:
        LayoutError: a chunk is none of the packer's wire, or its tokens are not held.
        LocalError: a block is none of this cache.
    """

    def __init__(
        self,
        lease: Lease,
        packer: Packer,
        geometry: Sequence[GroupGeometry],
        chunks: Sequence[Chunk],
        share: Share = WHOLE,
    ) -> None:
        self.count = len(chunks)
        # A packer takes it that one token is computed again.
        self._lease, self._ahead = lease, 1 - lease.replay
        self._packer = packer
        self._geometry = geometry
        self._chunks = chunks
        self._staged: Sequence[StagedChunk] = ()
        self._order: Sequence[int] = range(len(chunks))
        self.taken = 0
        # The tokens that each needs, ascending; none once all can be packed.
        self._needs: Sequence[float] = ()
        streams = packer.chunker.wire.streams
        self._states = {stream.target_group for stream in streams if stream.is_state}
        if lease.hold is not None:
            num_tokens = share.tokens.count(lease.num_tokens) + self._ahead
            self._staged = packer.stage(share.of(lease.hold.groups), chunks, num_tokens)
            sizes = [staged.total_bytes for staged in self._staged]
        else:
            rows: dict[int, int] = {}
            for stream in streams:
                rows[stream.target_group] = math.lcm(rows.get(stream.target_group, 1), stream.row_tokens)
            needs = [self._tokens_of(chunk, rows) for chunk in chunks]
            self._order = sorted(range(len(chunks)), key=needs.__getitem__)
            self._needs = sorted(needs)
            sizes = [packer.chunker.place(chunk).total_bytes for chunk in chunks]
        self.largest_bytes = max(sizes, default=0)

    def _tokens_of(self, chunk: Chunk, row_tokens: dict[int, int]) -> float:
        """How far the prompt must be computed. Rows of several tokens are complete with the last of them."""
        if any(span.group in self._states for span in chunk.spans):
            return math.inf
        ends = (-(-span.stop // row_tokens[span.group]) * row_tokens[span.group] for span in chunk.spans)
        return min(self._lease.num_tokens, max(ends, default=0))

    @property
    def due(self) -> int:
        """How many, in all, can be packed by now."""
        if self._needs:
            self._lease.advance()
            if not self._lease.is_whole:
                return bisect.bisect_right(self._needs, self._lease.ready_tokens)
            self._needs = ()
        return self.count

    @property
    def has_next(self) -> bool:
        """A chunk can be packed now."""
        return self.due > self.taken

    @property
    def is_due(self) -> bool:
        """A chunk can be packed now, or as soon as the device is done, which wakes no thread."""
        return self.taken < self.count and (self._lease.hold is not None or self.has_next)

    @property
    def is_over(self) -> bool:
        """Every chunk was taken, and all of them count."""
        return self.taken == self.count and self._lease.hold is not None

    def take(self) -> tuple[int, StagedChunk]:
        """The next chunk, with its index in the fetch. Raises what the constructor does."""
        index = self._order[self.taken]
        self.taken += 1
        if self._staged:
            return index, self._staged[index]
        chunk = self._chunks[index]
        tokens = [span for span in chunk.spans if span.group not in self._states]
        first = min((span.start for span in tokens), default=0)
        stop = max((span.stop for span in tokens), default=0)
        blocks = self._lease.blocks_of(self._geometry, first, stop)
        (staged,) = self._packer.stage(blocks, [chunk], self._lease.num_tokens + self._ahead)
        return index, staged

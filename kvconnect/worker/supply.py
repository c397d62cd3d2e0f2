"""The chunks of a sending, as its outbox takes them: all there from the start, or as a prefill goes on.

Owned by the transfer thread.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Protocol

from kvconnect.cache.region_table import GroupGeometry
from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.packer import Packer
from kvconnect.plan.chunks import Chunk
from kvconnect.worker.streaming_prefill import StreamingPrefill


class Supply(Protocol):
    """Chunks, each given out once. ``count`` are all of them, ``largest_bytes`` is the largest."""

    count: int
    largest_bytes: int

    @property
    def left(self) -> int:
        """How many were not taken yet."""
        ...

    @property
    def due(self) -> int:
        """How many, in all, can be packed by now."""
        ...

    @property
    def has_next(self) -> bool:
        """A chunk can be packed now."""
        ...

    @property
    def is_due(self) -> bool:
        """A chunk can be packed now, or as soon as the device is done, which wakes no thread."""
        ...

    @property
    def is_over(self) -> bool:
        """Every chunk was taken, and all of them count."""
        ...

    def take(self) -> tuple[int, StagedChunk]:
        """The next chunk, with its index in the fetch.

        Raises:
            LayoutError: its tokens are not held.
            LocalError: a block is none of this cache.
        """
        ...


class StagedChunks:
    """Chunks of what is held: all of them can be packed."""

    def __init__(self, staged: Sequence[StagedChunk]) -> None:
        self.count = len(staged)
        self.largest_bytes = max((chunk.total_bytes for chunk in staged), default=0)
        self._staged = staged
        self._next = 0

    @property
    def left(self) -> int:
        """See ``Supply``."""
        return self.count - self._next

    @property
    def due(self) -> int:
        """See ``Supply``."""
        return self.count

    @property
    def has_next(self) -> bool:
        """See ``Supply``."""
        return self.left > 0

    @property
    def is_due(self) -> bool:
        """See ``Supply``."""
        return self.has_next

    @property
    def is_over(self) -> bool:
        """See ``Supply``."""
        return not self.has_next

    def take(self) -> tuple[int, StagedChunk]:
        """See ``Supply``."""
        self._next += 1
        return self._next - 1, self._staged[self._next - 1]


class StreamedChunks:
    """Chunks of a prefill under way: each can be packed once its tokens are computed, states at the end.

    In the order in which that happens, which need not be that of the fetch.

    Raises:
        LayoutError: a chunk is none of the packer's wire.
    """

    def __init__(
        self,
        prefill: StreamingPrefill,
        packer: Packer,
        geometry: Sequence[GroupGeometry],
        chunks: Sequence[Chunk],
    ) -> None:
        self.count = len(chunks)
        self._prefill = prefill
        self._packer = packer
        self._geometry = geometry
        self._chunks = chunks
        streams = packer.chunker.wire.streams
        self._states = {stream.target_group for stream in streams if stream.is_state}
        rows: dict[int, int] = {}
        for stream in streams:
            rows[stream.target_group] = math.lcm(rows.get(stream.target_group, 1), stream.row_tokens)
        self._row_tokens = rows
        sizes = [packer.chunker.place(chunk).total_bytes for chunk in chunks]
        self.largest_bytes = max(sizes, default=0)
        self._needs = [self._tokens_of(chunk) for chunk in chunks]
        self._order = sorted(range(len(chunks)), key=self._needs.__getitem__)
        self._needs_in_order = sorted(self._needs)
        self._next = 0

    def _tokens_of(self, chunk: Chunk) -> float:
        """How far the prompt must be computed. Rows of several tokens are complete with the last of them."""
        if any(span.group in self._states for span in chunk.spans):
            return math.inf
        ends = (
            -(-span.stop // self._row_tokens[span.group]) * self._row_tokens[span.group]
            for span in chunk.spans
        )
        return min(self._prefill.num_tokens, max(ends, default=0))

    @property
    def left(self) -> int:
        """See ``Supply``."""
        return self.count - self._next

    @property
    def due(self) -> int:
        """See ``Supply``."""
        prefill = self._prefill
        prefill.advance()
        if prefill.is_whole:
            return self.count
        return bisect.bisect_right(self._needs_in_order, prefill.ready_tokens)

    @property
    def has_next(self) -> bool:
        """See ``Supply``."""
        return self.left > 0 and self.due > self._next

    @property
    def is_due(self) -> bool:
        """See ``Supply``."""
        return self.left > 0 and (self._prefill.hold is not None or self.has_next)

    @property
    def is_over(self) -> bool:
        """See ``Supply``."""
        return not self.left and self._prefill.hold is not None

    def take(self) -> tuple[int, StagedChunk]:
        """See ``Supply``."""
        index = self._order[self._next]
        chunk = self._chunks[index]
        tokens = [span for span in chunk.spans if span.group not in self._states]
        first = min((span.start for span in tokens), default=0)
        stop = max((span.stop for span in tokens), default=0)
        blocks = self._prefill.blocks_of(self._geometry, first, stop)
        (staged,) = self._packer.stage(blocks, [chunk], self._prefill.num_tokens)
        self._next += 1
        return index, staged

"""Cuts a request into chunks that fit a slot, and places each row of a chunk in the slot.

A slot holds one stream after another, each at a multiple of ``ALIGN_BYTES``, and in a stream one row after
another. Both sides compute the same places from the wire and the chunk alone.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.region_table import GroupGeometry, RegionTable
from kvconnect.cache.specs import div_ceil
from kvconnect.errors import LayoutError, listed
from kvconnect.plan.blocks import NULL_BLOCK, Count, GroupBlocks, Index
from kvconnect.plan.wire import Wire

SECONDS_PER_CHUNK = 400e-6
"""Fixed cost of a chunk: a kernel launch, a post to the engine and a message, on both sides together."""

_MOST_CHUNKS = 16
ALIGN_BYTES = 16
_MOST_PLACED = 64
_MOST_SIZES = 1024
_MOST_TOKENS = 2**31 - 1

Column = NDArray[np.int64]


class TokenSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens ``start <= t < stop`` of a cache group of the target; of a state group ``0..1``."""

    group: Index
    start: Count
    stop: Count


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The content of one slot: the rows of the streams ``first_stream..stop_stream - 1`` within ``spans``.

    A stream whose group has no span has no bytes in the chunk. A row that stands for several tokens is
    included if the span has any of these tokens.
    """

    first_stream: Count
    stop_stream: Count
    spans: tuple[TokenSpan, ...]


@dataclass(frozen=True)
class Placement:
    """The places of a chunk's rows in its slot: int64 columns with one entry per stream. Read only: cached.

    Stream ``first_stream + i`` has ``rows[i]`` rows, the first of which is row ``first_row[i]`` of the
    sequence and begins ``base[i]`` bytes into the slot.
    """

    first_row: Column
    rows: Column
    base: Column
    total_bytes: int


class Chunker:
    """Cuts and places chunks of one wire. Holds the wire's streams as columns, and no state of a request."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.groups = {
            stream.target_group: (index, stream.is_state)
            for index, stream in enumerate({stream.target_group: stream for stream in wire.streams}.values())
        }
        """The target's cache groups that have streams: a number of each, and whether it keeps state."""
        self._group = np.array([self.groups[stream.target_group][0] for stream in wire.streams])
        self._row_tokens = np.array([stream.row_tokens for stream in wire.streams], dtype=np.int64)
        self._width = np.array([stream.width_bytes for stream in wire.streams], dtype=np.int64)
        # Cached: a chunk is placed twice, when cut and when staged, and other requests have the same chunk.
        self.place = functools.lru_cache(_MOST_PLACED)(self._check_and_place)
        """Places the rows of a chunk in its slot. Raises ``LayoutError``: the chunk does not fit the wire."""
        self._bytes_of = functools.lru_cache(_MOST_SIZES)(self._measure)

    def _check_and_place(self, chunk: Chunk) -> Placement:
        streams = len(self.wire.streams)
        if not 0 <= chunk.first_stream < chunk.stop_stream <= streams:
            raise LayoutError(
                f"a chunk has streams {chunk.first_stream}..{chunk.stop_stream - 1}, the wire has "
                f"0..{streams - 1}"
            )
        if len({span.group for span in chunk.spans}) != len(chunk.spans):
            raise LayoutError(
                f"a chunk names a cache group twice: {listed(one.group for one in chunk.spans)}"
            )
        for span in chunk.spans:
            known, is_state = self.groups.get(span.group, (None, False))
            last = 1 if is_state else _MOST_TOKENS
            if known is None or not 0 <= span.start <= span.stop <= last:
                raise LayoutError(
                    f"a chunk has the span {span.start}..{span.stop} of cache group {span.group}; the wire "
                    f"has groups {listed(self.groups)}, and accepts 0..{last} there"
                )
        return self._place(chunk.first_stream, chunk.stop_stream, chunk.spans)

    def cut(self, spans: Sequence[TokenSpan], slot_bytes: int, align_tokens: int = 1) -> tuple[Chunk, ...]:
        """Cut a request into chunks that fit a slot: by tokens, and by streams if one step does not fit.

        A chunk takes as many tokens as fit and ends at a multiple of ``align_tokens``; with the tokens of a
        block there, no page is cut. States travel in the last chunk with tokens if they fit, else after it.
        Raises ``LayoutError``: a slot cannot hold one step of one stream, the least that can be sent.
        """
        everything = (0, len(self.wire.streams))
        whole = self.place(Chunk(*everything, tuple(spans))).total_bytes
        spans = [span for span in spans if span.start < span.stop]
        if whole <= slot_bytes:
            return (Chunk(*everything, tuple(spans)),) if whole else ()
        states = tuple(span for span in spans if self.groups[span.group][1])
        tokens = tuple(span for span in spans if not self.groups[span.group][1])
        chunks: list[Chunk] = []
        if tokens:
            wanted = {span.group for span in tokens}
            step = math.lcm(
                align_tokens,
                *{stream.row_tokens for stream in self.wire.streams if stream.target_group in wanted},
            )
            one_step = tuple(TokenSpan(group, 0, step) for group in sorted(wanted))
            for first, stop in self._parts(one_step, slot_bytes):
                chunks.extend(self._by_tokens(first, stop, tokens, step, slot_bytes))
        if states:
            if chunks and (chunks[-1].first_stream, chunks[-1].stop_stream) == everything:
                joined = Chunk(*everything, (*chunks[-1].spans, *states))
                if self.place(joined).total_bytes <= slot_bytes:
                    return (*chunks[:-1], joined)
            chunks.extend(Chunk(first, stop, states) for first, stop in self._parts(states, slot_bytes))
        return tuple(chunks)

    def _place(self, first: int, stop: int, spans: Iterable[TokenSpan]) -> Placement:
        start_of, stop_of = np.zeros((2, len(self.groups)), dtype=np.int64)
        for span in spans:
            index = self.groups[span.group][0]
            start_of[index], stop_of[index] = span.start, span.stop
        group, row_tokens = self._group[first:stop], self._row_tokens[first:stop]
        first_row = start_of[group] // row_tokens
        empty = stop_of[group] <= start_of[group]
        rows = np.where(empty, 0, -(-stop_of[group] // row_tokens) - first_row)
        sizes = -(-rows * self._width[first:stop] // ALIGN_BYTES) * ALIGN_BYTES
        ends = np.cumsum(sizes)
        return Placement(first_row, rows, ends - sizes, int(ends[-1]))

    def _parts(self, spans: tuple[TokenSpan, ...], slot_bytes: int) -> list[tuple[int, int]]:
        """The fewest ranges of streams such that the spans of each range fit a slot."""
        if self._bytes_of(0, len(self.wire.streams), spans) <= slot_bytes:
            return [(0, len(self.wire.streams))]
        placed = self._place(0, len(self.wire.streams), spans)
        parts, first, filled = [], 0, 0
        for index, size in enumerate(np.diff(placed.base, append=placed.total_bytes).tolist()):
            if size > slot_bytes:
                raise LayoutError(
                    f"a slot has {slot_bytes} bytes, but layer {self.wire.streams[index].layer!r} needs at "
                    f"least {size} in one"
                )
            if filled + size > slot_bytes:
                parts.append((first, index))
                first, filled = index, 0
            filled += size
        if filled:
            parts.append((first, len(self.wire.streams)))
        return parts

    def _by_tokens(
        self, first: int, stop: int, spans: tuple[TokenSpan, ...], step: int, slot_bytes: int
    ) -> Iterator[Chunk]:
        """Chunks of as many whole steps of tokens as fit. One step always does: see ``_parts``."""
        groups = {stream.target_group for stream in self.wire.streams[first:stop]}
        spans = tuple(span for span in spans if span.group in groups)
        at = min(span.start for span in spans) // step
        end = div_ceil(max(span.stop for span in spans), step)
        while at < end:
            begin = at
            bytes_to = functools.partial(self._steps_bytes, first, stop, spans, step, begin)
            at += bisect_right(range(begin + 1, end + 1), slot_bytes, key=bytes_to)
            clipped = _clip(spans, begin * step, at * step)
            if clipped:
                yield Chunk(first, stop, clipped)

    def _steps_bytes(
        self, first: int, stop: int, spans: Iterable[TokenSpan], step: int, start_step: int, stop_step: int
    ) -> int:
        """Bytes of a range of steps. Cached by length, not by start: a step is a whole number of rows."""
        start = start_step * step
        clipped = _clip(spans, start, stop_step * step)
        moved = tuple(TokenSpan(span.group, span.start - start, span.stop - start) for span in clipped)
        return self._bytes_of(first, stop, moved)

    def _measure(self, first: int, stop: int, spans: tuple[TokenSpan, ...]) -> int:
        return self._place(first, stop, spans).total_bytes


def _clip(spans: Iterable[TokenSpan], start: int, stop: int) -> tuple[TokenSpan, ...]:
    clipped = (TokenSpan(span.group, max(span.start, start), min(span.stop, stop)) for span in spans)
    return tuple(span for span in clipped if span.start < span.stop)


def wanted_spans(
    geometry: Iterable[GroupGeometry], wanted: Sequence[GroupBlocks], num_tokens: int
) -> tuple[TokenSpan, ...]:
    """The span of every requested group: from its first to its last real block, at most to ``num_tokens``.

    Raises ``LayoutError``: ``wanted`` names a group that ``geometry`` does not have.
    """
    by_group = {group.group: group for group in geometry}
    spans = []
    for blocks in wanted:
        group = by_group.get(blocks.group)
        if group is None:
            raise LayoutError(f"cache group {blocks.group} is wanted, the cache has {listed(by_group)}")
        first = _first_real(blocks.block_ids)
        if first is None:
            continue
        if group.is_state:
            spans.append(TokenSpan(blocks.group, 0, 1))
            continue
        tokens = group.block_tokens * group.blocks_per_kv_block
        end = len(blocks.block_ids) - (_first_real(reversed(blocks.block_ids)) or 0)
        start = (blocks.first_block + first) * tokens
        stop = min(num_tokens, (blocks.first_block + end) * tokens)
        if start < stop:
            spans.append(TokenSpan(blocks.group, start, stop))
    return tuple(spans)


def _first_real(block_ids: Iterable[int]) -> int | None:
    # No numpy array is made, since the first id is almost always real.
    return next((index for index, block in enumerate(block_ids) if block != NULL_BLOCK), None)


PACK_BYTES_PER_S = {"cuda": 1e12, "cpu": 4e9}
"""About the rate of packing, by type of device (`python -m benchmarks pack`), on a CPU by one thread: with
the rate of four, transfers took as long. Not measured at start: half or twice the rate costs 6 % of the time
that packing and the chunks' fixed cost add to a transfer."""


@dataclass(frozen=True, eq=False)
class RequestCutter:
    """Cuts the blocks that a target requests from a source into chunks that fit a slot."""

    chunker: Chunker
    source: RegionTable
    target: RegionTable
    slot_bytes: int
    pack_bytes_per_s: float

    @functools.cached_property
    def _align_tokens(self) -> int:
        """The largest logical block of either side, so that no page is cut."""
        groups = [group for group in (*self.source.groups, *self.target.groups) if not group.is_state]
        return max((group.block_tokens * group.blocks_per_kv_block for group in groups), default=1)

    @functools.cached_property
    def _step_bytes(self) -> int:
        """Bytes of ``_align_tokens`` over all groups: chunks grow by such steps."""
        groups = [group for group in self.target.groups if group.group in self.chunker.groups]
        ends = ((group.group, 1 if group.is_state else self._align_tokens) for group in groups)
        return self._bytes_of(tuple(TokenSpan(group, 0, end) for group, end in ends))

    def cut(self, wanted: Sequence[GroupBlocks], num_tokens: int) -> tuple[Chunk, ...]:
        """Chunks that fit a slot, several if the request is large enough. Raises as ``Chunker.cut``."""
        spans = wanted_spans(self.target.groups, wanted, num_tokens)
        total_bytes = self._bytes_of(spans)
        chunk_bytes = div_ceil(total_bytes, chunks_in_turn(total_bytes, self.pack_bytes_per_s))
        for budget in (min(self.slot_bytes, chunk_bytes + self._step_bytes), self.slot_bytes):
            with suppress(LayoutError):
                return self.chunker.cut(spans, budget, self._align_tokens)
        # A slot cannot hold a whole block, so blocks are cut.
        return self.chunker.cut(spans, self.slot_bytes)

    def _bytes_of(self, spans: tuple[TokenSpan, ...]) -> int:
        return self.chunker.place(Chunk(0, len(self.chunker.wire.streams), spans)).total_bytes


def chunks_in_turn(total_bytes: int, pack_bytes_per_s: float) -> int:
    """The best number of chunks for a transfer, apart from the size of slots.

    Packing, sending and unpacking overlap, so that only the packing of the first chunk and the unpacking of
    the last one add time. More chunks shorten these two, but each chunk costs ``SECONDS_PER_CHUNK``.
    """
    best = math.sqrt(2 * total_bytes / (pack_bytes_per_s * SECONDS_PER_CHUNK))
    return max(1, min(_MOST_CHUNKS, round(best)))

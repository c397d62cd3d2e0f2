"""One side's pages as page lanes: how to walk a page in memory and on the wire.

A lane is a pair of a region and the stream whose rows it holds. A page of a lane is an array of runs of bytes
by token, head and plane; memory and wire are walked with strides over these axes. Where this side's dtype is
not the dtype on the wire, a lane also defines the cast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.region_table import UNSCALED, GroupGeometry, Region, RegionTable, Scales
from kvconnect.errors import LayoutError
from kvconnect.pack.casts import Cast
from kvconnect.plan.wire import SCALED, Wire, WireStream

Column = NDArray[np.int64]
WireSide = Literal["source", "target"]
# The addresses of slots, and the places of pages in them, are multiples of this.
PLACE_BYTES = 16


@dataclass(frozen=True)
class Walk:
    """How to walk a page: counts, and strides in bytes.

    A run has ``run_bytes`` in memory and ``wire_run_bytes`` on the wire, where the planes of a head are
    adjacent.
    """

    tokens: int
    heads: int
    planes: int
    run_bytes: int
    block_stride: int
    token_stride: int
    head_stride: int
    plane_stride: int
    wire_token_stride: int
    wire_head_stride: int
    wire_run_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on the wire."""
        return self.tokens * self.heads * self.planes * self.wire_run_bytes

    @property
    def extent_bytes(self) -> int:
        """Bytes in memory from the first to the last byte that travels, with gaps."""
        of_tokens = (self.tokens - 1) * self.token_stride
        of_heads = (self.heads - 1) * self.head_stride
        return of_tokens + of_heads + (self.planes - 1) * self.plane_stride + self.run_bytes

    def memory_step(self) -> int:
        """The largest number of bytes, up to 16, that divides every step in memory."""
        steps = (self.run_bytes, self.block_stride, self.token_stride, self.head_stride, self.plane_stride)
        return math.gcd(16, *steps)

    def wire_step(self) -> int:
        """The largest number of bytes, up to 16, that divides every step on the wire."""
        return math.gcd(16, self.wire_run_bytes, self.wire_token_stride, self.wire_head_stride)


@dataclass(frozen=True)
class Access:
    """The width of a kernel's accesses in bytes: ``unit`` on the wire, in words of ``word`` as for digests.

    ``memory`` is the alignment of addresses in pages; if it is less than a word, words are assembled from
    pieces of that size. With a ``cast`` a unit is one word.
    """

    unit: int
    word: int
    memory: int
    cast: Cast | None = None

    @property
    def memory_unit(self) -> int:
        """Bytes of a unit in memory."""
        return self.unit if self.cast is None else self.unit * self.cast.widening

    @property
    def stride_bytes(self) -> int:
        """The unit, in bytes, in which the kernel counts strides of memory."""
        return min(self.memory, self.memory_unit)


@dataclass(frozen=True, eq=False)
class Lanes:
    """Joined lanes: they have equal walks, and the same rows in every chunk. In the order of their streams.

    Lane ``i`` has its first page at ``address[i]``, and its rows begin ``wire_offset[i]`` bytes into the rows
    of ``stream[i]``; both are for the first head that travels. With a cast, the first ``key_values`` values
    of each head have the scale ``scales[i, 0]``, the others ``scales[i, 1]``.
    """

    group: int
    num_blocks: int
    walk: Walk
    access: Access
    stream: Column
    address: Column
    wire_offset: Column
    key_values: int
    scales: NDArray[np.float32]


class PageLane(NamedTuple):
    """A single lane, before ``join_lanes``. The fields are as in ``Lanes``."""

    group: int
    num_blocks: int
    walk: Walk
    access: Access
    stream: int
    address: int
    wire_offset: int
    key_values: int = 0
    scales: Scales = UNSCALED


def join_lanes(lanes: Sequence[PageLane], rows_alike: Sequence[tuple[int, int]]) -> tuple[Lanes, ...]:
    """Join lanes with equal walks. Streams with an equal entry in ``rows_alike`` have the same rows."""
    alike: dict[tuple[object, ...], list[PageLane]] = defaultdict(list)
    for one in lanes:
        alike[one.group, rows_alike[one.stream], one.walk, one.access, one.key_values].append(one)
    joined = []
    for members in alike.values():
        first, num_blocks = members[0], min(one.num_blocks for one in members)
        places = [(one.stream, one.address, one.wire_offset) for one in members]
        stream, address, offset = np.array(places, dtype=np.int64).T.copy()
        scales = np.array([one.scales for one in members], dtype=np.float32)
        same = first.group, num_blocks, first.walk, first.access
        joined.append(Lanes(*same, stream, address, offset, first.key_values, scales))
    return tuple(joined)


def make_lanes(wire: Wire, table: RegionTable, side: WireSide) -> tuple[Lanes, ...]:
    """The lanes of this side, joined.

    Raises ``LayoutError``: the wire does not fit this table; the text names the layer.
    """
    groups = table.geometry()
    by_layer: dict[tuple[str, int], list[Region]] = defaultdict(list)
    for region in table.regions:
        by_layer[region.layer, region.group].append(region)
    lanes: list[PageLane] = []
    for index, stream in enumerate(wire.streams):
        group = stream.source_group if side == "source" else stream.target_group
        regions = by_layer[stream.layer, group]
        cast = _stream_cast(stream, side, regions)
        found = ((region, _place(stream, region, cast, wire.order == "pages")) for region in regions)
        made = [_lane(index, stream, region, placed, cast) for region, placed in found if placed]
        _check_lanes(stream, groups.get(group), made)
        lanes.extend(made)
    return join_lanes(lanes, [(stream.target_group, stream.row_tokens) for stream in wire.streams])


def flat_lane(
    group: int, num_blocks: int, address: int, stride: int, page_bytes: int, wire_offset: int
) -> PageLane:
    """A lane whose pages travel unchanged as one run each, without a digest."""
    walk = _flat_walk(page_bytes, stride)
    unit = math.gcd(walk.memory_step(), address, wire_offset)
    return PageLane(group, num_blocks, walk, Access(unit, min(unit, 8), unit), 0, address, wire_offset)


def _flat_walk(page_bytes: int, stride: int) -> Walk:
    return Walk(1, 1, 1, page_bytes, stride, *([page_bytes] * 6))


def _stream_cast(stream: WireStream, side: WireSide, regions: Sequence[Region]) -> Cast | None:
    """The cast between this side's dtype and the wire's; None if they are equal."""
    conversion = stream.conversion
    if conversion is None:
        return None
    dtype = conversion.source_dtype if side == "source" else conversion.target_dtype
    for region in regions:
        if region.dtype != dtype:
            raise LayoutError(
                f"layer {stream.layer!r}: the wire has {dtype} on this side, this table {region.dtype}"
            )
    return None if dtype == conversion.wire_dtype else Cast(dtype, conversion.wire_dtype)


def _place(
    stream: WireStream, region: Region, cast: Cast | None, as_pages: bool
) -> tuple[Walk, int, int] | None:
    """The walk over the part of a region that a stream has, its address and wire offset; None for no part."""
    if as_pages:
        if (region.first_plane, region.heads) != (stream.first_plane, stream.heads):
            return None
        return _flat_walk(region.page_bytes, region.block_stride), region.address, 0
    axes = region.axes
    heads, skipped, shift = axes.heads, 0, 0
    if stream.heads is not None and region.heads is not None:
        shared = region.heads.intersect(stream.heads)
        heads, skipped = len(shared), shared.start - region.heads.start
        shift = shared.start - stream.heads.start
    if not heads:
        return None
    wire_row_bytes = axes.row_bytes if cast is None else axes.row_bytes // cast.widening
    walk = Walk(
        tokens=axes.tokens,
        heads=heads,
        planes=axes.planes,
        run_bytes=axes.row_bytes,
        block_stride=region.block_stride,
        # The stride of an axis of size 1 is never used, and must not narrow the accesses.
        token_stride=axes.token_stride if axes.tokens > 1 else 0,
        head_stride=axes.head_stride if heads > 1 else 0,
        plane_stride=axes.plane_stride if axes.planes > 1 else 0,
        wire_token_stride=stream.width_bytes,
        wire_head_stride=stream.head_bytes,
        wire_run_bytes=wire_row_bytes,
    )
    offset = shift * stream.head_bytes + region.first_plane * wire_row_bytes
    return walk, region.address + skipped * axes.head_stride, offset


def _lane(
    index: int, stream: WireStream, region: Region, placed: tuple[Walk, int, int], cast: Cast | None
) -> PageLane:
    walk, address, wire_offset = placed
    memory, word = math.gcd(walk.memory_step(), address), stream.word_bytes
    key_values, scales = 0, UNSCALED
    if cast is None:
        unit = math.gcd(memory, walk.wire_step(), wire_offset)
        access = Access(unit, word, unit) if unit % word == 0 else Access(word, word, math.gcd(word, memory))
    else:
        if memory % cast.memory_bytes or word % cast.wire_bytes:
            raise LayoutError(
                f"layer {stream.layer!r}: values of {cast.memory} are {memory} bytes apart, those of "
                f"{cast.wire} travel in words of {word}"
            )
        access = Access(word, word, math.gcd(word * cast.widening, memory), cast)
        assert stream.conversion is not None
        scales = stream.conversion.scales
        if SCALED in (cast.memory, cast.wire):
            before = region.first_plane * (walk.wire_run_bytes // cast.wire_bytes)
            key_values = stream.conversion.key_values - before
    where = index, address, wire_offset
    return PageLane(region.group, region.num_blocks, walk, access, *where, key_values, scales)


def _check_lanes(stream: WireStream, geometry: GroupGeometry | None, lanes: Sequence[PageLane]) -> None:
    """Raises ``LayoutError``: the lanes do not cover the stream's rows exactly once, or differ in tokens."""
    filled = sum(lane.walk.page_bytes // lane.walk.tokens for lane in lanes)
    if geometry is None or filled != stream.width_bytes:
        rows = f"a row of the wire has {stream.width_bytes} bytes, one of this table {filled}"
        raise LayoutError(f"layer {stream.layer!r}: {rows}")
    tokens = 1 if geometry.is_state else geometry.block_tokens
    for walk in (lane.walk for lane in lanes):
        fits = walk.tokens * stream.row_tokens == tokens and not walk.wire_run_bytes % stream.word_bytes
        if geometry.is_state != stream.is_state or not fits:
            raise LayoutError(
                f"layer {stream.layer!r}: the wire has a row for {stream.row_tokens} tokens in words of "
                f"{stream.word_bytes} bytes, this table {walk.tokens} rows of {walk.wire_run_bytes} bytes "
                f"for {tokens} tokens"
            )

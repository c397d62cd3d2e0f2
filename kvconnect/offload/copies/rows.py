"""The host memory of rows, and their layout: a row holds one logical block, in all layers of its group.

A row has, for each region of the group in the table's order, the block's kernel pages one after the other,
without gaps. So a row's bytes depend on the cache's shape, not on the addresses of its tensors. The module
knows neither contents nor requests.
"""

from __future__ import annotations

import logging
import math
import mmap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import ConfigError, KVConnectError, LayoutError, LocalError, listed
from kvconnect.offload.copies.cuda_device import CudaDevice
from kvconnect.offload.index.budgets import ArenaPlan, aligned_row_bytes
from kvconnect.pack.batches import Move, PageRange
from kvconnect.pack.page_lanes import Column, Lanes, flat_lane, join_lanes
from kvconnect.transfer.orders import RowCopies

logger = logging.getLogger(__name__)

# Some drivers fail to pin hundreds of GiB in one call.
PIN_PIECE_BYTES = 4 << 30


class RowArena:
    """The memory of all rows of a plan.

    Args:
        plan: the classes of rows and their offsets.
        pinner: the GPU that pins the memory; None without a GPU.
        piece_bytes: the most bytes pinned by one call, a multiple of 4096.

    Raises:
        ConfigError: the machine cannot allocate or pin that much memory. Copies of memory that is not pinned
            would be slow, and every step would wait for them.
    """

    def __init__(
        self, plan: ArenaPlan, pinner: CudaDevice | None = None, piece_bytes: int = PIN_PIECE_BYTES
    ) -> None:
        self.plan = plan
        self.length_bytes = -(-plan.length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, self.length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"kv_connector_extra_config.offload.cpu_bytes: the machine does not give {self.length_bytes} "
                f"bytes of memory ({error}); accepted: less"
            ) from error
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            try:
                memory.madvise(getattr(mmap, advice))
            except (AttributeError, OSError) as error:
                logger.debug("%s is not accepted for host memory: %s", advice, error)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._pinner = pinner
        self._pieces: list[int] = []
        if pinner is not None:
            self._pin(pinner, piece_bytes)

    @property
    def borders(self) -> Sequence[int]:
        """The borders of pinned pieces, in order of address: no single copy by a device may cross one."""
        return self._pieces[1:]

    @property
    def is_mapped(self) -> bool:
        """Whether kernels reach rows at their host addresses. Raises ``EngineError``."""
        return self._pinner is None or all(map(self._pinner.is_mapped, self._pieces))

    def row(self, group: int, row: int) -> memoryview:
        """The writable bytes of one row. Raises ``LocalError``: there is no such row."""
        start = self.plan.offset_bytes(group, row)
        return self._bytes[start : start + self.plan.row_class(group).row_bytes].data

    def addresses(self, group: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses of a group's rows. Raises ``LocalError``: a row does not exist."""
        found = self.plan.row_class(group)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < found.num_all:
            raise LocalError(
                f"cache group {group} has rows 0 to {found.num_all - 1}; asked for are {int(rows.min())} to "
                f"{int(rows.max())}"
            )
        return self.address + found.offset_bytes + rows * found.row_bytes

    def close(self) -> None:
        """Unpin the memory, which must be quiescent; it is freed with its last view."""
        pieces, self._pieces = self._pieces, []
        for address in pieces:
            assert self._pinner is not None
            try:
                self._pinner.unpin(address)
            except KVConnectError as error:
                logger.info("host memory stays pinned until the process ends: %s", error)

    def _pin(self, pinner: CudaDevice, piece_bytes: int) -> None:
        began = time.monotonic()
        for start in range(0, self.length_bytes, piece_bytes):
            address = self.address + start
            try:
                pinner.pin(address, min(piece_bytes, self.length_bytes - start))
            except KVConnectError as error:
                self.close()
                raise ConfigError(
                    f"kv_connector_extra_config.offload.cpu_bytes: the machine lets {start} of "
                    f"{self.length_bytes} bytes of memory be pinned ({error}); accepted: less, or allow the "
                    f"process to lock memory"
                ) from error
            self._pieces.append(address)
        pin_s = time.monotonic() - began
        logger.info("pinned %d bytes of host memory for blocks in %.1f s", self.length_bytes, pin_s)


class RowLane(NamedTuple):
    """Maps ``length`` bytes of each block ``b``, at ``address + b * stride``, to ``offset`` of its row."""

    address: int
    stride: int
    length: int
    offset: int


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The lanes by which rows map to the ``num_blocks`` blocks of a worker in device memory, by cache group.

    A row of ``row_bytes``, a multiple of 64, is padded at its end.
    """

    num_blocks: int
    lanes: Mapping[int, Sequence[RowLane]]
    row_bytes: Mapping[int, int]

    @classmethod
    def build(cls, table: RegionTable) -> RowLayout:
        """The layout for a table's blocks. A group without layers on this worker has rows without content."""
        ratios = {geometry.group: geometry.blocks_per_kv_block for geometry in table.groups}
        lanes = {group: list[RowLane]() for group in ratios}
        content_bytes = dict.fromkeys(ratios, 0)
        for region in table.regions:
            group, length = region.group, region.page_bytes
            mine, stride = lanes[group], region.block_stride * ratios[group]
            for address in range(region.address, region.address + stride, region.block_stride):
                last = mine[-1] if mine else None
                if last is not None and (last.address + last.length, last.stride) == (address, stride):
                    mine[-1] = last._replace(length=last.length + length)
                else:
                    mine.append(RowLane(address, stride, length, content_bytes[group]))
                content_bytes[group] += length
        most = max(region.num_blocks // ratios[region.group] for region in table.regions)
        return cls(
            most, lanes, {group: aligned_row_bytes(max(1, length)) for group, length in content_bytes.items()}
        )

    def lanes_of(self, group: int, kind: int, first: int, stop: int) -> tuple[Lanes, ...]:
        """Lanes for bytes ``first`` to ``stop - 1`` of rows, to a slot of these bytes, as group ``kind``."""
        cut = [
            flat_lane(kind, self.num_blocks, address + begin - offset, stride, end - begin, begin - first)
            for address, stride, length, offset in self.lanes[group]
            if (begin := max(offset, first)) < (end := min(offset + length, stop))
        ]
        return join_lanes(cut, [(kind, 1)])


@dataclass(frozen=True)
class RowPages:
    """The numbers of the kernel pages in a group's rows; none is 0.

    The first page of row ``r`` is number ``(r + 1) * row_step``; each of the block's ``ratio`` pages is
    ``page_step`` after the one before.
    """

    row_step: int
    page_step: int
    ratio: int

    def ids(self, rows: Column) -> Column:
        """The page numbers of each row in token order, of shape (rows, ``ratio``)."""
        ids: Column = np.add.outer((rows + 1) * self.row_step, np.arange(self.ratio) * self.page_step)
        return ids


def row_table(table: RegionTable, arena: RowArena) -> tuple[RegionTable, dict[int, RowPages]]:
    """A region table over rows, for a packer that reads rows, and the numbers of their pages by group.

    The blocks of the table are kernel blocks. A row has the kernel pages of a region side by side, so one
    stride divides both pages and rows; blocks overlap where the stride is less than a page. Block 0 lies in
    the row before the first, and is never read.

    Raises ``LayoutError``: the device does not reach rows at their host addresses, or a group is split into
    kernel blocks, and its regions' pages differ in length. Raises ``EngineError`` as ``RowArena.is_mapped``.
    """
    if not arena.is_mapped:
        raise LayoutError("the device does not reach host memory at its own addresses")
    regions, groups, pages = [], [], {}
    for geometry in table.groups:
        group, ratio = geometry.group, geometry.blocks_per_kv_block
        mine, rows = [it for it in table.regions if it.group == group], arena.plan.row_class(group)
        lengths = {region.page_bytes for region in mine}
        if ratio > 1 and len(lengths) > 1:
            raise LayoutError(
                f"cache group {group} has pages of {listed(lengths)} bytes, {ratio} of each in a block; "
                "accepted: pages of one length, or one in a block"
            )
        stride = math.gcd(rows.row_bytes, *lengths) if ratio > 1 else rows.row_bytes
        step = max(lengths, default=0) // stride if ratio > 1 else 0
        at = pages[group] = RowPages(rows.row_bytes // stride, step, ratio)
        num_blocks = int(at.ids(np.array([rows.num_all - 1])).max()) + 1
        address = arena.address + rows.offset_bytes - rows.row_bytes
        for region in mine:
            changes = {"address": address, "num_blocks": num_blocks, "block_stride": stride}
            regions.append(msgspec.structs.replace(region, **changes))
            address += region.page_bytes * ratio
        groups.append(msgspec.structs.replace(geometry, blocks_per_kv_block=1))
    return RegionTable(tuple(regions), tuple(groups)), pages


@dataclass(frozen=True, eq=False)
class Piece:
    """Parts that share one span of staging memory, in the order of their addresses in host memory.

    ``numbers`` are the kernel's columns, whose places are offsets in the span of ``total_bytes``. ``copies``
    are columns of host address, offset in the span, and length in bytes.
    """

    numbers: Mapping[PageRange, Column]
    total_bytes: int
    copies: tuple[Column, Column, Column]


class RowParts:
    """The rows of an arena in parts of at most ``part_bytes``, a multiple of 64; 0 for undivided rows.

    A *part* is a range of a row that is copied as one. A *kind* is the same range in all rows of a group; in
    the kernels' lanes and page ranges it takes the place of the cache group.

    Attributes:
        lanes_of: the lanes of each kind.
    """

    def __init__(self, layout: RowLayout, arena: RowArena, part_bytes: int = 0) -> None:
        self._num_blocks, self._arena = layout.num_blocks, arena
        self.lanes_of: list[tuple[Lanes, ...]] = []
        self._kinds: dict[int, tuple[Column, Column, Column]] = {}
        for group in arena.plan.groups:
            row_bytes = layout.row_bytes[group]
            begin = np.arange(0, row_bytes, part_bytes or row_bytes, dtype=np.int64)
            length = np.diff(begin, append=row_bytes)
            kind = len(self.lanes_of) + np.arange(len(begin))
            self._kinds[group] = kind, begin, length
            cuts = zip(kind.tolist(), begin.tolist(), (begin + length).tolist(), strict=True)
            self.lanes_of += [layout.lanes_of(group, *cut) for cut in cuts]

    def moves(self, pages: Sequence[PageRange]) -> tuple[Move, ...]:
        """The kernel's moves for page ranges, in which a kind is the group, and parts are counted."""
        return tuple(
            Move(lanes, slice(None), lanes.wire_offset, some, 0, some.count)
            for some in pages
            for lanes in self.lanes_of[some.group]
        )

    def columns(self, copies: Sequence[RowCopies]) -> Column:
        """Columns of kind, block, host address and length of all parts of some copies, of shape (4, parts).

        Raises:
            LocalError: blocks and rows differ in number, one does not exist, or a block is the null block.
        """
        found = [self._columns(one) for one in copies]
        return np.concatenate(found, axis=1) if found else np.empty((4, 0), dtype=np.int64)

    def _columns(self, copies: RowCopies) -> Column:
        group = copies.group
        blocks, rows = (np.array(ids, dtype=np.int64) for ids in (copies.block_ids, copies.rows))
        if len(blocks) != len(rows):
            raise LocalError(f"{len(blocks)} blocks of cache group {group} came with {len(rows)} rows")
        addresses = self._arena.addresses(group, rows)
        if len(blocks) and not 0 < int(blocks.min()) <= int(blocks.max()) < self._num_blocks:
            raise LocalError(
                f"cache group {group} has blocks 1 to {self._num_blocks - 1}; asked for are "
                f"{int(blocks.min())} to {int(blocks.max())}"
            )
        kind, begin, length = self._kinds[group]
        columns = np.empty((4, len(blocks), len(kind)), dtype=np.int64)
        columns[0], columns[1], columns[3] = kind, blocks[:, None], length
        np.add(addresses[:, None], begin, out=columns[2])
        return columns.reshape(4, -1)

    def pieces(self, copies: Sequence[RowCopies], most_bytes: int) -> list[Piece]:
        """Divide copies into pieces of at most ``most_bytes``, or of one part if that is longer.

        Raises:
            LocalError: as for ``columns``.
        """
        parts = self.columns(copies)
        kind, block, address, length = parts[:, parts[2].argsort(kind="stable")]
        end = length.cumsum()
        begin = end - length
        firsts, first = [], 0
        while first < len(end):
            firsts.append(first)
            first = max(first + 1, int(end.searchsorted(begin[first] + most_bytes, "right")))
        if not firsts:
            return []
        copied = self._copies(address, begin, length, firsts)
        copies_at = [*copied[1].searchsorted(begin[firsts]).tolist(), len(copied[1])]
        pieces = []
        for index, (first, stop) in enumerate(zip(firsts, [*firsts[1:], len(end)], strict=True)):
            at, mine = begin[first], slice(first, stop)
            host, place, size = (column[copies_at[index] : copies_at[index + 1]] for column in copied)
            numbers = page_numbers(kind[mine], block[mine], begin[mine] - at)
            pieces.append(Piece(numbers, int(end[stop - 1] - at), (host, place - at, size)))
        return pieces

    def _copies(
        self, address: Column, begin: Column, length: Column, firsts: Sequence[int]
    ) -> tuple[Column, Column, Column]:
        """Columns of host address, offset and length of ranges that are contiguous in both memories.

        No range crosses a border of the arena, or extends into the next piece.
        """
        new = np.ones(len(begin), dtype=bool)
        np.not_equal(address[1:], address[:-1] + length[:-1], out=new[1:])
        new[firsts] = True
        (first,) = new.nonzero()
        host, place, size = address[first], begin[first], np.add.reduceat(length, first)
        cuts = [
            place[inside] + border - host[inside]
            for border in self._arena.borders
            if (inside := (host < border) & (border < host + size)).any()
        ]
        if not cuts:
            return host, place, size
        start = np.unique(np.concatenate([place, *cuts]))
        run = place.searchsorted(start, "right") - 1
        return host[run] + start - place[run], start, np.diff(start, append=begin[-1] + length[-1])


def page_numbers(kind: Column, block: Column, place: Column) -> dict[PageRange, Column]:
    """The number columns of parts by kind, as movers of placed pages read them: blocks, then places."""
    numbers = {}
    for one, count in enumerate(np.bincount(kind).tolist()):
        if count:
            mine = slice(None) if count == len(kind) else kind == one
            numbers[PageRange(one, 0, count)] = np.concatenate([block[mine], place[mine]])
    return numbers

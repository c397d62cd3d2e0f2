"""The packer moves pages into a slot or out of it: one call per chunk, for any layers, groups and blocks.

A packer belongs to one side of one wire and to one thread. It must not know peers or slot states: the caller
passes the slot's address, and ensures that the pages are quiescent. On CUDA all work is asynchronous on one
stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import LayoutError, LocalError, listed
from kvconnect.pack.batches import ChunkLayout, PackTicket, PageRange, StagedChunk, make_move
from kvconnect.pack.exponent_code import ExponentCoder
from kvconnect.pack.numpy_mover import NumpyMover
from kvconnect.pack.page_lanes import PLACE_BYTES, WireSide, make_lanes
from kvconnect.pack.torch_mover import TorchMover
from kvconnect.packages import has_triton
from kvconnect.plan.blocks import BlockIds, GroupBlocks, check_held, page_ids
from kvconnect.plan.chunks import Chunk, Chunker
from kvconnect.plan.wire import Wire

if TYPE_CHECKING:
    from kvconnect.pack.triton_mover import TritonMover

_MOST_LAYOUTS = 64


class Packer:
    """Moves one side's pages to and from slots. Made once per peer.

    ``is_blocking``: ``pack`` and ``unpack`` return after the bytes were moved.
    Where the source has no block for a position, the slot gets zeros; where the target has none, the
    slot's bytes count only for the digest. Gaps between streams, less than 16 bytes each, are not written.

    Args:
        table: the region table of this side. Its tensors, on ``device``, must outlive the packer.
        side: ``"source"`` packs, ``"target"`` unpacks; it selects the group indices of the wire's streams.
        kernels: ``"numpy"``, ``"torch"`` or ``"triton"``; by default numpy on a CPU, Triton on CUDA, and
            torch where that is not installed.
        cuda_stream: the stream of all work; None for the current stream of the constructor's call.
        digest_sample: digests cover one line of 64 bytes in so many, at least 1; only numpy takes more.

    Raises ``LayoutError``: the wire does not fit this table.
    """

    def __init__(
        self,
        table: RegionTable,
        wire: Wire,
        *,
        side: WireSide,
        device: torch.device | str,
        kernels: str = "",
        cuda_stream: torch.cuda.Stream | None = None,
        digest_sample: int = 1,
    ) -> None:
        self.chunker = Chunker(wire)
        self._side = side
        self._groups = table.geometry()
        self._lanes = make_lanes(wire, table, side)
        if any(lanes.walk.extent_bytes >= 2**31 for lanes in self._lanes):
            raise LayoutError("a page has 2 GiB or more; accepted: less")
        by_blocks = sorted(self._lanes, key=lambda lanes: -lanes.num_blocks)
        self._num_blocks = {lanes.group: lanes.num_blocks for lanes in by_blocks}
        # Cached: requests have the same chunks, since all begin at the same tokens and most are as long.
        self._layout_of = functools.lru_cache(_MOST_LAYOUTS)(self._make_layout)
        device = torch.device(device)
        self.is_blocking = device.type != "cuda"
        self._mover: NumpyMover | TorchMover | TritonMover
        if not kernels:
            kernels = "numpy" if self.is_blocking else "triton" if has_triton() else "torch"
        if kernels == "triton":
            from kvconnect.pack.triton_mover import TritonMover

            self._mover = TritonMover(self._lanes, device, cuda_stream)
        elif kernels == "torch":
            self._mover = TorchMover(self._lanes, device, cuda_stream)
        else:
            self._mover = NumpyMover(self._lanes, digest_sample)

    def stage(
        self, blocks: Sequence[GroupBlocks], chunks: Sequence[Chunk], num_tokens: int
    ) -> tuple[StagedChunk, ...]:
        """Prepare chunks of one request of ``num_tokens`` tokens; on CUDA with one copy for all chunks.

        Raises:
            LayoutError: a chunk does not fit the wire, names a group that ``blocks`` lacks, or, on the
                source, has tokens without a block that later tokens see.
            LocalError: a block id is not in this cache.
        """
        held = {group.group: group for group in blocks}
        layouts = [self._layout_of(chunk) for chunk in chunks]
        found: dict[PageRange, BlockIds] = {}
        for layout in layouts:
            for move in layout.moves:
                if move.pages not in found:
                    found[move.pages] = self._blocks_of(held, move.pages, num_tokens)
        return tuple(self._mover.stage(layouts, found))

    def _make_layout(self, chunk: Chunk) -> ChunkLayout:
        placement = self.chunker.place(chunk)
        made = (make_move(lanes, chunk, placement) for lanes in self._lanes)
        moves = tuple(move for move in made if move is not None)
        placed = zip(
            self.chunker.wire.streams[chunk.first_stream : chunk.stop_stream],
            placement.base.tolist(),
            placement.rows.tolist(),
            strict=True,
        )
        streams = (
            (base, rows * stream.width_bytes, stream.word_bytes) for stream, base, rows in placed if rows
        )
        return self._mover.prepare(placement.total_bytes, tuple(streams), moves)

    def _blocks_of(self, held: dict[int, GroupBlocks], pages: PageRange, num_tokens: int) -> BlockIds:
        if pages.group not in held:
            raise LayoutError(
                f"a chunk needs cache group {pages.group} of this side, the request has {listed(held)}"
            )
        geometry = self._groups[pages.group]
        ids = page_ids(held[pages.group], geometry, pages.first, pages.count)
        num_blocks = self._num_blocks[pages.group]
        # As unsigned numbers, negative ids are beyond every cache too.
        if len(ids) and ids.view(np.uint64).max() >= num_blocks:
            raise LocalError(
                f"cache group {pages.group}: kernel blocks {ids.min()}..{ids.max()} are to be moved, the "
                f"cache has 0..{num_blocks - 1}"
            )
        if self._side == "source":
            check_held(ids, pages.first, geometry, num_tokens)
        return ids

    def pack(
        self, slot: int, staged: StagedChunk, seed: int, coder: ExponentCoder | None = None
    ) -> PackTicket:
        """Fill the slot at an address of the device with a chunk's pages, or with their code.

        ``seed``, 64 bits, is the generation of the slot, which the digest includes. The digest of a code is
        of the bytes before. A ``coder`` works on the same stream.
        Raises ``LocalError``: the slot is not aligned.
        """
        _check_aligned(slot)
        if coder is None:
            return self._mover.move(slot, staged, seed, pack=True)
        packed = self._mover.move(coder.plain, staged, seed, pack=True)
        return coder.encode(slot, staged.total_bytes, packed)

    def unpack(
        self, slot: int, staged: StagedChunk, seed: int, coder: ExponentCoder | None = None
    ) -> PackTicket:
        """Write a slot's bytes, or those that they are the code of, to a chunk's pages; see ``pack``.

        The digest is known only after the pages were written: the caller must compare it before any use of
        these blocks.
        """
        _check_aligned(slot)
        if coder is None:
            return self._mover.move(slot, staged, seed, pack=False)
        coder.decode(slot, staged.total_bytes)
        return self._mover.move(coder.plain, staged, seed, pack=False)


def make_coder(
    most_bytes: int, device: torch.device, cuda_stream: torch.cuda.Stream | None = None
) -> ExponentCoder:
    """The coder of slots of up to ``most_bytes`` on a device; on CUDA it takes Triton. See ``Packer``."""
    if device.type != "cuda":
        return ExponentCoder(most_bytes)
    from kvconnect.pack.exponent_code_triton import TritonExponentCoder

    return TritonExponentCoder(most_bytes, device, cuda_stream)


def _check_aligned(slot: int) -> None:
    if slot % PLACE_BYTES or slot <= 0:
        raise LocalError(f"a slot is at {slot:#x}; accepted: multiples of {PLACE_BYTES}")

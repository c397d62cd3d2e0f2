"""A request's KV carried from one cache to another as a pair of nodes does it: cut, packed and unpacked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.pack.packer import Packer
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import PACK_BYTES_PER_S, RequestCutter
from kvconnect.plan.wire import align_wire


def carry_over(
    source: RegionTable,
    target: RegionTable,
    held: Sequence[GroupBlocks],
    wanted: Sequence[GroupBlocks],
    num_tokens: int,
    *,
    slot_bytes: int = 1 << 20,
    order: str | None = None,
) -> None:
    """Carry the blocks that the target wants, chunk by chunk, through one slot of ``slot_bytes``.

    Raises ``LayoutError``: the two tables cannot be matched, or the source does not hold what is wanted.
    """
    wire = align_wire(source, target, order)
    packer = Packer(source, wire, side="source", device="cpu")
    unpacker = Packer(target, wire, side="target", device="cpu")
    cutter = RequestCutter(unpacker.chunker, source, target, slot_bytes, PACK_BYTES_PER_S["cuda"])
    chunks = cutter.cut(wanted, num_tokens)
    outgoing, incoming = packer.stage(held, chunks, num_tokens), unpacker.stage(wanted, chunks, num_tokens)
    slot = torch.empty(slot_bytes, dtype=torch.uint8)
    for generation, (out, into) in enumerate(zip(outgoing, incoming, strict=True)):
        packed = packer.pack(slot.data_ptr(), out, generation)
        packed.wait()
        landed = unpacker.unpack(slot.data_ptr(), into, generation)
        landed.wait()
        assert landed.digest == packed.digest

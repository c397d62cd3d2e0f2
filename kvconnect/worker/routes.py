"""What D asks one rank of a peer: the paths that are open to it, and a request cut for them.

A route is made once per connection, from both tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.region_table import GroupGeometry
from kvconnect.config import ExtraConfig
from kvconnect.errors import LayoutError, LocalError
from kvconnect.orders import GroupBlocks, Load
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import Grant
from kvconnect.peer.session import Session
from kvconnect.plan.chunks import Chunk, Span, wanted_spans
from kvconnect.worker.landing import LandingBay
from kvconnect.worker.local import Local

SECONDS_PER_CHUNK = 400e-6
"""What a chunk costs whatever its size: a launch, a post and a message on either side."""

_MOST_CHUNKS = 16
_UNMEASURED_PACK_BYTES_PER_S = 4e9


@dataclass(frozen=True)
class Asked:
    """What a fetch opens to the peer. ``only_path`` is empty if the peer may choose."""

    groups: tuple[GroupBlocks, ...]
    chunks: tuple[Chunk, ...]
    grants: tuple[Grant, ...]
    only_path: str


@dataclass(frozen=True)
class Route:
    """The paths to one rank of a peer.

    ``packer`` unpacks what it sends, and is None where the packed path is closed; ``refusal`` says why.
    ``step_bytes`` are those of ``align_tokens`` tokens: chunks grow by so much.
    """

    direct: bool
    packer: Packer | None
    slot_bytes: int
    geometry: tuple[GroupGeometry, ...]
    align_tokens: int
    pack_bytes_per_s: float = _UNMEASURED_PACK_BYTES_PER_S
    step_bytes: int = 0
    refusal: str = ""

    def fetch(self, bay: LandingBay, order: Load, transfer_id: int) -> Asked | str:
        """What to ask for a request, its landing prepared; or why it cannot be asked for."""
        groups = order.groups if self.direct else ()
        if self.packer is None:
            return Asked(groups, (), (), "direct") if self.direct else f"no path is open: {self.refusal}"
        try:
            chunks = self._cut(self.packer, order)
            if not chunks:
                return Asked(groups, (), (), "direct")
            grants = bay.open(transfer_id, self.packer, chunks, order.groups, order.num_tokens)
        except LayoutError as error:
            if self.direct:
                return Asked(groups, (), (), "direct")
            return str(error)
        except LocalError as error:
            return f"it cannot be fetched: {error}"
        return Asked(groups, chunks, grants, "" if self.direct else "packed")

    def _cut(self, packer: Packer, order: Load) -> tuple[Chunk, ...]:
        """Chunks that fit a slot, and several of them where there is enough to move.

        Raises:
            LayoutError: a slot is too small for the fewest rows that can travel alone.
        """
        spans = wanted_spans(self.geometry, order.groups, order.num_tokens)
        chunker = packer.chunker
        whole = Chunk(0, len(chunker.wire.streams), spans)
        total_bytes = chunker.place(whole).total_bytes
        wanted = div_ceil(total_bytes, chunks_in_turn(total_bytes, self.pack_bytes_per_s))
        budget = min(self.slot_bytes, wanted + self.step_bytes)
        for slot_bytes in (budget, self.slot_bytes):
            with suppress(LayoutError):
                return chunker.cut(spans, slot_bytes, self.align_tokens)
        # No slot holds a whole block: blocks are cut where they must be.
        return chunker.cut(spans, self.slot_bytes)


def chunks_in_turn(total_bytes: int, pack_bytes_per_s: float) -> int:
    """Into how many chunks a transfer is best cut, slots aside.

    While one chunk is on its way the next is packed and the last unpacked, so that only the packing of the
    first and the unpacking of the last cost time: less with more chunks, each of which costs its own.
    """
    best = math.sqrt(2 * total_bytes / (pack_bytes_per_s * SECONDS_PER_CHUNK))
    return max(1, min(_MOST_CHUNKS, round(best)))


def make_route(config: ExtraConfig, local: Local, session: Session) -> Route:
    """The route over a connection whose peer has introduced itself.

    Raises:
        LocalError: it has not.
    """
    peer, ours = session.peer, session.ours
    if peer is None:
        raise LocalError(f"{session!r}: the peer has not introduced itself")
    geometry = ours.table.groups
    align_tokens = max(
        (
            group.block_tokens * group.blocks_per_kv_block
            for group in (*geometry, *peer.table.groups)
            if not group.is_state
        ),
        default=1,
    )
    direct = config.path != "packed"
    slot_bytes = min(ours.slot_bytes, peer.slot_bytes)
    if not slot_bytes:
        why = f"the {'peer' if ours.slot_bytes else 'decode node'} has no slots"
        return Route(direct, None, 0, geometry, align_tokens, refusal=why)
    try:
        packer = local.packer(peer, ours, "target", config.pack_programs, config.convert_dtype)
    except LayoutError as error:
        return Route(direct, None, 0, geometry, align_tokens, refusal=str(error))
    rate = local.pack_bytes_per_s or _UNMEASURED_PACK_BYTES_PER_S
    streams = packer.chunker.wire.streams
    wired = {stream.target_group for stream in streams}
    one_step = _one_step([group for group in geometry if group.group in wired], align_tokens)
    whole = Chunk(0, len(streams), one_step)
    step_bytes = packer.chunker.place(whole).total_bytes
    return Route(direct, packer, slot_bytes, geometry, align_tokens, rate, step_bytes)


def _one_step(geometry: Sequence[GroupGeometry], align_tokens: int) -> tuple[Span, ...]:
    """What chunks grow by: as many tokens as the larger of both sides' blocks, in every group."""
    return tuple(Span(group.group, 0, 1 if group.is_state else align_tokens) for group in geometry)

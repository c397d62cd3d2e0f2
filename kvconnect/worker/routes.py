"""What D asks one rank of a peer: the paths that are open to it, and a request cut for them.

A route is made once per connection, from both tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.config import ExtraConfig
from kvconnect.errors import LayoutError, LocalError
from kvconnect.orders import GroupBlocks, Load
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import Grant
from kvconnect.peer.session import Session
from kvconnect.plan.chunks import Chunk
from kvconnect.plan.cost import DEFAULT_PACK_BYTES_PER_S
from kvconnect.plan.cutting import RequestCutter
from kvconnect.worker.landing import LandingBay
from kvconnect.worker.local import Local


@dataclass(frozen=True)
class Asked:
    """What a fetch opens to the peer. ``only_path`` is empty if the peer may choose.

    ``closed`` says why the packed path is not among it, where only we can know.
    """

    groups: tuple[GroupBlocks, ...]
    chunks: tuple[Chunk, ...]
    grants: tuple[Grant, ...]
    only_path: str
    closed: str = ""


@dataclass(frozen=True)
class Packed:
    """The packed path: what cuts a request, and what unpacks its chunks."""

    cutter: RequestCutter
    packer: Packer


@dataclass(frozen=True)
class Route:
    """The paths to one rank of a peer. Where the packed one is closed, ``refusal`` says why."""

    direct: bool
    packed: Packed | None
    refusal: str = ""

    def fetch(self, bay: LandingBay, order: Load, transfer_id: int, holder: str) -> Asked | str:
        """What to ask for a request, its landing prepared; or why it cannot be asked for.

        ``holder`` names the node that is asked, for whom slots are lent.
        """
        groups = order.groups if self.direct else ()
        if self.packed is None:
            if self.direct:
                return Asked(groups, (), (), "direct")
            return f"no path is open: {self.refusal}"
        try:
            chunks = self.packed.cutter.cut(order.groups, order.num_tokens)
            if not chunks:
                return Asked(groups, (), (), "direct")
            packer = self.packed.packer
            grants = bay.open(transfer_id, packer, chunks, order.groups, order.num_tokens, holder)
        except LayoutError as error:
            if self.direct:
                return Asked(groups, (), (), "direct", str(error))
            return str(error)
        except LocalError as error:
            return f"it cannot be fetched: {error}"
        return Asked(groups, chunks, grants, "" if self.direct else "packed")


def make_route(config: ExtraConfig, local: Local, session: Session) -> Route:
    """The route over a connection whose peer has introduced itself.

    Raises:
        LocalError: it has not.
    """
    peer, ours = session.peer, session.ours
    if peer is None:
        raise LocalError(f"{session!r}: the peer has not introduced itself")
    direct = config.path != "packed"
    slot_bytes = min(ours.slot_bytes, peer.slot_bytes)
    if not slot_bytes:
        return Route(direct, None, f"the {'peer' if ours.slot_bytes else 'decode node'} has no slots")
    try:
        packer = local.packer(peer, ours, "target", config.convert_dtype)
    except LayoutError as error:
        return Route(direct, None, str(error))
    rate = local.pack_bytes_per_s or DEFAULT_PACK_BYTES_PER_S
    cutter = RequestCutter(packer.chunker, peer.table, ours.table, slot_bytes, rate)
    return Route(direct, Packed(cutter, packer))

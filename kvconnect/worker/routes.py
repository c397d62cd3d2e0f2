"""The paths to one rank of a peer, worked out once per connection from both tables."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.config import ExtraConfig
from kvconnect.errors import LayoutError, LocalError
from kvconnect.pack.packer import Packer
from kvconnect.peer.session import Session
from kvconnect.plan.cost import DEFAULT_PACK_BYTES_PER_S
from kvconnect.plan.cutting import RequestCutter
from kvconnect.worker.local import Local


@dataclass(frozen=True)
class Route:
    """``packed`` is what cuts a request into chunks, and what unpacks them; ``refusal`` is why it is None."""

    direct: bool
    packed: tuple[RequestCutter, Packer] | None = None
    refusal: str = ""


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
        refusal = f"the {'peer' if ours.slot_bytes else 'decode node'} has no slots"
        return Route(direct, refusal=refusal)
    try:
        packer = local.packer(peer, ours, "target", config.convert_dtype)
    except LayoutError as error:
        return Route(direct, refusal=str(error))
    rate = local.pack_bytes_per_s or DEFAULT_PACK_BYTES_PER_S
    cutter = RequestCutter(packer.chunker, peer.table, ours.table, slot_bytes, rate)
    return Route(direct, (cutter, packer))

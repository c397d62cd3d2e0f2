"""The records of the NIXL adapter: of a peer, its card, and of a batch.

Owns the card, and the lookup from an address to NIXL's memory type and device number. It must not
import NIXL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvconnect.engine.base import Addresses, Batch, Span, SpanSet
from kvconnect.engine.nixl_reuse import Copy
from kvconnect.engine.process import ProcessIdentity, own_identity
from kvconnect.errors import EngineError

MAX_CARD_BYTES = 16 << 20


class NixlCard(msgspec.Struct, tag="kvconnect-nixl-1", frozen=True):
    """NIXL's own metadata, and the spans behind it as (address, length_bytes, device)."""

    metadata: bytes
    spans: list[tuple[int, int, str]]
    process: ProcessIdentity


@dataclass(slots=True)
class Flight:
    """A batch that was not answered yet.

    ``handles`` are those which may still be in progress. ``error`` is set once the batch can only
    fail; it is then answered when it is proven quiet, or once it had its time, ``settle_until`` at the
    earliest. ``copy`` is set where its handle can be posted again. ``is_posted`` is False while the batch
    waits for its peer's link to be renewed.
    """

    batch: Batch
    posted: float
    handles: list[Any] = field(default_factory=list)
    error: str = ""
    settle_until: float = 0.0
    severed: bool = False
    copy: Copy | None = None
    is_posted: bool = False


class Peer:
    """A connected peer: its card, its agent's name, and whether the link to it must be renewed.

    ``progressed_at`` is when a transfer to it ended last, ``heal_asked_at`` when a batch first waited for the
    link to be renewed; 0 where none does.
    """

    def __init__(self, card: NixlCard, agent: str) -> None:
        self.card = card
        self.agent = agent
        self.broken = False
        self.progressed_at = 0.0
        self.heal_asked_at = 0.0
        self.spans = SpanSet()
        self.spans.add([Span(*span) for span in card.spans])
        self.devices = DeviceMap(self.spans)


class DeviceMap:
    """From addresses to (is it GPU memory, device number), vectorised."""

    def __init__(self, spans: SpanSet) -> None:
        ordered = sorted(spans, key=lambda span: span.address)
        self._starts = np.array([span.address for span in ordered], dtype=np.int64)
        kinds = [device_number(span.device) for span in ordered]
        self._gpu = np.array([gpu for gpu, _ in kinds], dtype=bool)
        self._number = np.array([number for _, number in kinds], dtype=np.uint64)

    def lookup(self, addresses: Addresses) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """For each address, which must lie in a span: is it GPU memory, and on which device."""
        owner = np.searchsorted(self._starts, addresses, side="right") - 1
        return self._gpu[owner], self._number[owner]


def device_number(device: str) -> tuple[bool, int]:
    """``"cpu"`` is ``(False, 0)``, ``"cuda:3"`` is ``(True, 3)``. Raises ``EngineError``."""
    if device == "cpu":
        return False, 0
    kind, _, number = device.partition(":")
    if kind == "cuda" and number.isdecimal():
        return True, int(number)
    raise EngineError(f"cannot register memory of device {device!r}: 'cpu' and 'cuda:N' are known")


def encode_card(metadata: bytes, spans: Sequence[Span]) -> bytes:
    """The card of an engine of this process."""
    listed = [(span.address, span.length_bytes, span.device) for span in spans]
    return msgspec.msgpack.encode(NixlCard(metadata, listed, own_identity()))


def decode_card(peer: str, card: bytes) -> NixlCard:
    """Read a card. Raises ``EngineError`` if it is not one of this engine's kind."""
    if len(card) > MAX_CARD_BYTES:
        raise EngineError(f"the card of peer {peer!r} has {len(card)} bytes, at most {MAX_CARD_BYTES}")
    try:
        return msgspec.msgpack.decode(card, type=NixlCard)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the card of peer {peer!r} is not a NIXL engine's: {error}") from error

"""The memory that an NVLink engine shares, and the card that tells peers of it.

Owns what is registered here, and what a card may say. It must not know who the peers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvconnect.engine.base import Addresses, Span, SpanSet
from kvconnect.engine.ipc import Allocation, DeviceMemory
from kvconnect.engine.nixl_peer import device_number
from kvconnect.engine.process import ProcessIdentity, own_identity
from kvconnect.engine.span_table import SpanTable
from kvconnect.errors import EngineError

MAX_CARD_BYTES = 16 << 20

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class NvlinkCard(msgspec.Struct, tag="kvconnect-nvlink-1", frozen=True):
    """A process, its shared allocations, and its spans as (address, length_bytes, index of allocation)."""

    process: ProcessIdentity
    allocations: list[Allocation]
    spans: list[tuple[_Number, _Number, _Number]]


def decode_card(peer: str, card: bytes) -> NvlinkCard:
    """Read a card. Raises ``EngineError`` if it is not one of this engine's kind, or contradicts itself."""
    if len(card) > MAX_CARD_BYTES:
        raise EngineError(f"the card of peer {peer!r} has {len(card)} bytes, at most {MAX_CARD_BYTES}")
    try:
        decoded = msgspec.msgpack.decode(card, type=NvlinkCard)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the card of peer {peer!r} is not an NVLink engine's: {error}") from error
    for address, length_bytes, index in decoded.spans:
        if index >= len(decoded.allocations) or not _holds(decoded.allocations[index], address, length_bytes):
            raise EngineError(
                f"the card of peer {peer!r} names {length_bytes} bytes at {address:#x}, "
                "which are in none of its allocations"
            )
    return decoded


def _holds(allocation: Allocation, address: int, length_bytes: int) -> bool:
    end = allocation.address + allocation.length_bytes
    return allocation.address <= address and address + length_bytes <= end


def device_of(spans: Sequence[Span], device: int | None) -> int | None:
    """The one GPU that all spans are on, which must be ``device`` unless that is None.

    Raises:
        EngineError: there is a span of the host's memory, or of another GPU.
    """
    for span in spans:
        on_gpu, number = device_number(span.device)
        if not on_gpu:
            raise EngineError(f"the NVLink engine moves memory of a GPU, not of {span.device}")
        if device not in (None, number):
            raise EngineError(
                f"the NVLink engine serves cuda:{device}, so it cannot take memory of {span.device}: "
                "make an engine for each GPU"
            )
        device = number
    return device


class SharedMemory:
    """The registered spans of one engine, all on one GPU."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._spans = SpanSet()
        self._allocations: dict[Span, Allocation] = {}
        self._table = SpanTable(())

    def add(self, spans: Sequence[Span], device: int) -> None:
        """Share spans on GPU ``device``, all or none.

        Raises:
            UnshareableError: no other process can map the memory.
            EngineError: a span is empty, overlaps another one or leaves its allocation.
        """
        self._spans.add(spans)
        try:
            shared = {span: self._memory.share(span.address, device) for span in spans}
            for span, allocation in shared.items():
                _check_inside(span, allocation)
        except EngineError:
            self._spans.remove(spans)
            raise
        self._allocations.update(shared)
        self._tabulate()

    def remove(self, spans: Sequence[Span]) -> None:
        """Take spans off the card, all or none. Raises ``EngineError``."""
        self._spans.remove(spans)
        for span in spans:
            del self._allocations[span]
        self._tabulate()

    def outside(self, addresses: Addresses, length: Addresses) -> int | None:
        """See ``SpanTable.outside``."""
        return self._table.outside(addresses, length)

    def card(self) -> bytes:
        """The process, its allocations and the spans in them."""
        places: dict[Allocation, int] = {}
        listed = [
            (span.address, span.length_bytes, places.setdefault(allocation, len(places)))
            for span, allocation in self._allocations.items()
        ]
        return msgspec.msgpack.encode(NvlinkCard(own_identity(), list(places), listed))

    def _tabulate(self) -> None:
        self._table = SpanTable((span.address, span.length_bytes) for span in self._spans)


def _check_inside(span: Span, allocation: Allocation) -> None:
    """Raises ``EngineError`` if a span leaves the allocation that its first byte lies in."""
    if not _holds(allocation, span.address, span.length_bytes):
        raise EngineError(
            f"{span.length_bytes} bytes at {span.address:#x} on {span.device} reach beyond their allocation "
            f"of {allocation.length_bytes} bytes at {allocation.address:#x}; register each storage by itself"
        )

"""The host that an engine's card would make this node connect to, as far as a card can be read.

Mooncake's card names one, and that of any engine may, as ``host``. NIXL's metadata is its library's own, and
its addresses cannot be read without it.
"""

from __future__ import annotations

import msgspec


class _Addressed(msgspec.Struct, frozen=True):
    """The fields of any card that name an address."""

    session: str = ""
    host: str = ""


def card_host(card: bytes) -> str:
    """The host, an IPv6 address without its brackets; empty where the card names none or cannot be read."""
    try:
        addressed = msgspec.msgpack.decode(card, type=_Addressed)
    except msgspec.MsgspecError:
        return ""
    return addressed.host or addressed.session.rpartition(":")[0].strip("[]")

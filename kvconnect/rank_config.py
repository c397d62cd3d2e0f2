"""What differs between the ranks of one node: where each is reached and listens, and its devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from kvconnect.errors import ConfigError

_RANKS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config.ranks``: what is set here is so on these ranks.

    Attributes:
        host: the address that peers use, or a network.
        bind: where they listen, or a network.
        device_name: network devices for the engine.
    """

    host: str = ""
    bind: str = ""
    device_name: str = ""


def ranks_of(text: str) -> list[range]:
    """The ranks that a key of ``ranks`` names, such as ``0``, ``4-7`` or ``0,8-9``; none if it is wrong."""
    found = [_RANKS.fullmatch(part) for part in text.split(",")]
    named = [range(int(one[1]), int(one[2] or one[1]) + 1) for one in found if one is not None]
    return named if len(named) == len(found) and all(named) else []


def settings_of(ranks: Mapping[str, RankConfig], rank: int) -> dict[str, str]:
    """What is set for a rank of its own, by name."""
    own = [one for key, one in ranks.items() if any(rank in named for named in ranks_of(key))]
    return {name: value for one in own for name, value in msgspec.structs.asdict(one).items() if value}


def place_of(host: str, bind: str, device_name: str) -> str:
    """Where a rank is reached, where it listens if that is elsewhere, and its devices, for people."""
    listens = f", listening at {bind}" if bind not in ("", host) else ""
    return host + listens + (f", over {device_name}" if device_name else "")


def check_ranks(keys: Iterable[str], where: str) -> None:
    """Raises ``ConfigError``: a key names no ranks, or one rank is named twice."""
    named = [(ranks.start, ranks.stop, key) for key in keys for ranks in ranks_of(key) or [range(0)]]
    for begin, end, key in named:
        if begin == end:
            raise ConfigError(f"{where} has {key!r}; accepted: ranks such as '0', '4-7' and '0,8-9'")
        both = [other for first, last, other in named if first <= begin < last]
        if len(both) > 1:
            raise ConfigError(f"{where} has {both}, which both name rank {begin}; accepted: each rank once")

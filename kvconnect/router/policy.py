"""How requests run and where, as the command line has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.addresses import split_address
from kvconnect.errors import ConfigError
from kvconnect.peer.feed import FeedReader
from kvconnect.router.kv_events import KVEvents
from kvconnect.router.limits import clean_url
from kvconnect.router.placing import Placing
from kvconnect.router.pool import Pool
from kvconnect.router.prefix_index import PrefixIndex
from kvconnect.router.upstream import Upstream

POLICIES = ("least-loaded", "prefix")


@dataclass(frozen=True)
class FlowOptions:
    """How requests run.

    ``parallel``: both nodes are asked at once, where the address to fetch from the prefill node is known.
    ``decode_fallback``: the decode node computes the prompt where prefill failed. ``placing``: requests go
    where their prefix is, instead of to the least loaded node.
    """

    parallel: bool = False
    decode_fallback: bool = True
    placing: Placing | None = None


def by_node(option: str, given: Sequence[str]) -> dict[str, str]:
    """``URL=VALUE`` of an option, by the URL of the node. Raises ``ConfigError``: one is none."""
    found = {}
    for text in given:
        url, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(f"--{option} is {text!r}; accepted: URL=VALUE, with the URL of a node")
        found[clean_url(url)] = value
    return found


@dataclass(frozen=True)
class PrefixPolicy:
    """Where nodes publish their KV events, answer those that missed some, and are reached by their peers.

    Each by the node's URL; the first are endpoints of ZeroMQ, the last ``host:port`` of the side channel.

    Raises:
        ConfigError: one is not an endpoint or an address.
    """

    events: Mapping[str, str]
    replays: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.events:
            raise ConfigError(
                "policy is 'prefix' and no node publishes KV events; accepted: with --kv-event-source"
            )
        for endpoint in (*self.events.values(), *self.replays.values()):
            if not endpoint.startswith(("tcp://", "ipc://")) or "*" in endpoint:
                raise ConfigError(f"KV events are at {endpoint!r}; accepted: as tcp://10.0.0.1:5557")
        for address in self.sources.values():
            if split_address(address) is None:
                raise ConfigError(f"a node's KV source is {address!r}; accepted: host:port")

    def made(self, pools: Collection[Pool], upstream: Upstream) -> tuple[Placing, list[KVEvents]]:
        """What places requests, and what follows each node. Raises ``ConfigError``: there is no such node."""
        urls = {url for pool in pools for url in pool.urls}
        unknown = sorted({*self.events, *self.replays, *self.sources} - urls)
        if unknown:
            raise ConfigError(f"{unknown[0]} is no node of this router; there are {', '.join(sorted(urls))}")
        index = PrefixIndex()
        follow = [
            KVEvents(index, url, FeedReader(endpoint, self.replays.get(url, "")), upstream.metrics)
            for url, endpoint in self.events.items()
        ]
        return Placing(index, self.sources, upstream), follow

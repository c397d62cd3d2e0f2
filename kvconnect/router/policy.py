"""Policy ``prefix``, as the command line has it: which nodes publish what they have, and where."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvconnect.addresses import split_address
from kvconnect.errors import ConfigError
from kvconnect.peer.feed import FeedReader
from kvconnect.router.kv_events import KVEvents
from kvconnect.router.options import RouterOptions, clean_url
from kvconnect.router.placing import Placing
from kvconnect.router.pool import Pool
from kvconnect.router.prefix_index import PrefixIndex
from kvconnect.router.upstream import Upstream


def place_by_prefix(
    options: RouterOptions, pools: Collection[Pool], upstream: Upstream
) -> tuple[Placing, list[KVEvents]]:
    """What places requests, and what follows each node.

    Raises:
        ConfigError: nothing is followed, there is no such node, or what is given of one is no address.
    """
    events = _by_node("kv-event-source", options.kv_event_source)
    replays = _by_node("kv-event-replay-source", options.kv_event_replay_source)
    sources = _by_node("kv-source", options.kv_source)
    if not events:
        raise ConfigError(
            "policy is 'prefix' and no node publishes KV events; accepted: with --kv-event-source"
        )
    for endpoint in (*events.values(), *replays.values()):
        if not endpoint.startswith(("tcp://", "ipc://")) or "*" in endpoint:
            raise ConfigError(f"KV events are at {endpoint!r}; accepted: as tcp://10.0.0.1:5557")
    for address in sources.values():
        if split_address(address) is None:
            raise ConfigError(f"a node's KV source is {address!r}; accepted: host:port")
    urls = {url for pool in pools for url in pool.urls}
    unknown = sorted({*events, *replays, *sources} - urls)
    if unknown:
        raise ConfigError(f"{unknown[0]} is no node of this router; there are {', '.join(sorted(urls))}")
    index = PrefixIndex()
    follow = [
        KVEvents(index, url, FeedReader(endpoint, replays.get(url, "")), upstream.metrics)
        for url, endpoint in events.items()
    ]
    return Placing(index, sources, upstream), follow


def _by_node(option: str, given: Sequence[str]) -> dict[str, str]:
    """``URL=VALUE`` of an option, by the URL of the node. Raises ``ConfigError``: one is none."""
    found = {}
    for text in given:
        url, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(f"--{option} is {text!r}; accepted: URL=VALUE, with the URL of a node")
        found[clean_url(url)] = value
    return found

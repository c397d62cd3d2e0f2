"""Messages between vLLM's scheduler and workers in vLLM's own types: orders, addresses, reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import Identity
from kvconnect.offload.tier import DISK, HOST, STORE
from kvconnect.receipt import PEER
from kvconnect.transfer.orders import Orders, Results, joined

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    # Before 0.32 hits are not distinguished by source.
    PEER_SOURCE = None
    _SOURCES: dict[str, Any] = {}
else:
    PEER_SOURCE = CacheHitSource.P2P
    _SOURCES = {
        HOST: CacheHitSource.HOST,
        DISK: CacheHitSource.DISK,
        STORE: CacheHitSource.EXTERNAL_UNSPECIFIED,
        PEER: CacheHitSource.P2P,
    }


@dataclass
class OrdersMetadata(KVConnectorMetadata):
    """One step's orders. ``asks_address``: no worker has announced itself to the scheduler yet.

    ``check_weights``: caches were reset, as they are before weights are replaced, and this is the first step
    with work since.
    """

    orders: Orders
    asks_address: bool = False
    check_weights: bool = False


@dataclass
class AddressMetadata(KVConnectorHandshakeMetadata):
    """A worker's announcement: its address or None if it does not listen, and row bytes by cache group.

    ``others`` are the announcements of the other ranks, where this one passes them on. ``identity`` is what
    its KV depends on. ``parks``: loads can fill its rows.
    """

    rank: int
    address: RankAddress | None
    row_bytes: dict[int, int] = field(default_factory=dict)
    others: tuple[AddressMetadata, ...] = ()
    parks: bool = False
    identity: Identity = field(default_factory=Identity)


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """The results of ranks, without the requests that vLLM reports itself, and addresses where asked."""

    results: Results = field(default_factory=Results)
    addresses: tuple[AddressMetadata, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.results or self.addresses)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """This report joined with another rank's. A report of another connector is ignored."""
        if not isinstance(other, ReportMetadata):
            return self
        return ReportMetadata(joined((self.results, other.results)), self.addresses + other.addresses)


def hit_sources(by_tier: Mapping[str, int]) -> dict[Any, int]:
    """Tokens by tier, with vLLM's names for tiers."""
    return {_SOURCES[tier]: count for tier, count in by_tier.items() if tier in _SOURCES}

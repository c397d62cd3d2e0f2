"""Which lower tiers a configuration names."""

from __future__ import annotations

from kvconnect.config import OffloadConfig
from kvconnect.offload.namespace import Namespace
from kvconnect.offload.tier import LowerTier

DISK = "disk"
STORE = "store"


def lower_tier_names(config: OffloadConfig) -> tuple[str, ...]:
    """The tiers below host memory, nearest first. Both halves of a connector know them by these names."""
    return tuple(name for name, is_named in ((DISK, config.disk_path), (STORE, config.store)) if is_named)


def sought_tier_names(config: OffloadConfig) -> tuple[str, ...]:
    """Those of them that keep no index here: they never tell what they have got, and must be asked."""
    return tuple(name for name in lower_tier_names(config) if name == STORE)


def make_lower_tiers(
    config: OffloadConfig, namespace: Namespace, *, rank: int, world_size: int, most_row_bytes: int
) -> tuple[LowerTier, ...]:
    """Open the tiers of one rank. No row is longer than ``most_row_bytes``.

    Raises:
        ConfigError: a tier cannot be used as it is configured.
    """
    made: list[LowerTier] = []
    try:
        if config.disk_path:
            from kvconnect.offload.disk.tier import open_disk_tier

            made.append(open_disk_tier(config, namespace, rank, world_size))
        if config.store:
            from kvconnect.offload.store.tier import open_store_tier

            made.append(open_store_tier(config, namespace, most_row_bytes=most_row_bytes))
    except BaseException:
        for tier in made:
            tier.close()
        raise
    return tuple(made)

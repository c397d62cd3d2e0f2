"""Which lower tiers a configuration names."""

from __future__ import annotations

from kvconnect.config import OffloadConfig
from kvconnect.offload.namespace import Namespace
from kvconnect.offload.tier import LowerTier


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

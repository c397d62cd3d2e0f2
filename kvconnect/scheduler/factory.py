"""The scheduler half as a node's configuration says, with the cluster's secret and whom to fetch from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.orders import RankAddress
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.keyring import load_keyring
from kvconnect.scheduler.connector import SchedulerConnector
from kvconnect.scheduler.early import LongestRequest
from kvconnect.scheduler.handles import Handles
from kvconnect.scheduler.prompts import PromptDigest, untold
from kvconnect.scheduler.trust import PeerTrust


def configured_scheduler(
    config: TransferConfig,
    cache_config: KVCacheConfig,
    kernel_block_sizes: Mapping[int, int],
    *,
    directory: Sequence[RankAddress],
    environ: Mapping[str, str],
    clock: Callable[[], float],
    held_back: int = 0,
    parent_of: Callable[[str], str] = str,
    prompt_digest: PromptDigest = untold,
    longest: LongestRequest | None = None,
) -> SchedulerConnector:
    """A scheduler half. Keys are read from files, or ``environ``; ``clock`` is the wall clock, in seconds.

    Raises:
        ConfigError: keys or allowed peers are not valid, or engine id and host are too long for a handle.
    """
    extra = config.extra
    keyring = load_keyring(extra, environ)
    return SchedulerConnector(
        config,
        cache_config,
        kernel_block_sizes,
        directory=directory,
        held_back=held_back,
        longest=longest,
        handles=Handles(keyring.handle_secret if keyring else b"", clock),
        trust=PeerTrust(AllowList(extra.allow_peers), extra.max_peers),
        parent_of=parent_of,
        prompt_digest=prompt_digest,
    )

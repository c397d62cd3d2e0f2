"""Builds both halves of the node's connector from its options, model and cache."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect.cache.identity import Identity, Naming
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import OffloadConfig, parse_kv_transfer_config
from kvconnect.halves.building import (
    build_scheduler_half,
    build_worker_half,
    configured_trust,
)
from kvconnect.halves.rank_traits import KeptCache, RankTraits, SentCache
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.halves.worker_half import WorkerHalf
from kvconnect.node.block_manager import HASH_SCHEME, BlockPool
from kvconnect.node.kv_cache import NodeCache, parse_cache_dtype
from kvconnect.node.models import Model
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import Request
from kvconnect.node.scheduler import align_tokens
from kvconnect.offload.namespace import salted
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.offload.scheduler.shared_prefixes import SharedPrefixes
from kvconnect.peer.handles import digest_prompt
from kvconnect.peer.messages import CacheMeaning
from kvconnect.transfer.stack import LongestRequest, RankCache, RequestView, StackTraits

_TRIES = 5


@dataclass(frozen=True)
class Connector:
    """Both halves, and whether a request whose load failed is recomputed."""

    scheduler: SchedulerHalf
    worker: WorkerHalf
    recompute_failed_loads: bool = True

    def offload_state(self) -> Mapping[str, Any] | None:
        """``busy``: counts of work under way, all zero when idle; ``usage``: the tiers' contents.

        None without offload. For any thread.
        """
        scheduler, worker = self.scheduler.offload, self.worker.offload
        if scheduler is None or worker is None:
            return None
        # The engine's thread runs meanwhile, and a dictionary may grow while it is counted.
        for _ in range(_TRIES):
            with contextlib.suppress(RuntimeError):
                usage = {**scheduler.usage(), **worker.usage()}
                return {"busy": {**scheduler.state(), **worker.state(), **_behind(usage)}, "usage": usage}
        return {"busy": {"counting": 1}, "usage": {}}


def identity(options: NodeOptions, model: Model, named: Naming, *, convert_dtype: bool = False) -> Identity:
    """The identity of the node's KV.

    A model's name fixes its widths, its attention and the order within a page; the seed fixes its weights.
    With ``convert_dtype`` all convertible cache dtypes have one identity.
    """
    dtype = str(parse_cache_dtype(options.kv_cache_dtype)).removeprefix("torch.")
    return Identity.of(
        {
            "model": f"node {model.name}",
            "cache dtype": "any of 16 and 8 bits, by convert_dtype" if convert_dtype else dtype,
            "weights": {"files": f"seed={options.seed}"},
            "names": f"{named.hashing}, {named.tokens} tokens each",
        }
    )


def naming(config: KVCacheConfig, offload: OffloadConfig | None) -> Naming:
    """How this node names KV for peers: every block of every group ends at a name."""
    tokens = (group.block_size for group in config.groups if group.has_cache and not group.is_state)
    return Naming(salted(f"node {HASH_SCHEME}", offload), math.gcd(*tokens))


def configured_connector(options: NodeOptions, model: Model, cache: NodeCache, pool: BlockPool) -> Connector:
    """Both halves as ``kv_transfer_config`` defines them, with the cache registered; without it, empty ones.

    ``pool`` has the blocks of the prefix cache.

    Raises:
        ConfigError: the configuration is not valid, or not possible with this cache.
        EngineError: the engine is not usable on this machine.
    """
    if options.kv_transfer_config is None:
        return Connector(SchedulerHalf(), WorkerHalf())
    config = parse_kv_transfer_config(options.kv_transfer_config)
    offload, named = config.extra.offload, naming(cache.config, config.extra.offload)
    rank = RankCache(cache.config, cache.kernel_block_sizes, cache.tensors)
    stated = identity(options, model, named, convert_dtype=config.extra.convert_dtype)
    kept = None
    requirements = HitRequirements.of(
        cache.config.groups, cache.kernel_block_sizes, align_tokens(cache.config.groups)
    )
    if offload is not None:
        kept = KeptCache(
            rank,
            identity(options, model, named),
            requirements,
            label=options.model,
            naming=named,
        )
    # A state group turns prefix reuse off.
    shares = config.extra.share_prefix_cache and not any(group.is_state for group in cache.config.groups)
    sent = SentCache(rank, CacheMeaning(stated, None, 1), (named, requirements) if shares else None)
    worker = build_worker_half(config, RankTraits(sent=sent, kept=kept))
    with contextlib.ExitStack() as opened:
        # On failure a folder on disk must not stay locked, nor memory stay allocated.
        opened.callback(worker.close)
        address, blocks = worker.address(), None
        if worker.offload is not None:
            blocks = KeptBlocks(
                cache.config.groups,
                requirements,
                hashes=_content_hashes,
                row_bytes=worker.offload.row_bytes,
                parks=worker.offload.load_rows is not None,
            )
        scheduler = build_scheduler_half(
            config,
            cache.config,
            _traits(options, named, stated),
            directory=() if address is None else (address,),
            trust=configured_trust(config, os.environ, time.time),
            kept=blocks,
            shared=functools.partial(SharedPrefixes, requirements.groups, _content_hashes, pool)
            if shares
            else None,
        )
        opened.pop_all()
    return Connector(scheduler, worker, config.kv_load_failure_policy == "recompute")


def _traits(options: NodeOptions, named: Naming, stated: Identity) -> StackTraits:
    return StackTraits(
        prompt_digest=_prompt_digest,
        identity=lambda: stated,
        clock=time.monotonic,
        longest=LongestRequest(options.max_model_len, options.max_num_batched_tokens),
        naming=named,
        names=_content_hashes,
    )


def _prompt_digest(request: RequestView, num_tokens: int) -> bytes:
    assert isinstance(request, Request)
    return digest_prompt(request.token_ids[:num_tokens])


def _content_hashes(request: RequestView, block_tokens: int) -> Sequence[bytes]:
    assert isinstance(request, Request)
    return request.blocks.content_hashes(request.token_ids, block_tokens)


def _behind(usage: Mapping[str, Any]) -> dict[str, int]:
    """Tiers that still recover their contents, and records that the scheduler half has not received yet."""
    recovering = unreported = 0
    for name, tier in usage["tiers"].items():
        recovering += bool(tier.get("recovering"))
        if "records" in tier:
            unreported += abs(tier["records"] - sum(usage["lower"].get(name, {}).values()))
    return {"recovering": recovering, "unreported": unreported}

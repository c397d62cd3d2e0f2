"""Builds both halves from vLLM's configuration and the workers' announcements."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvconnect.cache.identity import Identity
from kvconnect.config import TransferConfig
from kvconnect.errors import ConfigError
from kvconnect.halves.building import (
    build_scheduler_half,
    build_worker_half,
    configured_trust,
)
from kvconnect.halves.rank_traits import KeptCache, RankTraits, SentCache
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.halves.worker_half import WorkerHalf
from kvconnect.peer.messages import CacheMeaning
from kvconnect.transfer.stack import LongestRequest, StackTraits
from kvconnect.vllm import settings
from kvconnect.vllm.geometry import (
    context_ranks,
    head_counts,
    held_back,
    of_stages,
    scheduler_config,
    stage_ranks,
    topology,
    worker_cache,
)
from kvconnect.vllm.metadata import AddressMetadata
from kvconnect.vllm.offload import (
    BlockHashes,
    BlockNames,
    WatchedPool,
    hash_block_tokens,
    hit_requirements,
    kept_config,
    naming,
)
from kvconnect.vllm.requests import Adapters, batch_of, cached_tokens, parent_of, prompt_digest
from kvconnect.vllm.stated_identity import Stated
from kvconnect.vllm.values import attention_layers
from kvconnect.vllm.weights import LoadedWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvconnect.offload.scheduler.host import KeptBlocks

logger = logging.getLogger(__name__)


def make_scheduler_half(
    vllm_config: VllmConfig,
    kv_cache_config: Any,
    config: TransferConfig,
    workers: Mapping[int, AddressMetadata],
    *,
    zeroes_loads: bool,
    pool: Any = None,
) -> SchedulerHalf:
    """The scheduler half, with vLLM's block ``pool``. Called once the workers have announced themselves."""
    extra, adapters = config.extra, Adapters()
    named = shared = kept = None
    if extra.engine != "none":
        own = naming(vllm_config, kv_cache_config, extra.offload)
        named = settings.usable_naming(vllm_config, config, own)
        if settings.shared_naming(vllm_config, kv_cache_config, config, own, pool) is not None:
            from kvconnect.offload.scheduler.shared_prefixes import SharedPrefixes

            shared = functools.partial(
                SharedPrefixes,
                hit_requirements(vllm_config, kv_cache_config).groups,
                BlockHashes(hash_block_tokens(vllm_config, kv_cache_config)),
                WatchedPool(pool),
            )
    traits = StackTraits(
        # vLLM before 0.31 does not state the lookahead; it is 1, as drafters of several modules are refused.
        held_back=held_back(kv_cache_config, getattr(vllm_config, "num_prefill_lookahead_tokens", 0)),
        parent_of=parent_of,
        batch_of=batch_of,
        prompt_digest=functools.partial(prompt_digest, adapters=adapters),
        clock=time.monotonic,
        longest=LongestRequest(
            vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens
        ),
        naming=named,
        names=BlockNames(vllm_config, named.tokens) if named is not None else None,
        cached_tokens=cached_tokens,
        identity=lambda: workers[min(workers)].identity if workers else Identity(),
        zeroes_loads=zeroes_loads,
    )
    if extra.offload is not None:
        kept = _kept_blocks(vllm_config, kv_cache_config, workers, adapters)
    return build_scheduler_half(
        config,
        scheduler_config(kv_cache_config, context_ranks(vllm_config)),
        traits,
        directory=tuple(meta.address for meta in workers.values() if meta.address is not None),
        trust=configured_trust(config, os.environ, time.time),
        kept=kept,
        shared=shared,
    )


def _kept_blocks(
    vllm_config: VllmConfig, kv_cache_config: Any, workers: Mapping[int, AddressMetadata], adapters: Adapters
) -> KeptBlocks:
    from kvconnect.offload.scheduler.host import KeptBlocks

    events = None
    if settings.wants_events(vllm_config):
        # Imported only by servers with offload and events, since it imports vLLM's event classes.
        from kvconnect.vllm.events import tier_events

        events = tier_events(kv_cache_config)
    hash_tokens = hash_block_tokens(vllm_config, kv_cache_config)
    return KeptBlocks(
        scheduler_config(kept_config(kv_cache_config)).groups,
        hit_requirements(vllm_config, kv_cache_config),
        hashes=BlockHashes(hash_tokens, None if events is not None else adapters),
        row_bytes=_same_rows(workers),
        # vLLM's world size may include all data-parallel engines.
        num_ranks=vllm_config.parallel_config.pipeline_parallel_size * stage_ranks(vllm_config),
        events=events,
        parks=all(meta.parks for meta in workers.values()),
    )


def make_worker_half(
    vllm_config: VllmConfig,
    kv_cache_config: Any,
    config: TransferConfig,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    rank: int,
    weights: LoadedWeights,
) -> WorkerHalf:
    """The worker half, with this rank's caches described and registered."""
    ranks, extra = topology(vllm_config, rank, kv_caches), config.extra
    counts = head_counts(vllm_config)
    described = functools.partial(
        worker_cache,
        kv_caches=kv_caches,
        tensor_rank=rank % ranks.tensor,
        num_ranks=ranks.tensor,
        head_counts=counts,
        layers=attention_layers(vllm_config),
    )
    stated = Stated(vllm_config, kv_cache_config, kv_caches, weights)
    # Measured before kvconnect allocates: its memory is no part of vLLM's share.
    reserved_bytes = still_taken_bytes(vllm_config, next(iter(kv_caches.values())).device)
    kept = sent = None
    named = naming(vllm_config, kv_cache_config, extra.offload)
    if extra.offload is not None:
        if named is None and config.is_producer and extra.engine != "none":
            reason = settings.why_unnamed(vllm_config, named)
            logger.info("what is kept in host memory is not sent to peers, as %s", reason)
        # Restored bytes come from the same rank: nothing is converted.
        cache = described(kept_config(kv_cache_config))
        kept = KeptCache(
            cache,
            stated.identity(cache, extra.offload),
            hit_requirements(vllm_config, kv_cache_config),
            label=str(vllm_config.model_config.served_model_name or vllm_config.model_config.model),
            naming=named,
            announces=settings.wants_events(vllm_config) and rank == 0,
        )
    if extra.engine != "none":
        cache = described(kv_cache_config, convert_dtype=extra.convert_dtype)
        lookahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
        meaning = CacheMeaning(
            stated.identity(cache, extra.offload, convert_dtype=extra.convert_dtype),
            num_heads=max(of_stages(vllm_config, cache.finest(counts) or 0)) or None,
            tensor=ranks.tensor,
            stages=ranks.stages,
            context=ranks.context,
            interleave=ranks.interleave,
            held_back=held_back(kv_cache_config, lookahead),
            draft_from=counts.num_layers,
        )
        shared = None
        if (own := settings.shared_naming(vllm_config, kv_cache_config, config, named, None)) is not None:
            shared = own, hit_requirements(vllm_config, kv_cache_config)
        sent = SentCache(cache, meaning, shared)
    return build_worker_half(config, RankTraits(rank, ranks.size, reserved_bytes, sent, kept))


def still_taken_bytes(vllm_config: VllmConfig, device: torch.device) -> int:
    """Bytes of a device that vLLM may still allocate by its setting, for activations and graphs; 0 on a CPU.

    vLLM makes the worker's connector after it has measured the device and sized the cache, and leaves no
    share for it: slots lie outside of ``gpu_memory_utilization``. If the cache's size was configured in
    bytes, the setting does not bound the rest, and the caches may already exceed it.
    """
    if device.type != "cuda":
        return 0
    _, total_bytes = torch.cuda.mem_get_info(device)
    share_bytes: int = math.ceil(total_bytes * vllm_config.cache_config.gpu_memory_utilization)
    return max(0, share_bytes - int(torch.cuda.memory_reserved(device)))


def _same_rows(workers: Mapping[int, AddressMetadata]) -> dict[int, int]:
    """Row bytes by cache group, equal on all ranks. Raises ``ConfigError`` if they differ."""
    rows = {rank: meta.row_bytes for rank, meta in sorted(workers.items())}
    first = next(iter(rows.values()), {})
    if not first or any(other != first for other in rows.values()):
        shown = (f"rank {rank}: {', '.join(map(str, own.values()))} bytes" for rank, own in rows.items())
        raise ConfigError(
            f"offload needs equal rows on all ranks; by cache group they are {'; '.join(shown)}"
        )
    return dict(first)

"""The only file of the node that makes a connector: configuration in, two halves out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvconnect.config import OffloadConfig, TransferConfig, parse_kv_transfer_config
from kvconnect.node import hashes
from kvconnect.node.cache import NodeCache, parse_cache_dtype
from kvconnect.node.hooks import SchedulerHooks, WorkerHooks
from kvconnect.node.keeping import KeeperHooks, align_tokens
from kvconnect.node.models.base import Model
from kvconnect.node.options import NodeOptions
from kvconnect.node.request import Request
from kvconnect.orders import Orders, RequestView
from kvconnect.scheduler.prompts import digest_prompt

if TYPE_CHECKING:
    from kvconnect.offload.scheduler.half import OffloadScheduler
    from kvconnect.offload.worker.half import OffloadWorker
    from kvconnect.scheduler.connector import SchedulerConnector
    from kvconnect.worker.connector import WorkerConnector

_TRIES = 5


@dataclass(frozen=True)
class Connector:
    """Both halves, and what becomes of a request whose load failed.

    The last three are there where blocks are kept in other memory: see ``Keeping`` and ``Engine``.
    ``offload_state`` has what is under way, all zero when idle, as ``busy``, and what is kept as ``usage``.
    """

    scheduler: SchedulerHooks
    worker: WorkerHooks
    recompute_failed_loads: bool = True
    keeper: KeeperHooks | None = None
    before_step: Callable[[Orders], None] | None = None
    offload_state: Callable[[], Mapping[str, Any]] | None = None


def fingerprint(options: NodeOptions, model: Model, *, convert_dtype: bool = False) -> str:
    """What two nodes must have in common for one to continue with the other's cache.

    With ``convert_dtype`` the cache's type is not part of it, but that the other one says so too.
    """
    dtype = str(parse_cache_dtype(options.kv_cache_dtype)).removeprefix("torch.")
    kept = "convert_dtype=true" if convert_dtype else f"dtype={dtype}"
    return f"{model.name}:{model.describe()}:{kept}"


def weights_of(options: NodeOptions) -> str:
    """The name of a node's weights, which are random."""
    return f"seed={options.seed}"


def configured_connector(options: NodeOptions, model: Model, cache: NodeCache) -> Connector:
    """Both halves as ``kv_transfer_config`` says, with the cache registered.

    Raises:
        ConfigError: it is not valid, or says what cannot be done with this cache.
        EngineError: the engine is not usable on this machine.
    """
    assert options.kv_transfer_config is not None
    config = parse_kv_transfer_config(options.kv_transfer_config)
    recomputes = config.kv_load_failure_policy == "recompute"
    transfer = None if config.extra.engine == "none" else _transfer_halves(config, options, model, cache)
    if config.extra.offload is None:
        assert transfer is not None, "the configuration was checked"
        transfer[1].register_kv_caches(cache.tensors)
        return Connector(*transfer, recomputes)
    return _with_offload(config.extra.offload, transfer, options, model, cache, recomputes)


def _transfer_halves(
    config: TransferConfig, options: NodeOptions, model: Model, cache: NodeCache
) -> tuple[SchedulerConnector, WorkerConnector]:
    """What hands KV over and fetches it."""
    from kvconnect.scheduler.early import LongestRequest
    from kvconnect.scheduler.factory import configured_scheduler
    from kvconnect.worker.connector import WorkerConnector

    worker = WorkerConnector(
        config,
        cache.config,
        cache.kernel_block_sizes,
        model=fingerprint(options, model, convert_dtype=config.extra.convert_dtype),
        weights=weights_of(options),
    )
    scheduler = configured_scheduler(
        config,
        cache.config,
        cache.kernel_block_sizes,
        directory=(worker.address(),),
        environ=os.environ,
        clock=time.time,
        prompt_digest=_prompt_digest,
        longest=LongestRequest(options.max_model_len, options.max_num_batched_tokens),
    )
    return scheduler, worker


def _with_offload(
    config: OffloadConfig,
    transfer: tuple[SchedulerConnector, WorkerConnector] | None,
    options: NodeOptions,
    model: Model,
    cache: NodeCache,
    recomputes: bool,
) -> Connector:
    """The same, or nothing, and what keeps blocks in other memory."""
    from kvconnect.offload.halves import SchedulerHalf, WorkerHalf
    from kvconnect.offload.scheduler.half import OffloadScheduler
    from kvconnect.offload.worker.half import OffloadWorker

    keeping = OffloadWorker(
        config,
        cache.config,
        cache.kernel_block_sizes,
        facts={"model": fingerprint(options, model), "hashes": hashes.SCHEME},
        weights=weights_of(options),
    )
    worker = WorkerHalf(transfer[1] if transfer else None, keeping)
    try:
        worker.register_kv_caches(cache.tensors)
        deciding = OffloadScheduler(
            config,
            cache.config.groups,
            hashes=_content_hashes,
            align_tokens=align_tokens(cache.config),
            row_bytes=keeping.row_bytes,
            lower_tiers=keeping.lower_tiers,
            clock=time.monotonic,
        )
    except BaseException:
        # A folder on disk would stay locked, and memory taken.
        worker.close()
        raise
    half = SchedulerHalf(transfer[0] if transfer else None, deciding)
    return Connector(half, worker, recomputes, half, worker.before_step, _state_of(deciding, keeping))


def _prompt_digest(request: RequestView, num_tokens: int) -> bytes:
    assert isinstance(request, Request)
    return digest_prompt(request.token_ids[:num_tokens])


def _content_hashes(request: RequestView, block_tokens: int) -> Sequence[bytes]:
    assert isinstance(request, Request)
    assert request.blocks is not None
    return request.blocks.content_hashes(request.token_ids, block_tokens)


def _state_of(deciding: OffloadScheduler, keeping: OffloadWorker) -> Callable[[], Mapping[str, Any]]:
    def state() -> Mapping[str, Any]:
        usage = {**deciding.usage(), **keeping.usage()}
        return {"busy": {**deciding.state(), **keeping.state(), **_behind(usage)}, "usage": usage}

    def try_again() -> Mapping[str, Any]:
        # The engine's thread goes on meanwhile, and what is counted may grow under the one that counts.
        for _ in range(_TRIES):
            with contextlib.suppress(RuntimeError):
                return state()
        return {"busy": {"counting": 1}, "usage": {}}

    return try_again


def _behind(usage: Mapping[str, Any]) -> dict[str, int]:
    """Tiers that still look for what they have from before, and records that the scheduler half misses."""
    recovering = untold = 0
    for name, tier in usage["tiers"].items():
        recovering += bool(tier.get("recovering"))
        if "records" in tier:
            untold += abs(tier["records"] - sum(usage["lower"].get(name, {}).values()))
    return {"recovering": recovering, "untold": untold}

"""``KVConnectLinker``, the class that SGLang's unified cache loads: its pages in our tiers.

One object per rank, which SGLang's scheduler calls. What lower tiers have is read before SGLang admits the
request (``hold_back``), so that a tier's failure is a miss: SGLang ends requests whose load fails.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from kvconnect.errors import ConfigError
from kvconnect.halves.multiprocess_metrics import MultiprocessMetrics
from kvconnect.halves.rank_traits import KeptCache, RankTraits
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.sglang.environment import read_offload_settings
from kvconnect.sglang.page_tiers import PageTiers
from kvconnect.sglang.rank_pools import RankShape, read_pools
from kvconnect.sglang.served_model import read_identity

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_MOST_HELD = 64
"""So many requests, from the first of the queue on, are looked up at a time: what they find is pinned."""
_linkers: WeakSet[KVConnectLinker] = WeakSet()


class KVConnectLinker(PageTiers, UnifiedCacheLinker):
    """One rank's pages. Raises ``ConfigError`` or ``LayoutError``, which end the server.

    It is what a forward pass waits with, too: for all layers at once, since a copy is complete or not.
    """

    consumer_index = -1

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        config = read_offload_settings(server_args, os.environ)
        _refuse_pool(pool, components)
        if extra_config:
            text = f"linker_extra_config is {extra_config}; accepted: none, as KVCONNECT_CONFIG has all"
            raise ConfigError(text)
        self.forward_stream, self.pools = forward_stream, {PoolName.KV: pool}
        self.layer_done_counter, self._looked_up = self, set[str]()
        self._group = params.attn_tp_cache_group or params.tp_cache_group
        self._has_peers = self._group is not None and torch.distributed.get_world_size(self._group) > 1
        parallel, is_latent = get_parallel(), isinstance(pool, MLATokenToKVPool)
        tensor, rank = parallel.attn_tp_size, parallel.attn_tp_rank
        model, page_tokens = ModelConfig.from_server_args(server_args), int(params.page_size)
        device = (pool.kv_buffer if is_latent else pool.k_buffer)[0].device
        heads = None if is_latent else int(model.get_total_num_kv_heads())
        shape = RankShape(heads, rank, tensor, int(model.num_hidden_layers), pool.dtype, str(device))
        args = _arguments(pool, page_tokens)
        cache = read_pools(args, shape).cache
        kept = KeptCache(
            cache,
            read_identity(model, server_args, args, pool.dtype, tensor, convert_dtype=False),
            HitRequirements.of(cache.config.groups, (0,), page_tokens),
            label=str(server_args.served_model_name or server_args.model_path),
        )
        engine = (parallel.dp_rank or 0) * parallel.attn_dp_size + parallel.attn_dp_rank
        number = engine * tensor + rank
        self._side = None if device.type == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        super().__init__(config, RankTraits(number, tensor, kept=kept), page_tokens)
        if getattr(server_args, "enable_metrics", False):
            MultiprocessMetrics(self.worker.changes, number)
        _linkers.add(self)
        _add_hooks()

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        self.await_load(self.consumer_index)

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return [*range(1, 1 + self.find(rid, _names(transfers)))]

    def load(self, rid: str, transfers: list[Any]) -> bool:
        (is_there,) = self._of_all([self.has(rid, _names(transfers))], torch.distributed.ReduceOp.MIN)
        if is_there:
            self.queue(rid, self._page_ids(transfers))
        return bool(is_there)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Always true: all ranks have the same offloads, also those for which one has no room."""
        with self._after_forward():
            self.store(_names(transfers), self._page_ids(transfers))
        return True

    def start_layer_wise_loading(self) -> int:
        # A forward that was launched may still write to pages that SGLang has freed and given out anew.
        with self._after_forward():
            return super().start_layer_wise_loading()

    @contextmanager
    def _after_forward(self) -> Iterator[None]:
        """After all that forwards write, on a stream of its own: the scheduler's goes on meanwhile."""
        if self._side is None:
            yield
            return
        for event in self.record_offload_ready():
            self._side.wait_event(event)
        with torch.cuda.stream(self._side):
            yield

    def held(self, queue: Sequence[Any], tree_cache: Any) -> set[str]:
        """The ids of waiting requests for which lower tiers are read, on any rank."""
        every = [req.rid for req in queue]
        self._looked_up.intersection_update(every)
        self.forget_others({*every})
        # Of requests that found all of it on the device when they were admitted SGLang forgets none.
        markers = tree_cache.linker.hit_markers
        for rid in markers.keys() - {*every}:
            del markers[rid]
        for req in queue[:_MOST_HELD]:
            if req.rid not in self._looked_up:
                self._looked_up.add(req.rid)
                # SGLang's own lookup, on the device and then here.
                req.init_next_round_input(tree_cache, cow_mamba=False)
        flags = self._of_all([self.is_waiting(rid) for rid in every], torch.distributed.ReduceOp.MAX)
        return {rid for rid, is_waiting in zip(every, flags, strict=True) if is_waiting}

    def _of_all(self, flags: Sequence[bool], op: Any) -> Sequence[bool]:
        """The flags as all ranks have them: each schedules alike. A collective call."""
        if not self._has_peers or not flags:
            return flags
        tensor = torch.tensor(flags, dtype=torch.int32)
        torch.distributed.all_reduce(tensor, op=op, group=self._group)
        return [bool(flag) for flag in tensor.tolist()]

    def _page_ids(self, transfers: list[Any]) -> list[int]:
        first_slots = transfers[0].device_indices[:: self._page_tokens]
        return [slot // self._page_tokens for slot in first_slots.tolist()]


def hold_back(original: Any, scheduler: Any, *given: Any, **more: Any) -> Any:
    """Around SGLang's choice of requests to prefill: those for which lower tiers are read wait for that."""
    linker, queue = _linker_of(scheduler), scheduler.waiting_queue
    held = () if linker is None else linker.held(queue, scheduler.tree_cache)
    if not held:
        return original(scheduler, *given, **more)
    scheduler.waiting_queue = [req for req in queue if req.rid not in held]
    try:
        return original(scheduler, *given, **more)
    finally:
        place = {req.rid: at for at, req in enumerate(queue)}
        left = [*(req for req in queue if req.rid in held), *scheduler.waiting_queue]
        scheduler.waiting_queue = sorted(left, key=lambda req: place.get(req.rid, len(place)))


def free_offloaded(scheduler: Any, *given: Any, **more: Any) -> None:
    """Before each step of a decode server, where SGLang does not ask which offloads have ended."""
    if _linker_of(scheduler) is not None:
        scheduler.tree_cache.check_hicache_events()


def weights_replaced(result: Any, *given: Any, **more: Any) -> None:
    """After SGLang, or a peer that writes to this process, has replaced weights."""
    for linker in _linkers:
        linker.replace_weights()


def settle(*given: Any, **more: Any) -> None:
    """Before SGLang gives the memory of pages back: no page is read or written any more."""
    for linker in _linkers:
        linker.settle()


@functools.cache
def _add_hooks() -> None:
    """Here, where SGLang's scheduler is imported already; the plugin imports nothing slow."""
    HookRegistry.register(f"{_SCHEDULER}.get_new_batch_prefill", hold_back, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.process_decode_queue", free_offloaded, HookType.BEFORE)
    for update in ("flush_cache_after_weight_update", "end_weight_update"):
        HookRegistry.register(f"{_WEIGHTS}.{update}", weights_replaced, HookType.AFTER)
    HookRegistry.register(f"{_WEIGHTS}.release_memory_occupation", settle, HookType.BEFORE)
    HookRegistry.apply_hooks()


def _linker_of(scheduler: Any) -> KVConnectLinker | None:
    linker = getattr(getattr(scheduler.tree_cache, "linker", None), "cache_linker", None)
    return linker if isinstance(linker, KVConnectLinker) else None


def _names(transfers: list[Any]) -> list[bytes]:
    return [bytes.fromhex(key) for key in transfers[0].keys]


def _arguments(pool: Any, page_tokens: int) -> Any:
    """A pool as SGLang describes it for transfers: see ``read_pools``."""
    addresses, lengths, items = pool.get_contiguous_buf_infos()
    return SimpleNamespace(
        page_size=page_tokens,
        kv_data_ptrs=addresses,
        kv_data_lens=lengths,
        kv_item_lens=items,
        prefill_start_layer=pool.start_layer,
        state_types=(),
        aux_item_lens=(),
    )


def _refuse_pool(pool: Any, components: Any) -> None:
    """Raise ``ConfigError``: the pools are none that are kept."""
    others = sorted(component.name for component in components if component.name != "FULL")
    is_plain = type(pool) in (MHATokenToKVPool, MLATokenToKVPool)
    if others or not is_plain or getattr(pool, "is_quantized_kv_cache", False):
        kind = f"{type(pool).__name__}{''.join(f' with {other}' for other in others)}"
        raise ConfigError(
            f"the model's KV lies in a {kind}, which kvconnect's linker does not keep; accepted: "
            "MHATokenToKVPool and MLATokenToKVPool, of models whose layers all see all tokens, without scales"
        )

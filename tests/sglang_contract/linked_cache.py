"""SGLang's unified cache on its own pools, with the linker, driven as SGLang's scheduler drives both."""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from kvconnect.sglang.linker import KVConnectLinker, hold_back

PAGE, PAGES, LAYERS, HEADS, WIDTH = 4, 32, 3, 2, 8
MODULE = "kvconnect.sglang.linker"
LINKED = {"linker": "KVConnectLinker", "linker_module_path": MODULE}
PATIENCE_S = 20.0


class Request:
    """What a linker and the cache touch of SGLang's request."""

    numbers = itertools.count()

    def __init__(self, tokens: Sequence[int], salt: str | None = None) -> None:
        self.rid, self.tokens, self.salt = f"r{next(self.numbers)}", list(tokens), salt
        self.swa_branching_seqlen = self.session = None
        self.result: Any = None

    def key(self, limit: int | None = None) -> RadixKey:
        return RadixKey(array("q", self.tokens), limit=limit, cache_salt=self.salt)

    def init_next_round_input(self, tree_cache: UnifiedRadixCache, cow_mamba: bool | None = None) -> None:
        # The last token is always computed.
        key = self.key(len(self.tokens) - 1)
        self.result = tree_cache.match_prefix(MatchPrefixParams(key=key, req=self))
        self.last_node = self.result.last_device_node


class LinkedCache:
    """One rank. ``offload`` are the settings; pages have 4 tokens, of which the pool has 128."""

    def __init__(
        self,
        model: Path,
        monkeypatch: Any,
        *,
        latent: bool = False,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        group: Any = None,
        **offload: Any,
    ) -> None:
        settings = {"offload": {"cpu_bytes": 1 << 20, **offload}}
        monkeypatch.setenv("KVCONNECT_CONFIG", json.dumps(settings))
        args = ServerArgs(
            model_path=str(model),
            device="cpu",
            dtype="float32",
            page_size=PAGE,
            skip_tokenizer_init=True,
            tp_size=1 if group is None else group.size(),
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config=LINKED,
        )
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank))
        size = PAGE * PAGES
        if latent:
            self.pool = MLATokenToKVPool(size, PAGE, dtype, 16, 8, LAYERS, "cpu", False)
        else:
            shape = {
                "head_num": HEADS // args.tp_size,
                "head_dim": WIDTH,
                "layer_num": LAYERS,
                "device": "cpu",
            }
            more = {"enable_memory_saver": False, "enable_alt_stream": False}
            self.pool = MHATokenToKVPool(size=size, page_size=PAGE, dtype=dtype, **shape, **more)
        self.allocator = PagedTokenToKVPoolAllocator(size, PAGE, dtype, "cpu", self.pool, False)
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, size, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tp_cache_group=group,
            attn_tp_cache_group=group,
        )
        self.cache = UnifiedRadixCache(self.params)
        self.linker = KVConnectLinker(args, self.params, components=set(self.cache.components))
        self.cache.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.waiting: list[Request] = []

    # One loop of SGLang's scheduler

    def run(self, *requests: Request) -> list[Request]:
        """Admit what waits and may, load, and compute the rest; the requests that were run."""
        self.waiting += requests
        self.cache.check_hicache_events()
        scheduler = SimpleNamespace(waiting_queue=self.waiting, tree_cache=self.cache)
        admitted: list[Request] = hold_back(_admit_all, scheduler)
        self.waiting = scheduler.waiting_queue
        for request in admitted:
            request.init_next_round_input(self.cache)
            request.loaded, request.slots = 0, None
            if hit := request.result.host_hit_length:
                given = InitLoadBackParams(request.result.best_match_node, hit, req=request)
                request.loaded, request.last_node = self.cache.init_load_back(given)
                request.slots = self.cache.linker.private_load_indices.get(request.rid)
        consumer = self.cache.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(consumer)
        for layer in range(LAYERS):
            self.linker.layer_done_counter.wait_until(layer)
        for request in admitted:
            self._compute(request)
        assert self.cache.finish_external_linker_loads(admitted) == []
        for request in admitted:
            key, there = request.key(len(request.slots)), request.result.device_prefix_len
            self.cache.insert(InsertParams(key=key, value=request.slots, prev_prefix_len=there))
        return admitted

    def served(self, tokens: Sequence[int], salt: str | None = None) -> Request:
        """Run one request, however often it has to wait."""
        request, until = Request(tokens, salt), time.monotonic() + PATIENCE_S
        done = self.run(request)
        while request not in done:
            assert time.monotonic() < until, "the request waits for ever"
            done = self.run()
        return request

    def _compute(self, request: Request) -> None:
        """The whole pages of a request; those that were there must have what is computed."""
        cached = request.result.device_prefix_len
        device = self.cache.tree_core.collect_full_device_indices(
            request.last_node, self.cache.root_node_handle()
        )[:cached]
        there = device if request.slots is None else torch.cat([device, request.slots])
        whole = len(request.tokens) // PAGE * PAGE
        missing = whole - len(there)
        if missing > self.allocator.available_size():
            if self.linker._group is None:
                # SGLang would admit the request later.
                self.until(lambda: not self.cache.linker.pending_offloads)
            lock = self.cache.inc_lock_ref(request.last_node).to_dec_params()
            self.cache.evict(EvictParams(num_tokens=missing))
            self.cache.dec_lock_ref(request.last_node, lock)
        new = self.allocator.alloc(missing) if missing else torch.empty(0, dtype=torch.int64)
        request.slots = torch.cat([there, new]).to(torch.int64)
        for number, buffer in enumerate(self.buffers):
            values = _values(request.tokens[:whole], request.salt, number).to(buffer.dtype)
            found = buffer.flatten(1)[there]
            assert torch.equal(found, values[: len(there), None].expand_as(found)), "other KV was restored"
            buffer[new] = values[len(there) :].view(-1, *[1] * (buffer.dim() - 1))

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        pool = self.pool
        return pool.kv_buffer if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]

    # Around it

    def until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until, f"not so in time: {self.linker.scheduler.state()}"
            self.cache.check_hicache_events()
            time.sleep(0.002)

    def settle(self) -> None:
        """Wait until all that is kept was copied and written, and all that is on disk was found."""
        tiers = self.linker
        jobs, ours = tiers.scheduler.offload.host.jobs, tiers.worker.offload._jobs
        self.until(
            lambda: (
                not (self.cache.linker.pending_offloads or len(jobs) or ours.is_recovering or ours._changes)
            )
        )

    def leave_device(self) -> None:
        """Evict all from the device, which gives all its pages back."""
        self.settle()
        self.cache.evict(EvictParams(num_tokens=PAGE * PAGES))
        assert self.allocator.available_size() == PAGE * PAGES, "a page is held"
        for buffer in self.buffers:
            buffer.fill_(0.5)


def _admit_all(scheduler: Any) -> list[Request]:
    admitted, scheduler.waiting_queue = list(scheduler.waiting_queue), []
    return admitted


def _values(tokens: Sequence[int], salt: str | None, layer: int) -> torch.Tensor:
    """A number of each token that depends on all before it."""
    made, state = [], float(len(salt or "")) + layer
    for token in tokens:
        state = (state * 31 + token + 1) % 251
        made.append(state)
    return torch.tensor(made)

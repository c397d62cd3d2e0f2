"""A connector that writes down the bytes it holds and loads, for a test to compare.

Loaded by vLLM servers under test as ``kv_connector_module_path``. It shares no code with what plans and
moves: pages are taken from the tensors that vLLM registered, by vLLM's own block ids, and hashed head by
head. Pages of recurrent states are written down as they are: what of them is whose is the test's to say.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvconnect.plan.blocks import GroupBlocks
from kvconnect.vllm.connector import KVConnect as Observed
from kvconnect.vllm.connector import OrdersMetadata

# Ranks of vLLM spin while they wait for each other's messages. Where there are more ranks than cores, those
# that spin keep the others from running, with and without a connector.
shm_broadcast.sched_yield = lambda: time.sleep(50e-6)
_gather = GPUModelRunner.sync_and_gather_intermediate_tensors


def _gather_into_what_there_is(self: Any, *given: Any, **more: Any) -> Any:
    if self.intermediate_tensors is None:
        # A forward that warms up makes them. vLLM's CPU build has none where nothing is compiled, and dies.
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return _gather(self, *given, **more)


GPUModelRunner.sync_and_gather_intermediate_tensors = _gather_into_what_there_is


class KVConnect(Observed):
    """Appends a JSON line per request that was held, loaded or not loaded, rank by rank.

    Their kinds are ``hold``, ``load`` and ``failed``. Of a load that failed it has the pages as they lay when
    vLLM was told.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._observed = dict(kv_caches)
        self._ordered: dict[str, tuple[GroupBlocks, ...]] = {}
        rank = self.get_handshake_metadata().rank
        folder = Path(os.environ["KVCONNECT_TEST_OBSERVATIONS"])
        self._lines = folder / f"rank{rank}.jsonl"

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OrdersMetadata)
        for hold in metadata.orders.holds:
            self._write("hold", hold.handle, hold.groups)
        for load in metadata.orders.loads:
            self._ordered[load.request_id] = (load.handle, load.groups)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            if request_id not in self._ordered:
                # Restored from what this server kept itself.
                continue
            handle, groups = self._ordered.pop(request_id)
            failed = request_id in results.failed_recving
            self._write("failed" if failed else "load", handle, groups)
        return results

    def _write(self, kind: str, handle: str, groups: tuple[GroupBlocks, ...]) -> None:
        pages: dict[str, dict[int, list[str]]] = {}
        ids: dict[int, list[int]] = {}
        states: dict[str, str] = {}
        for blocks in groups:
            group = self._cache.kv_cache_groups[blocks.group]
            ids[blocks.group] = list(blocks.block_ids)
            for name in group.layer_names:
                if name not in self._observed:
                    continue
                tensor = self._observed[name]
                ratio = tensor.shape[0] // self._cache.num_blocks
                pages[name] = {
                    blocks.first_block + index: [
                        _digest(tensor[block * ratio : (block + 1) * ratio, head])
                        for head in range(tensor.shape[1])
                    ]
                    for index, block in enumerate(blocks.block_ids)
                    if block
                }
                if tensor.shape[1:3] == (1, 1):
                    states[name] = bytes(
                        tensor[blocks.block_ids[-1]].view(torch.uint8).flatten().tolist()
                    ).hex()
        record = {"kind": kind, "handle": handle, "rank": self._own.rank, "pages": pages, "ids": ids}
        record["states"] = states
        record["tensor_rank"] = self._own.rank % self._vllm.parallel_config.tensor_parallel_size
        with self._lines.open("a") as out:
            out.write(json.dumps(record) + "\n")


def _digest(rows: torch.Tensor) -> str:
    return hashlib.blake2b(rows.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()

"""What an operator can say about a node."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION_BACKENDS = ("sdpa", "flex")


@dataclass(frozen=True)
class NodeOptions:
    """What an operator can say about a node. ``block_size`` None is the model's own.

    ``reserved_blocks`` pins the first block ids, so that two nodes' ids differ.
    ``enable_prefix_caching`` False computes every prompt anew. ``kv_cache_dtype`` is auto, bf16 or
    fp8_e4m3. ``kernel_block_sizes`` are the only sizes in tokens that the attention kernels may take;
    empty: all that they can. ``enable_graphs`` None captures decode steps in CUDA graphs where the
    device and every backend allow it; True demands it. ``attention_backend`` is sdpa or flex.
    """

    model: str = "gqa"
    seed: int = 0
    device: str = "cpu"
    num_blocks: int = 1024
    block_size: int | None = None
    max_model_len: int = 4096
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    reserved_blocks: int = 0
    kv_transfer_config: str | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kernel_block_sizes: tuple[int, ...] = ()
    enable_graphs: bool | None = None
    attention_backend: str = "sdpa"

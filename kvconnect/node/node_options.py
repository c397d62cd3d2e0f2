"""The options of ``kvconnect serve``, with their help texts and bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from kvconnect.errors import ConfigError


@dataclass(frozen=True)
class NodeOptions:
    """A node's options. Raises ``ConfigError`` for a value out of range."""

    model: Annotated[str, "gqa, mla, mixed, sliding or hybrid."] = "gqa"
    seed: Annotated[int, "Seed of the model's weights; a pair needs the same one."] = 0
    device: Annotated[str, "cpu, or cuda:N."] = "cpu"
    num_blocks: Annotated[int, "Logical blocks of KV cache, the null block included."] = 512
    block_size: Annotated[int | None, "Tokens per logical block; left out, the model's own."] = None
    max_model_len: Annotated[int, "Longest sequence, in tokens."] = 4096
    max_num_seqs: Annotated[int, "Requests that run at once."] = 16
    max_num_batched_tokens: Annotated[int, "Tokens computed in one step."] = 1024
    reserved_blocks: Annotated[
        int, "Blocks never used, so that two nodes use different block ids (for tests)."
    ] = 0
    kv_transfer_config: Annotated[
        str | None,
        "What makes this node transfer KV caches, or keep them in host memory and on disk: a JSON object, "
        "spelled as vLLM does. Left out, the node serves alone and keeps nothing.",
    ] = None
    enable_prefix_caching: Annotated[
        bool, "Take the beginning of a prompt from blocks that hold it already."
    ] = True
    kv_cache_dtype: Annotated[str, "What the cache keeps: auto (the model's own), bf16 or fp8_e4m3."] = "auto"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device is {self.device!r}; accepted: cpu, cuda, cuda:N")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")

"""How a node is set up, as an operator gives it."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.errors import ConfigError


@dataclass(frozen=True)
class NodeOptions:
    """How a node is set up. ``block_size`` None is the model's own.

    ``max_num_batched_tokens`` bounds one step, ``max_num_seqs`` the requests that run at once.
    ``reserved_blocks`` pins the first block ids, so that two nodes' ids differ.
    ``enable_prefix_caching`` False computes every prompt anew. ``kv_cache_dtype`` is auto, bf16 or
    fp8_e4m3.

    Raises:
        ConfigError: a value is out of range.
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
    kv_events_config: str | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")

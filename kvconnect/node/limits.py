"""The sizes that bound a node's work, and the requests that can never fit them."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.errors import ConfigError
from kvconnect.node.block_manager import BlockManager


@dataclass(frozen=True)
class SchedulerLimits:
    """``max_num_batched_tokens`` bounds one step, ``max_num_seqs`` the requests that run at once."""

    max_model_len: int = 4096
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")


def refusal(
    limits: SchedulerLimits, manager: BlockManager, num_prompt_tokens: int, max_tokens: int
) -> str | None:
    """Why a request of this size can never run, or None. Reads constants only: safe in any thread."""
    wanted = num_prompt_tokens + max_tokens
    request = f"prompt of {num_prompt_tokens} tokens plus max_tokens {max_tokens}"
    if wanted > limits.max_model_len:
        return f"{request} is {wanted} tokens, max_model_len is {limits.max_model_len}"
    # The last generated token is returned but never computed.
    needed = manager.most_blocks(wanted - 1)
    if needed > manager.pool.total:
        return f"{request} needs {needed} cache blocks, the node has {manager.pool.total}"
    return None

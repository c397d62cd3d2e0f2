"""The sizes that bound a node's work, and the requests that can never fit them."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.cache.specs import KVCacheGroup
from kvconnect.errors import ConfigError


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


@dataclass(frozen=True)
class Footprint:
    """How many blocks a sequence can hold, over all groups. ``max_step_tokens`` are computed in a step."""

    groups: tuple[KVCacheGroup, ...]
    max_step_tokens: int

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that computing ``num_tokens`` positions can hold at once."""
        return sum(group.most_blocks(num_tokens, self.max_step_tokens) for group in self.groups)


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for. ``total_blocks`` are all that the node has."""

    max_model_len: int
    total_blocks: int
    footprint: Footprint

    def refusal(self, num_prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request of this size can never run, or None."""
        wanted = num_prompt_tokens + max_tokens
        request = f"prompt of {num_prompt_tokens} tokens plus max_tokens {max_tokens}"
        if wanted > self.max_model_len:
            return f"{request} is {wanted} tokens, max_model_len is {self.max_model_len}"
        # The last generated token is returned but never computed.
        needed = self.footprint.most_blocks(wanted - 1)
        if needed > self.total_blocks:
            return f"{request} needs {needed} cache blocks, the node has {self.total_blocks}"
        return None

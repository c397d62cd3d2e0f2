"""The options of a run, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.node.options import ModelOptions
from benchmarks.options import option
from kvconnect.cache.specs import div_ceil

BLOCK_TOKENS = 16
_SUITED_TOKENS = {"cuda": 16384, "cpu": 2048}
# The pool has room for this many prompts: of more, the first is overwritten before it comes back.
POOL_PROMPTS = 2


@dataclass(frozen=True)
class Options(ModelOptions):
    """A run. An empty ``model`` and 0 tokens stand for what suits the device."""

    prompt_tokens: int = option(
        0, "Tokens of a prompt; default: 16384, on a CPU 2048.", least=2 * BLOCK_TOKENS
    )
    prompts: int = option(5, "Prompts that come back, one after the other.", least=POOL_PROMPTS + 1)
    batched_tokens: int = option(8192, "Tokens that a step computes.", least=1)
    disk_path: Path | None = option(  # noqa: RUF009
        None, "A folder on the disk to measure; left out, a new temporary one."
    )
    timeout_s: float = option(300.0, "Seconds that one prompt may take.", above=0)

    @property
    def used_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.prompt_tokens or _SUITED_TOKENS[self.device]

    @property
    def prompt_blocks(self) -> int:
        """Blocks of a prompt and its first token."""
        return div_ceil(self.used_tokens + 1, BLOCK_TOKENS)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool: the null block too, and a little more than it needs."""
        return 1 + POOL_PROMPTS * self.prompt_blocks + self.prompt_blocks // 2

    @property
    def kept_bytes(self) -> int:
        """Memory, and disk, for all prompts that come back, and for the one that warms up."""
        return (self.prompts + 2) * self.prompt_blocks * BLOCK_TOKENS * self.size.token_bytes

"""The options of a run, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.node.model import MODEL_SIZES, ModelSize
from kvconnect.arithmetic import div_ceil
from kvconnect.errors import ConfigError

BLOCK_TOKENS = 16
_SUITED = {"cuda": "8b", "cpu": "tiny"}
_SUITED_TOKENS = {"cuda": 16384, "cpu": 2048}
# The pool has room for this many prompts: of more, the first is overwritten before it comes back.
POOL_PROMPTS = 2
LEAST_PROMPTS = 3


@dataclass(frozen=True)
class Options:
    """A run. An empty ``model`` and 0 tokens stand for what suits the device, no ``disk_path`` for a new one.

    ``prompts`` come back, one after the other, each of ``prompt_tokens`` tokens. ``batched_tokens`` are
    computed in a step.

    Raises:
        ConfigError: an option is not usable; the text names it, its value and what is accepted.
    """

    device: str = "cpu"
    model: str = ""
    prompt_tokens: int = 0
    prompts: int = 5
    batched_tokens: int = 8192
    disk_path: Path | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.device not in _SUITED:
            raise ConfigError(f"device is {self.device!r}; accepted: {', '.join(_SUITED)}")
        if self.model and self.model not in MODEL_SIZES:
            raise ConfigError(f"model is {self.model!r}; accepted: {', '.join(MODEL_SIZES)}")
        for name, number, least in (
            ("prompt_tokens", self.used_tokens, 2 * BLOCK_TOKENS),
            ("prompts", self.prompts, LEAST_PROMPTS),
            ("batched_tokens", self.batched_tokens, 1),
        ):
            if number < least:
                raise ConfigError(f"{name} is {number}, it must be at least {least}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}, it must be more than 0 seconds")

    @property
    def used_model(self) -> str:
        """The name of the model."""
        return self.model or _SUITED[self.device]

    @property
    def used_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.prompt_tokens or _SUITED_TOKENS[self.device]

    @property
    def size(self) -> ModelSize:
        """The model's widths."""
        return MODEL_SIZES[self.used_model]

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

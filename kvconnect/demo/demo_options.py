"""What the demo runs: the options of ``kvconnect demo``, with their texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvconnect.errors import ConfigError


@dataclass(frozen=True)
class DemoOptions:
    """What runs. Raises ``ConfigError``: no prompt does."""

    engine: Annotated[
        list[str],
        "Engine to run, exit 2 if it cannot (several times for several); default: every one that works here.",
    ] = field(default_factory=list)
    model: Annotated[list[str], "Model to run (several times for several); default: all."] = field(
        default_factory=list
    )
    requests: Annotated[int, "Prompts per engine and model."] = 8
    device: Annotated[str, "Where the nodes compute: cpu, cuda, cuda:N."] = "cpu"
    kv_cache_dtype: Annotated[str, "What the nodes' caches keep: auto, bf16 or fp8_e4m3."] = "auto"

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"requests is {self.requests}, it must be at least 1")

"""The options of a run: what the command line says, checked before the first child is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.node.model import MODEL_SIZES, ModelSize
from benchmarks.options import (
    DEVICES,
    carrying_protocol,
    environment_option,
    extra_option,
    option,
    timeout_option,
)
from benchmarks.options import Options as BaseOptions
from benchmarks.transfer.cases import CacheShape, Layouts
from kvconnect.config import ExtraConfig, parse_kv_transfer_config
from kvconnect.packages import check_engine


@dataclass(frozen=True)
class Suited:
    """What suits a device where nobody says. ``context`` is of a request that decodes, ``prompt`` of one that
    is computed.
    """

    model: str
    batch: int
    context: int
    prompt: int
    request_mb: float
    gb_per_s: float


SUITED = {
    "cuda": Suited("8b", 32, 4096, 2048, 256.0, 25.0),
    "cpu": Suited("tiny", 4, 64, 64, 0.25, 0.01),
}


@dataclass(frozen=True)
class ModelOptions(BaseOptions):
    """A run with one of the models of serving size."""

    device: str = option("cpu", "cpu or cuda.", accepted=DEVICES)
    model: str = option(
        "", "8b or tiny, with random weights; default: 8b, on a CPU tiny.", accepted=tuple(MODEL_SIZES)
    )

    @property
    def suited(self) -> Suited:
        """What suits the device."""
        return SUITED[self.device]

    @property
    def used_model(self) -> str:
        """The name of the model."""
        return self.model or self.suited.model

    @property
    def size(self) -> ModelSize:
        """The model's widths."""
        return MODEL_SIZES[self.used_model]


@dataclass(frozen=True)
class Options(ModelOptions):
    """A run. An empty ``model`` and numbers of 0 stand for what suits the device.

    Raises:
        ConfigError: an option is not usable; the text names it, its value and what is accepted.
    """

    side: str = option(
        "decode",
        "Who computes: decode, which receives, or prefill, which computes prompts and sends.",
        accepted=("decode", "prefill"),
    )
    engine: str = option("nixl", "Engine of both workers.")
    protocol: str = option(
        "", "Its protocol; default: on a CPU UCX or tcp, else auto. Between CPUs auto is shared memory."
    )
    device: str = option(
        "cpu", "cpu, or cuda: one GPU for each side if there are two, else one for both.", accepted=DEVICES
    )
    batch: int = option(0, "Requests that decode; default: 32, on a CPU 4.", least=0)
    context: int = option(
        0, "Tokens of each, or of a prompt; default: 4096, prompts 2048, on a CPU 64.", least=0
    )
    request_mb: float = option(0.0, "MiB of KV of a received request; default: 256, on a CPU 0.25.", least=0)
    gb_per_s: float = option(
        0.0,
        "GB/s at which requests are ordered; default: 25, on a CPU 0.01.",
        flag="receive-gb-per-s",
        least=0,
    )
    in_flight: int = option(8, "Most requests under way at a time.", least=1)
    layouts: Layouts = option(  # noqa: RUF009
        Layouts.parse("nhd16:nhd16"),
        "PREFILL:DECODE, nhd or hnd with tokens per block.",
        parse=Layouts.parse,
    )
    rounds: int = option(3, "How often without and with alternate.", least=1)
    seconds: float = option(2.0, "Seconds of each.", above=0)
    timeout_s: float = timeout_option()
    extra: Mapping[str, Any] | None = extra_option()
    environment: tuple[str, ...] = environment_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_engine(self.engine)
        self.worker_config()

    @property
    def used_protocol(self) -> str:
        """The engine's protocol."""
        return self.protocol or carrying_protocol(self.engine, self.device)

    @property
    def used_batch(self) -> int:
        """Requests that compute; prompts take turns in the blocks of two."""
        return (self.batch or self.suited.batch) if self.side == "decode" else 2

    @property
    def used_context(self) -> int:
        """Tokens of each."""
        suited = self.suited
        return self.context or (suited.context if self.side == "decode" else suited.prompt)

    @property
    def bytes_per_s(self) -> float:
        """The rate at which requests are ordered."""
        return (self.gb_per_s or self.suited.gb_per_s) * 1e9

    @property
    def request_tokens(self) -> int:
        """Tokens of a received request: whole blocks of both sides, and at least one."""
        group = self.layouts.group_tokens
        asked = (self.request_mb or self.suited.request_mb) * 2**20 / self.size.token_bytes
        return max(1, round(asked / group)) * group

    @property
    def request_bytes(self) -> int:
        """Bytes of KV of a received request."""
        return self.request_tokens * self.size.token_bytes

    def request_blocks(self) -> tuple[int, int]:
        """Blocks of a received request, on the prefill and on the decode side."""
        layouts = self.layouts
        return (
            self.request_tokens // layouts.prefill.block_tokens,
            self.request_tokens // layouts.decode.block_tokens,
        )

    def shapes(self) -> tuple[CacheShape, CacheShape]:
        """The caches of both sides: the requests that are under way, and what the one side computes with."""
        made = []
        for side, layout, blocks in zip(
            ("prefill", "decode"),
            (self.layouts.prefill, self.layouts.decode),
            self.request_blocks(),
            strict=True,
        ):
            computed = self.used_batch * -(-self.used_context // layout.block_tokens)
            # One more for the null block.
            needed = 1 + self.in_flight * blocks + (computed if side == self.side else 0)
            made.append(self.size.shape(needed, layout))
        return made[0], made[1]

    def worker_config(self) -> ExtraConfig:
        """What these settings are.

        Raises:
            ConfigError: one of them is not accepted.
        """
        extra = {"engine": self.engine, "protocol": self.used_protocol, **(self.extra or {})}
        return parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": extra}).extra

"""The options of a run: what the command line says, checked before the first child is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.node.model import MODEL_SIZES, ModelSize
from benchmarks.transfer.cases import CacheShape, Layouts
from benchmarks.transfer.options import DEVICES, PATHS
from kvconnect.config import ExtraConfig, parse_kv_transfer_config
from kvconnect.engine_names import check_engine
from kvconnect.errors import ConfigError

SIDES = ("decode", "prefill")


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

_SAME = Layouts.parse("nhd:nhd")


@dataclass(frozen=True)
class Options:
    """A run. An empty ``model`` and numbers of 0 stand for what suits the device.

    ``side`` is the one that computes: ``decode`` receives while it decodes, ``prefill`` sends while it
    computes prompts. ``context`` are the tokens of each request that decodes, or of each prompt.
    A round is ``seconds`` without and ``seconds`` with requests of ``request_mb`` MiB that arrive at
    ``gb_per_s``. ``environment`` is set in the children only, a value of None takes the variable
    away. ``timeout_s`` bounds every step of a child.

    Raises:
        ConfigError: an option is not usable; the text names it, its value and what is accepted.
    """

    side: str = "decode"
    engine: str = "auto"
    path: str = "packed"
    device: str = "cpu"
    model: str = ""
    batch: int = 0
    context: int = 0
    request_mb: float = 0.0
    gb_per_s: float = 0.0
    in_flight: int = 8
    layouts: Layouts = _SAME
    rounds: int = 3
    seconds: float = 2.0
    timeout_s: float = 120.0
    extra: Mapping[str, Any] | None = None
    environment: Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        check_engine(self.engine)
        for name, value, accepted in (
            ("side", self.side, SIDES),
            ("path", self.path, PATHS),
            ("device", self.device, DEVICES),
            ("model", self.model or "8b", tuple(MODEL_SIZES)),
        ):
            if value not in accepted:
                raise ConfigError(f"{name} is {value!r}; accepted: {', '.join(accepted)}")
        for name, number in (
            ("batch", self.batch),
            ("context", self.context),
            ("request_mb", self.request_mb),
            ("receive_gb_per_s", self.gb_per_s),
        ):
            if number < 0:
                raise ConfigError(
                    f"{name} is {number}, it must be at least 0, which is what suits the device"
                )
        for name, number, least in (("in_flight", self.in_flight, 1), ("rounds", self.rounds, 1)):
            if number < least:
                raise ConfigError(f"{name} is {number}, it must be at least {least}")
        for name, seconds in (("seconds", self.seconds), ("timeout_s", self.timeout_s)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds}, it must be more than 0 seconds")
        self.worker_config()

    @property
    def _suited(self) -> Suited:
        return SUITED[self.device]

    @property
    def used_model(self) -> str:
        """The name of the model."""
        return self.model or self._suited.model

    @property
    def size(self) -> ModelSize:
        """The model's widths."""
        return MODEL_SIZES[self.used_model]

    @property
    def used_batch(self) -> int:
        """Requests that compute; prompts take turns in the blocks of two."""
        return (self.batch or self._suited.batch) if self.side == "decode" else 2

    @property
    def used_context(self) -> int:
        """Tokens of each."""
        suited = self._suited
        return self.context or (suited.context if self.side == "decode" else suited.prompt)

    @property
    def bytes_per_s(self) -> float:
        """The rate at which requests are ordered."""
        return (self.gb_per_s or self._suited.gb_per_s) * 1e9

    @property
    def request_tokens(self) -> int:
        """Tokens of a received request: whole blocks of both sides, and at least one."""
        group = self.layouts.group_tokens
        asked = (self.request_mb or self._suited.request_mb) * 2**20 / self.size.token_bytes
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

    def worker_extra(self) -> dict[str, Any]:
        """Settings of both workers."""
        return dict(self.extra or {})

    def worker_config(self) -> ExtraConfig:
        """What these settings are.

        Raises:
            ConfigError: one of them is not accepted.
        """
        extra = {"engine": self.engine, "path": self.path, **self.worker_extra()}
        return parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": extra}).extra

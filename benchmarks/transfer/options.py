"""The options of a run: what the command line says, checked before the first child is started."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import (
    DEVICES,
    carrying_protocol,
    environment_option,
    extra_option,
    option,
    timeout_option,
)
from benchmarks.options import Options as BaseOptions
from benchmarks.transfer.cases import VALUE_BYTES, CacheShape, Layouts, PairCase
from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.packages import check_engine


@dataclass(frozen=True)
class Options(BaseOptions):
    """A run: several values of an option are measured one after the other.

    Raises:
        ConfigError: an option is not usable; the text names it, its value and what is accepted.
    """

    engines: tuple[str, ...] = option(("auto",), "Engine to measure (repeatable).", flag="engine")
    protocols: tuple[str, ...] = option(
        (),
        "Protocol of the engine (repeatable); default: on a CPU UCX or tcp, else auto. Between CPUs auto "
        "measures shared memory.",
        flag="protocol",
    )
    device: str = option(
        "cpu", "cpu, or cuda: one GPU for each side if there are two, else one for both.", accepted=DEVICES
    )
    page_bytes: tuple[int, ...] = option((4096, 16384), "Bytes of a page of the prefill side (repeatable).")
    blocks: tuple[int, ...] = option(
        (), "Blocks of a request (repeatable); default: 256 and 1024, on a CPU 16 and 64.", least=1
    )
    regions: int = option(64, "Layers, each in its own allocation.", least=1)
    requests: int = option(16, "Requests per measurement.", least=1)
    in_flight: tuple[int, ...] = option(
        (1, 8), "Requests at a time (repeatable); the time of 1 is a latency.", least=1
    )
    layouts: tuple[Layouts, ...] = option(
        (Layouts.parse("nhd16:nhd16"),),
        "PREFILL:DECODE, nhd or hnd with tokens per block (repeatable).",
        parse=Layouts.parse,
    )
    repeat: int = option(5, "Measurements per case.", least=1)
    budget_s: float = option(10.0, "Seconds after which a case is not repeated.", above=0)
    timeout_s: float = timeout_option()
    batch_bytes: int = option(0, "Bytes of the engine's own contiguous copies; 0 suits the device.", least=0)
    in_turn: bool = option(False, "Let the rounds of all protocols take turns: for a machine in use.")
    extra: Mapping[str, Any] | None = extra_option()
    environment: tuple[str, ...] = environment_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        for engine in self.engines:
            check_engine(engine)
        if self.batch_bytes and self.batch_bytes < max(self.page_bytes):
            raise ConfigError(
                f"batch_bytes is {self.batch_bytes}, it must be at least page_bytes, {max(self.page_bytes)}"
            )
        # What is wrong for every pair is said before the first one is started.
        parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": dict(self.extra or {})})
        for case in self.pairs("auto"):
            self._check_pair(case)

    def _check_pair(self, case: PairCase) -> None:
        tokens = case.layouts.prefill.block_tokens
        # Keys and values of two bfloat16 values each, the least that a token has here.
        unit = tokens * 2 * 2 * VALUE_BYTES
        if case.page_bytes < unit or case.page_bytes % unit:
            raise ConfigError(f"page_bytes is {case.page_bytes}; accepted: multiples of {unit}")
        for blocks in self.used_blocks:
            if case.tokens(blocks) % case.layouts.group_tokens:
                raise ConfigError(
                    f"blocks is {blocks}: its {case.tokens(blocks)} tokens do not fill blocks of "
                    f"{case.layouts.group_tokens}, which layouts {case.layouts} has"
                )
        if self.device != "cpu":
            return
        needed = self._at_once(case.engine) * sum(shape.total_bytes for shape in self.shapes(case))
        free = _available_bytes()
        if free is not None and needed > free:
            raise ConfigError(
                f"page_bytes {case.page_bytes}, blocks {max(self.used_blocks)}, regions {self.regions} and "
                f"in_flight {max(self.in_flight)} need {needed >> 20} MiB for both caches, "
                f"{free >> 20} MiB are available"
            )

    @property
    def used_blocks(self) -> tuple[int, ...]:
        """Blocks per request, of the prefill side: fewer on a CPU, which is a thousand times slower."""
        return self.blocks or ((256, 1024) if self.device == "cuda" else (16, 64))

    @property
    def used_batch_bytes(self) -> int:
        """Bytes of a contiguous copy."""
        return self.batch_bytes or (256 << 20 if self.device == "cuda" else 64 << 20)

    def shapes(self, case: PairCase) -> tuple[CacheShape, CacheShape]:
        """The caches of a pair, with room for its largest case."""
        return case.shapes(self.regions, max(self.used_blocks), max(self.in_flight))

    def pairs(self, engine: str) -> Iterator[PairCase]:
        """The pairs of workers to measure with an engine."""
        for layouts in dict.fromkeys(self.layouts):
            for page_bytes in dict.fromkeys(self.page_bytes):
                for protocol in self.protocols_of(engine):
                    yield PairCase(engine, protocol, layouts, page_bytes)

    def pairs_at_once(self, engine: str) -> Iterator[tuple[PairCase, ...]]:
        """The same pairs, those together that are open at one time."""
        cases = tuple(self.pairs(engine))
        size = self._at_once(engine)
        for first in range(0, len(cases), size):
            yield cases[first : first + size]

    def protocols_of(self, engine: str) -> tuple[str, ...]:
        """Those to measure an engine with."""
        return tuple(dict.fromkeys(self.protocols)) or (carrying_protocol(engine, self.device),)

    def _at_once(self, engine: str) -> int:
        return len(self.protocols_of(engine)) if self.in_turn else 1


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None

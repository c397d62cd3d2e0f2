"""The options of a run: what the command line says, checked before the first child is started."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.transfer.cases import VALUE_BYTES, CacheShape, Layouts, PairCase
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine_names import check_engine
from kvconnect.errors import ConfigError

PATHS = ("direct", "packed", "auto")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Options:
    """A run. No ``blocks`` and a ``batch_bytes`` of 0 stand for what suits the device.

    ``environment`` is set in the children only, a value of None takes the variable away.
    ``timeout_s`` bounds every step of a child, ``budget_s`` the repeats of one case. ``batch_bytes`` is the
    size of the contiguous copies that show what the engine can do. ``in_turn``: the paths of a case are open
    at one time, and their rounds take turns.

    Raises:
        ConfigError: an option is not usable; the text names it, its value and what is accepted.
    """

    engines: tuple[str, ...] = ("auto",)
    paths: tuple[str, ...] = ("direct", "packed")
    device: str = "cpu"
    page_bytes: tuple[int, ...] = (4096, 16384)
    blocks: tuple[int, ...] = ()
    regions: int = 64
    requests: int = 16
    in_flight: tuple[int, ...] = (1, 8)
    layouts: tuple[Layouts, ...] = (Layouts.parse("nhd:nhd"),)
    repeat: int = 5
    budget_s: float = 10.0
    timeout_s: float = 120.0
    batch_bytes: int = 0
    in_turn: bool = False
    extra: Mapping[str, Any] | None = None
    environment: Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        for engine in self.engines:
            check_engine(engine)
        for name, values, accepted in (
            ("path", self.paths, PATHS),
            ("device", (self.device,), DEVICES),
        ):
            for value in values:
                if value not in accepted:
                    raise ConfigError(f"{name} is {value!r}; accepted: {', '.join(accepted)}")
        for name, number in (("budget_s", self.budget_s), ("timeout_s", self.timeout_s)):
            if not number > 0:
                raise ConfigError(f"{name} is {number}, it must be more than 0 seconds")
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
        at_once = len(set(self.paths)) if self.in_turn else 1
        needed = at_once * sum(shape.total_bytes for shape in self.shapes(case))
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
        """The pairs of workers to measure with an engine, direct ones first: others name its rate."""
        paths = sorted(dict.fromkeys(self.paths), key=lambda path: path != "direct")
        for layouts in dict.fromkeys(self.layouts):
            for page_bytes in dict.fromkeys(self.page_bytes):
                yield from (PairCase(engine, path, layouts, page_bytes) for path in paths)

    def pairs_at_once(self, engine: str) -> Iterator[tuple[PairCase, ...]]:
        """The same pairs, those together that are open at one time."""
        cases = tuple(self.pairs(engine))
        size = len(set(self.paths)) if self.in_turn else 1
        for first in range(0, len(cases), size):
            yield cases[first : first + size]


def parse_extra(text: str) -> dict[str, Any]:
    """Read further settings of ``kv_connector_extra_config`` from a JSON object.

    Raises:
        ConfigError: it is not one.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"extra is {text!r}, which is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"extra is {text!r}, it must be a JSON object")
    return found


def parse_environment(assignments: Sequence[str]) -> dict[str, str | None]:
    """Read ``NAME=VALUE``, or ``NAME`` alone for a variable that is to be taken away."""
    parts = [assignment.partition("=") for assignment in assignments]
    return {name: value if equals else None for name, equals, value in parts}


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None

"""The options of a run, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.device import device_option
from benchmarks.node.options import ModelOptions
from benchmarks.options import option


@dataclass(frozen=True)
class Options(ModelOptions):
    """A run: of copies, or with ``decode`` of decode steps while blocks leave and come back.

    Numbers of 0 and an empty model stand for what suits the device.
    """

    device: str = device_option()
    page_bytes: tuple[int, ...] = option((16384,), "Bytes of a page (repeatable).")
    regions: int = option(64, "Layers, each in its own allocation.", least=1)
    blocks: tuple[int, ...] = option(
        (), "Blocks at a time (repeatable); default: 256 and 1024, on a CPU 16 and 64.", least=1
    )
    decode: bool = option(False, "Time decode steps beside copies instead.")
    batch: int = option(0, "With --decode: requests; default: 32, on a CPU 4.", least=0)
    context: int = option(0, "With --decode: tokens of each; default: 4096, on a CPU 64.", least=0)
    gb_per_s: float = option(
        0.0, "With --decode: GB/s in each direction; default: 10, on a CPU 0.01.", least=0
    )
    rounds: int = option(3, "With --decode: how often without and with alternate.", least=1)
    seconds: float = option(2.0, "With --decode: seconds of each.", above=0)

    @property
    def on_cpu(self) -> bool:
        """Small, since it is a place for tests."""
        return self.device == "cpu"

    @property
    def used_blocks(self) -> tuple[int, ...]:
        """Blocks at a time."""
        return self.blocks or ((16, 64) if self.on_cpu else (256, 1024))

    @property
    def used_batch(self) -> int:
        """Requests that decode."""
        return self.batch or self.suited.batch

    @property
    def used_context(self) -> int:
        """Tokens of each."""
        return self.context or self.suited.context

    @property
    def request_bytes(self) -> int:
        """What comes back by one order, as for a request that returns."""
        return (64 << 10) if self.on_cpu else (256 << 20)

    @property
    def bytes_per_s(self) -> float:
        """The rate in each direction."""
        return (self.gb_per_s or (0.01 if self.on_cpu else 10.0)) * 1e9

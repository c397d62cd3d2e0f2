"""One side of an engine with nothing above it, in a process of its own: what the engine can do at best.

Copies are measured from the first post to the last completion, several batches in flight if the engine
allows it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.device import use_device, wait_for_device
from benchmarks.transfer.cases import EngineAddress
from benchmarks.transfer.options import Options
from benchmarks.transfer.process import Side, StepFailed
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine.base import Batch, Engine, Span
from kvconnect.engine.registry import create_engine
from kvconnect.errors import ConfigError
from kvconnect.pack.arena import Arena

_BATCHES_IN_BUFFER = 4
_BATCHES_PER_SAMPLE = 8
_PEER = "target"

Columns = tuple[int, int, int]


class EngineSide(Side):
    """An engine and one registered buffer. ``open`` comes first; ``connect`` before anything is sent."""

    def __init__(self) -> None:
        super().__init__()
        self._batch_ids = itertools.count(1)

    # Steps that the parent asks for

    def open(self, options: Options, engine: str, device: str) -> EngineAddress:
        """Make the engine and register a buffer of a few batches."""
        use_device(device)
        self._options, self._device = options, device
        self._batch_bytes = options.used_batch_bytes
        self.engine = _make_engine(options, engine)
        self.ends.callback(self.engine.close)
        # Such memory as workers have: an engine is faster with huge pages.
        arena = Arena(device, self._batch_bytes, _BATCHES_IN_BUFFER)
        self._buffer = arena.view(arena.address, arena.length_bytes).zero_()
        wait_for_device(device)
        self.engine.register([Span(self._buffer.data_ptr(), self._buffer.numel(), device)])
        bounds = self.engine.capabilities
        if bounds.target_must_poll:
            self.idle_pause_s = 0.0
        return EngineAddress(
            bounds.name,
            self.engine.card(),
            self._buffer.data_ptr(),
            min(self._batch_bytes, bounds.max_bytes),
        )

    def connect(self, target: EngineAddress) -> None:
        """Know the other side."""
        self.engine.connect(_PEER, target.card)
        self._target = target.address

    def contiguous(self, batch_bytes: int) -> float:
        """GB/s with one copy per batch."""
        return self._rate(lambda: self._contiguous(batch_bytes), _BATCHES_PER_SAMPLE * batch_bytes)

    def peer_copy(self, device: str) -> float:
        """GB/s of copying one tensor from this side's device to another."""
        source = self._buffer[: self._batch_bytes]
        target = torch.zeros_like(source, device=device)

        def copy() -> float:
            began = time.perf_counter()
            for _ in range(_BATCHES_PER_SAMPLE):
                target.copy_(source, non_blocking=True)
            wait_for_device(self._device)
            wait_for_device(device)
            return time.perf_counter() - began

        return self._median_rate(copy, _BATCHES_PER_SAMPLE * source.numel())

    # What the above is made of

    def idle(self) -> None:
        """Advance what the other side has in flight to us."""
        self.engine.poll()

    def _rate(self, batches: Callable[[], Iterator[Columns]], total_bytes: int) -> float:
        return self._median_rate(lambda: self._seconds(batches()), total_bytes)

    def _median_rate(self, measure: Callable[[], float], total_bytes: int) -> float:
        """GB/s, from the median of a few runs after one that does not count."""
        until = time.monotonic() + self._options.budget_s
        measure()
        samples = [measure()]
        while len(samples) < self._options.repeat and time.monotonic() < until:
            samples.append(measure())
        return total_bytes / statistics.median(samples) / 1e9

    def _contiguous(self, batch_bytes: int) -> Iterator[Columns]:
        for index in range(_BATCHES_PER_SAMPLE):
            offset = index % _BATCHES_IN_BUFFER * batch_bytes
            yield self._buffer.data_ptr() + offset, self._target + offset, batch_bytes

    def _seconds(self, batches: Iterator[Columns]) -> float:
        """Seconds from the first post to the last completion.

        Raises:
            StepFailed: the engine failed one, or did not answer in time.
        """
        engine, timeout_s = self.engine, self._options.timeout_s
        room = engine.capabilities.max_batches_per_peer
        deadline = time.monotonic() + timeout_s
        in_flight = 0
        following: Columns | None = next(batches)
        began = time.perf_counter()
        while following is not None or in_flight:
            while following is not None and in_flight < room:
                self._submit(following)
                in_flight += 1
                following = next(batches, None)
            for completion in engine.poll():
                in_flight -= 1
                if not completion.ok:
                    raise StepFailed(f"the engine failed a batch: {completion.error}")
            if time.monotonic() > deadline:
                raise StepFailed(f"{in_flight} batches were not answered within {timeout_s:g} s")
        return time.perf_counter() - began

    def _submit(self, columns: Columns) -> None:
        source, target, length = columns
        self.engine.submit(
            Batch(next(self._batch_ids), _PEER, source, target, length, self._options.timeout_s)
        )


def _make_engine(options: Options, engine: str) -> Engine:
    """The engine that a worker so configured takes, with batches as large as asked if it lets us."""
    asked = {"engine": engine, "protocol": options.protocols_of(engine)[0], **(options.extra or {})}
    extra = parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": asked}).extra
    given = dict(extra.engine_options)
    if extra.device_name:
        given["device_name"] = extra.device_name
    try:
        return create_engine(
            extra.engine,
            host=extra.host,
            protocol=extra.protocol,
            options={"max_bytes": options.used_batch_bytes, **given},
        )
    except ConfigError:
        return create_engine(extra.engine, host=extra.host, protocol=extra.protocol, options=given)

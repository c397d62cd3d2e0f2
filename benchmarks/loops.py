"""A node's decode steps over and over, from a CUDA graph, with the host work of a runner.

The cache is the one that a worker has registered: what is received lies beside what is computed with.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.cache import BenchCache
from benchmarks.model import DTYPE, BenchModel, attend_decode
from kvconnect.cache.specs import div_ceil
from kvconnect.node.engine import Runner
from kvconnect.node.kv_cache import NodeCache
from kvconnect.node.models import CacheLayout, CacheSizing
from kvconnect.node.request import EngineStep, ScheduledChunk

Blocks = Sequence[Sequence[int]]

# The last tokens of its context that a request computes before another takes its place.
_TURN_TOKENS = 64
# Runs before a capture, so that libraries have made their plans and workspaces.
_WARM_UP_RUNS = 2


@dataclass(frozen=True)
class StepTime:
    """When a step ended, on the performance counter, and the seconds of its parts.

    ``host_s`` is until all of it was launched, ``device_s`` what the device worked, None on a CPU.
    """

    ended_at: float
    host_s: float
    device_s: float | None


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class StepTimes:
    """The steps of a window: seconds from the end of one to that of the next, and those of their parts."""

    step_s: tuple[float, ...]
    host_s: tuple[float, ...]
    device_s: tuple[float, ...]

    @classmethod
    def within(cls, steps: Sequence[StepTime], counted_from: float, until: float = math.inf) -> StepTimes:
        """Those that began and ended in a window."""
        counted = [
            (step, step.ended_at - before.ended_at)
            for before, step in itertools.pairwise(steps)
            if before.ended_at >= counted_from and step.ended_at <= until
        ]
        return cls(
            tuple(seconds for _, seconds in counted),
            tuple(step.host_s for step, _ in counted),
            tuple(step.device_s for step, _ in counted if step.device_s is not None),
        )


def step_percentiles(without: Sequence[StepTimes], having: Sequence[StepTimes]) -> dict[str, float | None]:
    """Milliseconds of all steps in windows without transfers or copies, and with; None if none was timed."""
    found: dict[str, float | None] = {}
    for part, percent in (("step", 50), ("step", 99), ("host", 50), ("device", 50)):
        for kind, windows in (("without", without), ("with", having)):
            times = [seconds for one in windows for seconds in getattr(one, f"{part}_s")]
            value = float(np.percentile(times, percent)) * 1e3 if times else None
            found[f"{part}_ms_p{percent}_{kind}"] = value
    return found


class SharedCache(NodeCache):
    """A node's block tables and views, for so many requests, over the cache of a worker."""

    def __init__(self, model: BenchModel, cache: BenchCache, rows: int, most_tokens: int) -> None:
        self._storages = {name: made.tensor.view(-1).view(torch.int8) for name, made in cache.tensors.items()}
        super().__init__(
            model.layout(CacheSizing(cache.shape.layout.block_tokens, most_tokens)),
            num_blocks=cache.shape.num_blocks,
            max_num_seqs=rows,
            max_model_len=most_tokens,
            max_num_batched_tokens=rows,
            device=cache.device,
        )

    def _allocate(self, layout: CacheLayout) -> dict[str, torch.Tensor]:
        return self._storages


def fill_blocks(cache: NodeCache, blocks: Blocks) -> None:
    """Put values into blocks as a model's keys and values are: about 1 in size, none of them alike."""
    generator = torch.Generator(cache.device).manual_seed(1)
    for made in cache.tensors.values():
        for ids in blocks:
            held = torch.tensor(ids, device=cache.device)
            values = torch.randn(
                (len(ids), *made.tensor.shape[1:]), generator=generator, dtype=DTYPE, device=cache.device
            )
            made.tensor.index_copy_(0, held, values)


class _Stopwatch:
    """Times of one step. On a GPU two events say how long it worked."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._began = time.perf_counter()

    def launching(self) -> None:
        if self._events:
            self._events[0].record()

    def launched(self) -> None:
        if self._events:
            self._events[1].record()
        self._launched = time.perf_counter()

    def end(self) -> StepTime:
        """Once the device is done."""
        ended = time.perf_counter()
        device_s = self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else None
        return StepTime(ended, self._launched - self._began, device_s)


class DecodeLoop:
    """Decode steps of a full batch, each request near the end of its context; on a GPU from a CUDA graph.

    A request that reaches the end is replaced by another in the same blocks, at another step for each row.
    So the work of a step stays the same, and block tables change as they do in a node. Everything that the
    graph holds stays where it is: the cache, the tables, the inputs and the tokens.
    """

    def __init__(self, model: BenchModel, cache: SharedCache, blocks: Blocks, context: int) -> None:
        rows = self.tokens_per_step = len(blocks)
        self._model, self._cache, self._blocks, self._context = model, cache, blocks, context
        # Of a runner only what it does before a step: the step itself is ours.
        self._runner = Runner(model, cache)  # type: ignore[arg-type]
        self._block_tokens = cache.kernel_block_sizes[0]
        self._turn = min(_TURN_TOKENS, max(1, context // 2))
        self._positions = [context - self._turn + row * self._turn // rows for row in range(rows)]
        self._tokens = [0] * rows
        self._watch = _Stopwatch(cache.device)
        # Token and position of every request: one copy to the device per step.
        self._staged = torch.zeros((2, rows), dtype=torch.int64, pin_memory=cache.device.type == "cuda")
        self._inputs = self._staged.to(cache.device)
        self._starts = torch.arange(rows + 1, device=cache.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if cache.device.type == "cuda":
            self._capture()
        held = [div_ceil(position, self._block_tokens) for position in self._positions]
        self._runner.prepare(
            EngineStep(new_rows=[(row, (blocks[row][:count],)) for row, count in enumerate(held)])
        )

    @torch.inference_mode()
    def step(self, meanwhile: Callable[[], None] = _nothing) -> StepTime:
        """Do one step, and wait until its tokens are there. ``meanwhile`` is called once it is launched.

        What a runner does: block tables, one upload, a replay, and reading the tokens.
        """
        self._watch.begin()
        step = self._next()
        self._runner.prepare(step)
        self._watch.launching()
        # The last step has ended: its tokens were read.
        chunks = step.chunks
        self._staged.copy_(torch.tensor([[c.token_ids[0] for c in chunks], [c.start for c in chunks]]))
        self._inputs.copy_(self._staged, non_blocking=True)
        self._find_places()
        if self._graph is None:
            self._output = self._forward()
        else:
            self._graph.replay()
        self._watch.launched()
        meanwhile()
        self._tokens = self._output.tolist()
        return self._watch.end()

    def _find_places(self) -> None:
        """Batch tables and slots of the step."""
        tables, rows = self._cache.tables, self._starts[:-1]
        tables.gather(rows, len(rows))
        tables.compute_slots(rows, self._starts, self._inputs[1], len(rows))

    def _forward(self) -> torch.Tensor:
        tokens, positions = self._inputs
        return self._model.run(tokens, positions, self._starts[:-1], attend_decode(self._cache, positions))

    @torch.inference_mode()
    def _capture(self) -> None:
        """Before any request has blocks: what is stored meanwhile goes to the null block."""
        # A graph that is destroyed during a capture makes it fail, and the collector may run anywhere.
        gc.collect()
        gc.disable()
        try:
            self._find_places()
            stream = torch.cuda.Stream(self._cache.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self._cache.device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_RUNS):
                    self._forward()
            torch.cuda.current_stream(self._cache.device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._output = self._forward()
        finally:
            gc.enable()

    def _next(self) -> EngineStep:
        step = EngineStep()
        for row, position in enumerate(self._positions):
            blocks, at = self._blocks[row], position // self._block_tokens
            if position == self._context:
                position = self._context - self._turn
                at = position // self._block_tokens
                step.new_rows.append((row, (blocks[: at + 1],)))
            elif position % self._block_tokens == 0:
                step.grown_rows.append((row, (blocks[at : at + 1],)))
            step.chunks.append(ScheduledChunk(str(row), row, position, (self._tokens[row],), True))
            self._positions[row] = position + 1
        return step

"""Decode steps in shapes that depend on the batch size alone, so that a CUDA graph can hold them.

Every request computes one token. Batches are padded to a few sizes; where the tokens, pages and states lie
comes from tensors that never move. A padded row reads the null block and writes back what it finds there.
This file knows nothing of queues or zeroing: block tables are applied and fresh blocks zeroed before it
runs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvconnect.node.attention import AttentionPages, RequestStates, StepContext, attend_rows
from kvconnect.node.kv_cache import NodeCache
from kvconnect.node.models import Model, ModelOutput
from kvconnect.node.request import EngineStep

# Runs before a capture, so that libraries have made their plans and workspaces.
WARM_UP_RUNS = 2


@dataclass(frozen=True, kw_only=True)
class DecodeStates(RequestStates):
    """Where ``used`` is False nothing is stored."""

    used: torch.Tensor

    def write(self, states: Sequence[torch.Tensor]) -> None:
        """See ``RequestStates``."""
        pages, ids = self.pages.pages, self.block_ids
        held = pages[ids]
        super().write(states)
        pages[ids] = torch.where(self.used[:, None], pages[ids], held)


@dataclass(frozen=True, kw_only=True)
class DecodeStep(StepContext):
    """One token for each row of the tables, all of which attend at once. Rows not ``used`` store nothing."""

    used: torch.Tensor

    def states(self, layer: str) -> Iterator[RequestStates]:
        """See ``StepContext``."""
        for one in super().states(layer):
            yield DecodeStates(one.span, one.pages, one.block_ids, one.begins, used=self.used)

    def _store(self, layer: str, keys: torch.Tensor, values: torch.Tensor | None) -> AttentionPages:
        pages, places = self.cache.pages[layer], self._slots[self.cache.group_of[layer]]
        assert isinstance(pages, AttentionPages)
        kinds = [kind for kind in (pages.keys, pages.values) if kind is not None]
        held = [kind.read(*places) for kind in kinds]
        super()._store(layer, keys, values)
        for kind, before in zip(kinds, held, strict=True):
            rows = torch.where(self.used[:, None], kind.read(*places), before)
            kind.write(*places, rows.view(-1, *kind.pages.shape[2:]))
        return pages

    def attend(
        self,
        layer: str,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        *,
        window: int | None = None,
        value_width: int | None = None,
    ) -> torch.Tensor:
        """See ``StepContext``."""
        pages = self._store(layer, keys, values)
        positions, group = self.positions, self.cache.group_of[layer]
        size, table = self.cache.kernel_block_sizes[group], self.tables[group].long()
        key_positions = torch.arange(table.shape[1] * size, device=table.device)
        first = positions.new_zeros(len(positions), 1)
        if window is not None:
            first = (positions[:, None] - window + 1).clamp(min=0)
        visible = (key_positions <= positions[:, None]) & (key_positions >= first)
        # Pages of which nothing is visible are not read by a kernel; the rest are read whole.
        page = key_positions // size
        unread = (page > positions[:, None] // size) | (page < first // size)
        read_keys = pages.keys.gather(table).masked_fill(unread[:, :, None, None], 0.0)
        if pages.values is None:
            read_values = read_keys[..., :value_width]
        else:
            read_values = pages.values.gather(table).masked_fill(unread[:, :, None, None], 0.0)
        return attend_rows(query[:, None], read_keys, read_values, visible[:, None])[:, 0]


def decode_step(cache: NodeCache, positions: torch.Tensor) -> StepContext:
    """A step of one token for each row of the batch tables, whose slots are those of the step.

    ``positions`` of shape ``(rows,)`` are -1 in padded rows.
    """
    used, positions = positions >= 0, positions.clamp(min=0)
    count = len(positions)
    rows = torch.arange(count, device=positions.device)
    tables = {group: cache.tables.batch_table(group)[:count] for group in cache.kernel_block_sizes}
    return DecodeStep(cache, positions, tables, rows, [(slice(0, count), rows)], used=used)


class Decoder:
    """Runs decode steps padded to one of ``sizes`` rows; from CUDA graphs if ``captured``.

    Everything that a graph holds stays where it is: the cache, the tables, the inputs and the outputs.
    """

    def __init__(self, model: Model, cache: NodeCache, *, sizes: Sequence[int], captured: bool) -> None:
        self.model = model
        self.cache = cache
        self.sizes = sorted(sizes)
        most, device = self.sizes[-1], cache.device
        # Token, position and block table row of every request: one copy to the device per step.
        self._staged = torch.zeros((3, most), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._staged[1] = -1
        self._inputs = self._staged.to(device)
        self._starts = torch.arange(most + 1, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}
        if captured:
            # A graph that is destroyed during a capture makes it fail, and the collector may run anywhere.
            gc.collect()
            gc.disable()
            try:
                self._capture_all()
            finally:
                gc.enable()

    def run(self, step: EngineStep) -> ModelOutput:
        """The next token of every request of the step, in order."""
        chunks = step.chunks
        count = len(chunks)
        size = next(size for size in self.sizes if size >= count)
        staged = torch.tensor(
            [[c.token_ids[0] for c in chunks], [c.start for c in chunks], [c.row for c in chunks]]
        )
        # The last step has ended: its tokens were read.
        self._staged[:, :count] = staged
        self._staged[1, count:] = -1
        self._inputs.copy_(self._staged, non_blocking=True)
        self._find_places(count, size)
        if size in self._graphs:
            graph, output = self._graphs[size]
            graph.replay()
        else:
            output = self._forward(size)
        drafts = None if output.draft_tokens is None else output.draft_tokens[:count]
        return ModelOutput(output.tokens[:count], drafts)

    def _find_places(self, count: int, size: int) -> None:
        """Batch tables and slots of the requests that are staged."""
        tables, rows = self.cache.tables, self._inputs[2, :count]
        tables.gather(rows, size)
        tables.compute_slots(rows, self._starts[: count + 1], self._inputs[1, :count], size)

    def _forward(self, size: int) -> ModelOutput:
        step = decode_step(self.cache, self._inputs[1, :size])
        return self.model.forward(self._inputs[0, :size], step, self._starts[:size])

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """One graph per size, the largest first: the others fit into its memory. All rows are padded."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self._find_places(0, size)
            stream = torch.cuda.Stream(self.cache.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.cache.device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_RUNS):
                    self._forward(size)
            torch.cuda.current_stream(self.cache.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = self._forward(size)
            self._graphs[size] = (graph, output)

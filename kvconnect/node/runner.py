"""Runs one scheduled step on the model: zero, fill block tables, forward, sample.

Owns the model, the cache and the device. It is called from the engine loop thread only and knows nothing
of queues, HTTP or connectors.
"""

from __future__ import annotations

import torch

from kvconnect.node.attention import Segment, StepContext
from kvconnect.node.cache import NodeCache
from kvconnect.node.models.base import Model
from kvconnect.node.step import Step


class Runner:
    """Executes steps. Blocks are addressed through ``cache.tables`` alone."""

    def __init__(self, model: Model, cache: NodeCache) -> None:
        self.model = model
        self.cache = cache

    def prepare(self, step: Step) -> None:
        """Zero fresh state blocks and bring the block tables up to date. Needed by loads as well."""
        # The block tables are copied from pinned memory in the background; they must not change under it.
        self.synchronize()
        for group, fresh in step.zero_blocks.items():
            self.cache.zero_blocks(group, fresh)
        for row in step.released_rows:
            self.cache.tables.clear_row(row)
        for row, block_ids in step.new_rows:
            self.cache.tables.append_block_ids(row, block_ids, overwrite=True)
        for row, block_ids in step.grown_rows:
            self.cache.tables.append_block_ids(row, block_ids)
        self.cache.tables.apply()

    @torch.inference_mode()
    def execute(self, step: Step) -> dict[str, tuple[int, int | None]]:
        """Run the step's chunks. Returns token and draft token of each request that reached its end."""
        segments: list[Segment] = []
        token_ids: list[int] = []
        sampled: list[int] = []
        names: list[str] = []
        offset = 0
        for chunk in step.chunks:
            segments.append(Segment(chunk.row, chunk.start, len(chunk.token_ids), offset))
            token_ids.extend(chunk.token_ids)
            offset += len(chunk.token_ids)
            if chunk.samples:
                sampled.append(offset - 1)
                names.append(chunk.request_id)
        context = StepContext(
            segments,
            tables=self.cache.tables,
            kernel_block_sizes=self.cache.kernel_block_sizes,
            state_groups=self.cache.state_groups,
            layers=self.cache.pages,
            group_of=self.cache.group_of,
            device=self.cache.device,
        )
        output = self.model.forward(
            torch.tensor(token_ids, device=self.cache.device),
            context,
            torch.tensor(sampled, dtype=torch.long, device=self.cache.device),
        )
        drafts = output.draft_tokens or [None] * len(names)
        return {name: (token, draft) for name, token, draft in zip(names, output.tokens, drafts, strict=True)}

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done, so that others may read the cache."""
        if self.cache.device.type == "cuda":
            torch.cuda.current_stream(self.cache.device).synchronize()

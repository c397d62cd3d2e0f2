"""Runs one scheduled step on the model: fill block tables, zero, forward, sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconnect.node.attention import Segment, segment_step
from kvconnect.node.kv_cache import NodeCache
from kvconnect.node.models import Model, ModelOutput
from kvconnect.node.request import EngineStep
from kvconnect.runner_kit.zeroing import KVBlockZeroer


class Runner:
    """Executes steps. Blocks are addressed through ``cache.tables`` alone."""

    def __init__(self, model: Model, cache: NodeCache) -> None:
        self.model = model
        self.cache = cache
        self.zeroer = KVBlockZeroer(cache.region_table(), device=cache.device)

    def prepare(self, step: EngineStep) -> None:
        """Bring the block tables up to date, then zero fresh blocks. Needed by loads as well."""
        for row in step.released_rows:
            self.cache.tables.clear_row(row)
        for row, block_ids in step.new_rows:
            self.cache.tables.append_block_ids(row, block_ids, overwrite=True)
        for row, block_ids in step.grown_rows:
            self.cache.tables.append_block_ids(row, block_ids)
        self.cache.tables.apply()
        self.zeroer.zero_block_ids(step.new_block_ids_to_zero)

    @torch.inference_mode()
    def execute(self, step: EngineStep) -> dict[str, tuple[int, int | None]]:
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
        output = self.model.forward(
            torch.tensor(token_ids, device=self.cache.device),
            segment_step(self.cache, segments),
            torch.tensor(sampled, dtype=torch.long, device=self.cache.device),
        )
        return by_request(names, output)

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done, so that others may read the cache."""
        if self.cache.device.type == "cuda":
            torch.cuda.current_stream(self.cache.device).synchronize()


def by_request(names: Sequence[str], output: ModelOutput) -> dict[str, tuple[int, int | None]]:
    """Tokens and draft tokens by request. Waits for the device."""
    tokens = output.tokens.tolist()
    drafts = [None] * len(tokens) if output.draft_tokens is None else output.draft_tokens.tolist()
    return {name: (token, draft) for name, token, draft in zip(names, tokens, drafts, strict=True)}

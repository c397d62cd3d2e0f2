"""A model runner of arithmetic: carries out vLLM's scheduler output on words, and checks all that it reads.

It keeps its own table of requests, as vLLM's runners do: tokens, blocks by group, and how far each is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.vllm_bench.check import Checker, WrongBytes
from tests.vllm_bench.model import Caches
from tests.vllm_bench.reference import VOCABULARY, Text, sampled


@dataclass(eq=False)
class Row:
    """One request. ``computed`` are tokens whose KV is there."""

    text: Text
    blocks: list[list[int]]
    computed: int
    drafts: list[int] = field(default_factory=list)
    state_column: int | None = None
    state_slot: int = 0
    """Where a state group's blocks hold the state after ``computed``: a column, plus accepted drafts."""


class Runner:
    """Executes steps on one worker's caches.

    Args:
        caches: the memory.
        num_drafts: tokens that are guessed ahead in each step.
        rng: decides which guesses are right.
    """

    def __init__(self, caches: Caches, num_drafts: int, rng: random.Random) -> None:
        self._caches = caches
        self._sights = caches.model.sights
        self.checker = Checker(caches)
        self._num_drafts = num_drafts
        self._rng = rng
        self.rows: dict[str, Row] = {}

    def prepare(self, output: Any) -> None:
        """Zero fresh blocks and copy others, as the scheduler asks."""
        for views in self._caches.words:
            for words in views:
                if output.new_block_ids_to_zero:
                    words[output.new_block_ids_to_zero] = 0
                for copy in output.kv_cache_block_copies or ():
                    words[copy.dst_block_id] = words[copy.src_block_id]

    def execute(self, output: Any) -> list[list[int]]:
        """Compute a step. The tokens sampled, by request in the order of ``num_scheduled_tokens``."""
        self._update(output)
        return [
            self._compute(request_id, count, len(output.scheduled_spec_decode_tokens.get(request_id, ())))
            for request_id, count in output.num_scheduled_tokens.items()
        ]

    def drafts(self, request_ids: Sequence[str]) -> list[list[int]]:
        """What is guessed after the last token of each request."""
        return [list(self.rows[request_id].drafts) for request_id in request_ids]

    def _update(self, output: Any) -> None:
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            text = Text(self._sights)
            text.extend(new.prefill_token_ids or new.prompt_token_ids)
            self.rows[new.req_id] = Row(text, [list(ids) for ids in new.block_ids], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                text = Text(self._sights)
                text.extend(cached.all_token_ids[request_id])
                self.rows[request_id] = Row(
                    text, [list(ids) for ids in new_ids], cached.num_computed_tokens[index]
                )
            elif new_ids is not None:
                for ids, more in zip(self.rows[request_id].blocks, new_ids, strict=True):
                    ids.extend(more)

    def _compute(self, request_id: str, count: int, num_drafts: int) -> list[int]:
        row = self.rows[request_id]
        num_known = len(row.text)
        # What is scheduled as a draft without one being there can only be refused.
        drafts = (row.drafts + [VOCABULARY] * num_drafts)[:num_drafts]
        first, end = row.computed, row.computed + count
        assert end <= num_known + num_drafts, (request_id, first, count, num_known, num_drafts)
        row.text.extend(drafts)
        for group in range(len(self._sights)):
            self._write(row, group, first, end, num_known)
        seen = self.checker.check(request_id, row, first, end)
        if end < num_known:
            row.text.truncate(num_known)
            row.computed = end
            self.checker.settle(row, end, 0, 1)
            return []
        # The token after each position from the last that is known on.
        made: list[int] = []
        for position in range(num_known - 1, end):
            made.append(sampled(seen(position), position))
            if position + 1 >= num_known + num_drafts or drafts[position + 1 - num_known] != made[-1]:
                break
        row.text.truncate(num_known)
        row.text.extend(made)
        row.computed = len(row.text) - 1
        self.checker.settle(row, end, num_drafts, len(made))
        row.drafts = self._guess(row)
        return made

    def _guess(self, row: Row) -> list[int]:
        """Drafts of which a random number is right."""
        if not self._num_drafts:
            return []
        num_right = self._rng.randint(0, self._num_drafts)
        position = len(row.text)
        drafts: list[int] = []
        for _ in range(num_right):
            last = len(row.text) - 1
            seen = [row.text.seen(group, last) for group in range(len(self._sights))]
            drafts.append(sampled(seen, last))
            row.text.extend(drafts[-1:])
        row.text.truncate(position)
        while len(drafts) < self._num_drafts:
            drafts.append(self._rng.randrange(VOCABULARY))
        return drafts

    def _write(self, row: Row, group: int, first: int, end: int, num_known: int) -> None:
        if self._sights[group].is_state:
            self.checker.advance(row, group, first, end, num_known)
            return
        blocks, offsets = self.checker.slots(row, group, first, end)
        if not blocks.all():
            raise WrongBytes(
                f"group {group}: positions {first} to {end - 1} have no block ({row.blocks[group]})"
            )
        words = row.text.words(group, first, end)
        for layer, memory in enumerate(self._caches.words[group]):
            memory[blocks, offsets] = words[layer]

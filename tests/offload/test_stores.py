"""Rows go to the first blocks of the first requests of a step, and what is long is stored part by part."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.specs import FullAttentionSpec, KVCacheGroup
from kvconnect.config import OffloadConfig
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.offload.scheduler.stores import MOST_AT_ONCE
from kvconnect.transfer.stack import Computed, Step
from tests.offload.half_kit import check_index

BLOCK_TOKENS = 4
ROW_BYTES = 64
WHOLE = KVCacheGroup(("a",), FullAttentionSpec(BLOCK_TOKENS, 1, 1, torch.int8))


@dataclass
class Request:
    request_id: str
    num_tokens: int
    names: list[bytes]
    kv_transfer_params: dict[str, Any] | None = None


class Node:
    """A scheduler half of one cache group."""

    def __init__(self, num_rows):
        self.failures = Counter()
        kept = KeptBlocks(
            (WHOLE,),
            HitRequirements.of((WHOLE,), range(1), BLOCK_TOKENS),
            hashes=lambda request, block_tokens: request.names,
            row_bytes={0: ROW_BYTES},
            clock=lambda: 0.0,
        )
        self.half = OffloadScheduler(OffloadConfig(cpu_bytes=num_rows * ROW_BYTES, shares=(1.0,)), kept)

    def step(self, prompts, number):
        """Admit prompts, compute half of each and then the rest; the names that are stored then."""
        requests = [
            Request(
                f"{number}.{at}",
                len(prompt) * BLOCK_TOKENS,
                [b"%r" % (prompt[: end + 1],) for end in range(len(prompt))],
            )
            for at, prompt in enumerate(prompts)
        ]
        seen = []
        for request in requests:
            self.half.new_request(request, reads=False)
            self.half.update_after_alloc(request, ([],), 0)
        for part in (2, 1):
            computed = []
            for at, request in enumerate(requests):
                count = len(request.names)
                first, end = (0, count // 2) if part == 2 else (count // 2, count)
                ids = list(range(100 * at + first + 1, 100 * at + end + 1))
                computed.append(Computed(request.request_id, end * BLOCK_TOKENS, (ids,)))
            self.half.launched(Step(computed))
            stores = self.half.build_orders().stores
            self.failures.update(self.half.host.take_failures())
            seen.append({name for store in stores for name in store.hashes})
            assert all(len(set(store.copies.rows)) == len(store.hashes) for store in stores)
        check_index(self.half.host.index)
        return seen


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), max_size=4)


@given(st.integers(1, 12), st.lists(prompts, min_size=1, max_size=3))
def test_rows_go_to_the_first_blocks_of_the_first_requests(num_rows, steps):
    node, there, num_short = Node(num_rows), set(), 0
    for number, prompts in enumerate(steps):
        for stored, part in zip(node.step(prompts, number), (2, 1), strict=True):
            before = set(there)
            for prompt in prompts:
                names = [b"%r" % (prompt[: end + 1],) for end in range(len(prompt) // part)]
                # More than there are rows for could be part of no hit.
                for name in names[:num_rows]:
                    if name not in there and len(there) == num_rows:
                        num_short += 1
                        break
                    there.add(name)
            assert stored == there - before
    assert node.failures == Counter({"offload_rows_short": num_short} if num_short else {})


def test_of_what_is_long_a_part_is_seen_to_in_each_step():
    half = Node(3000).half
    request = Request("long", 2500 * BLOCK_TOKENS, [b"%d" % at for at in range(2500)])
    half.new_request(request, reads=False)
    half.update_after_alloc(request, ([],), 0)
    ids = (list(range(1, 2501)),)
    for first in (0, MOST_AT_ONCE, 2 * MOST_AT_ONCE):
        assert half.due["long"] == 0
        half.launched(Step((Computed("long", request.num_tokens, ids),)))
        ids = None
        (store,) = half.build_orders().stores
        assert store.hashes == tuple(request.names[first : first + MOST_AT_ONCE])
        assert store.copies.block_ids == tuple(range(first + 1, first + len(store.hashes) + 1))
    assert half.due["long"] > request.num_tokens

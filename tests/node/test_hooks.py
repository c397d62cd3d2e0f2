"""Content hashes, and what a connector is asked and told of a node's steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.node.block_manager import PrefixHashes, RequestBlocks
from kvconnect.node.request import EngineStep, Request, ScheduledChunk
from kvconnect.node.scheduler import Transfers, align_tokens

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def hashes(token_ids: list[int], block_tokens: int) -> list[bytes]:
    made = PrefixHashes(block_tokens)
    made.extend_to(token_ids)
    return made


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_hashes_are_equal_exactly_where_all_tokens_up_to_them_are(one, other, size):
    for number, (a, b) in enumerate(zip(hashes(one, size), hashes(other, size), strict=False), 1):
        assert (a == b) == (one[: number * size] == other[: number * size])


@given(TOKENS, st.integers(1, 7), st.integers(1, 4))
def test_blocks_of_another_size_have_the_same_hash_where_they_end(tokens, size, times):
    assert hashes(tokens, size * times) == hashes(tokens, size)[times - 1 :: times]


@given(TOKENS, st.integers(1, 7), st.lists(st.integers(0, 40), max_size=4))
def test_hashes_of_a_prompt_that_grows_are_those_of_all_tokens(tokens, size, cuts):
    grown = PrefixHashes(size)
    for cut in sorted(cuts):
        grown.extend_to(tokens[:cut])
    grown.extend_to(tokens)
    assert grown == hashes(tokens, size)
    assert len(grown) == len(tokens) // size


@dataclass
class Half:
    """A scheduler half that writes down what it is told."""

    places: tuple[int, ...] = ()
    due: dict[str, int] = field(default_factory=dict)
    told: list[tuple] = field(default_factory=list)

    def checkpoints(self, request):
        return self.places

    def launched(self, step):
        self.told += [("state", *state[:4]) for state in step.states]
        self.told += [("computed", *computed) for computed in step.computed]


def config(*sizes: int, states: int = 0) -> KVCacheConfig:
    attention = [
        KVCacheGroup((f"a{index}",), FullAttentionSpec(size, 1, 8, torch.bfloat16))
        for index, size in enumerate(sizes)
    ]
    recurrent = [
        KVCacheGroup((f"s{index}",), StateSpec(512, ((4,),), (torch.float32,))) for index in range(states)
    ]
    return KVCacheConfig(8, (*attention, *recurrent))


def transfers(half: Half, cache: KVCacheConfig) -> Transfers:
    return Transfers(half, cache, recompute_failed_loads=False)


def request(*blocks: list[int]) -> Request:
    made = Request("r", list(range(100)), 5, lambda _: None)
    made.blocks = RequestBlocks(list(blocks), [0] * len(blocks), [0] * len(blocks))
    return made


def test_blocks_align_at_their_least_common_multiple_and_states_do_not_count():
    assert align_tokens(config(16, 24, states=2)) == 48


def test_a_chunk_ends_at_the_next_checkpoint():
    half = Half(places=(32, 64, 96))
    hooks, one = transfers(half, config(16, states=1)), request([1], [2])
    assert hooks.first_chunk(one, 100) == 32
    one.num_computed_tokens = 40
    assert hooks.first_chunk(one, 100) == 24
    assert [hooks.cut(one, computed, 100) for computed in (0, 31, 32, 95, 96)] == [32, 1, 32, 1, 100]
    assert hooks.cut(one, 33, 5) == 5


def test_where_there_are_no_states_chunks_are_not_cut():
    hooks, one = transfers(Half(places=(32,)), config(16)), request([1])
    assert hooks.first_chunk(one, 100) == 100
    assert hooks.cut(one, 0, 100) == 100


def test_a_step_is_told_once_something_came_of_it():
    half = Half(due={"r": 40, "other": 0})
    hooks, one = transfers(half, config(16, states=2)), request([5, 6, 7], [8], [9])

    def tell(start: int, end: int, **given) -> list[tuple]:
        half.told = []
        step = EngineStep(chunks=[ScheduledChunk("r", 3, start, list(range(start, end)), False)], **given)
        hooks.launched(step, {"r": one})
        return half.told

    assert tell(0, 20, new_rows=[(3, [[5, 6], [8], [9]])]) == [("computed", "r", 20, [[5, 6], [8], [9]])]
    assert tell(20, 25) == []
    assert tell(25, 33, grown_rows=[(3, [[7], [], []])]) == [("computed", "r", 33, [[7], [], []])]
    assert tell(33, 39, grown_rows=[(4, [[7], [], []])]) == []
    assert tell(39, 41) == [("computed", "r", 41, None)]
    # The states come first, and at whole blocks of the others only.
    assert tell(41, 48) == [
        ("state", "r", 1, 48, 8),
        ("state", "r", 2, 48, 9),
        ("computed", "r", 48, None),
    ]

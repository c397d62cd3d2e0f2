"""The pool and the manager: no id is lost, none is given twice, hits are valid for every group."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, LocalError
from kvconnect.node.block_manager import BlockManager, BlockPool, PrefixHashes
from kvconnect.node.kv_cache import build_cache_config
from kvconnect.node.models import build_model
from tests.node.node_harness import answer_of, check_pool, make_client, make_prompt

CONFIGS = {
    name: build_cache_config(build_model(name).layout(None, 1024), 64)
    for name in ("gqa", "sliding", "hybrid")
}


TOKENS = st.lists(st.integers(0, 3), max_size=40)


def hashes(token_ids: list[int], block_tokens: int, *cuts: int) -> list[bytes]:
    """Those of all whole blocks, also where they come in pieces."""
    made = PrefixHashes(block_tokens)
    for cut in sorted(cuts):
        made.extend_to(token_ids[:cut])
    made.extend_to(token_ids)
    return made


@given(TOKENS, TOKENS, st.integers(1, 7), st.integers(1, 4), st.lists(st.integers(0, 40), max_size=4))
def test_hashes_are_equal_exactly_where_all_tokens_up_to_them_are(one, other, size, times, cuts):
    found = hashes(one, size, *cuts)
    assert len(found) == len(one) // size
    for number, (a, b) in enumerate(zip(found, hashes(other, size), strict=False), 1):
        assert (a == b) == (one[: number * size] == other[: number * size])
    # Blocks of another size have the same hash where they end.
    assert hashes(one, size * times) == found[times - 1 :: times]


def test_blocks_are_given_out_and_released_once_and_never_the_null_block_or_reserved_ones():
    pool = BlockPool(10, reserved=3)
    assert pool.total == 6
    taken = pool.allocate(6)
    assert sorted(taken) == [4, 5, 6, 7, 8, 9]
    with pytest.raises(LocalError, match="1 blocks wanted, 0 of 6"):
        pool.allocate(1)
    pool.release(taken)
    with pytest.raises(LocalError, match="has no holder"):
        pool.release(taken[:1])
    with pytest.raises(ConfigError, match="at least 1"):
        BlockPool(1)


def test_known_content_is_evicted_last_and_oldest_first():
    pool = BlockPool(6)
    first, second, plain = pool.allocate(3)
    pool.remember((0, b"first"), first)
    pool.remember((0, b"second"), second)
    pool.release([first])
    pool.release([second])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    assert set(pool.allocate(2)).isdisjoint({first, second})
    assert pool.allocate(1) == [first]
    assert pool.find((0, b"first")) is None
    assert pool.find((0, b"second")) == second
    check_pool(pool)


# A token id of a tiny alphabet, so that prefixes are shared; lengths around several blocks.
actions = st.lists(
    st.tuples(st.sampled_from(["start", "grow", "free"]), st.integers(0, 7), st.integers(1, 400)), max_size=40
)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@settings(max_examples=60, deadline=None)
@given(actions=actions)
def test_blocks_are_never_lost_or_shared_by_accident(name, actions):
    pool = BlockPool(64, reserved=2)
    manager = BlockManager(CONFIGS[name], pool, max_step_tokens=64)
    live = {}
    for action, key, amount in actions:
        if action == "start" and key not in live:
            tokens = [key % 2] * 200 + [key] * 200
            blocks = manager.new_request()
            hit = manager.find_hit(blocks, tokens)
            end = min(400, hit.num_tokens + amount)
            free = pool.num_free
            grown = manager.grow(blocks, hit, hit.num_tokens, end)
            if grown is None:
                assert (pool.num_free, blocks.ids) == (free, [[] for _ in blocks.ids])
            if grown is not None:
                live[key] = (tokens, blocks, end, hit.num_tokens)
                manager.remember(blocks, SimpleNamespace(token_ids=tokens), end)
        elif action == "grow" and key in live:
            tokens, blocks, computed, hit_tokens = live[key]
            end = min(400, computed + min(amount, 64))
            if manager.grow(blocks, None, computed, end) is not None:
                live[key] = (tokens, blocks, end, hit_tokens)
                manager.remember(blocks, SimpleNamespace(token_ids=tokens), end)
        elif action == "free" and key in live:
            manager.free(live.pop(key)[1])
        check_pool(pool)
        in_use = {b for _, blocks, _, _ in live.values() for ids in blocks.ids for b in ids if b}
        assert pool.num_held == len(in_use)
        for _, blocks, computed, _ in live.values():
            for ids, group in zip(blocks.ids, CONFIGS[name].groups, strict=True):
                own = [b for b in ids if b]
                assert len(own) == len(set(own))
                if group.retention.sees_all:
                    assert len(own) == -(-computed // group.block_size)
        for key, (tokens, blocks, _, _) in live.items():
            for other, (tokens2, blocks2, _, _) in live.items():
                if key >= other:
                    continue
                for index, (ids, ids2) in enumerate(zip(blocks.ids, blocks2.ids, strict=True)):
                    size = CONFIGS[name].groups[index].block_size
                    for block_id in (set(ids) & set(ids2)) - {0}:
                        place = ids.index(block_id)
                        assert place == ids2.index(block_id)
                        assert tokens[: (place + 1) * size] == tokens2[: (place + 1) * size]
    for _, blocks, _, _ in live.values():
        manager.free(blocks)
    check_pool(pool)
    assert pool.num_free == pool.total


@pytest.mark.parametrize(
    ("name", "hit"), [("gqa", 192), ("mla", 192), ("sliding", 192), ("mixed", 128), ("hybrid", 0)]
)
def test_a_repeated_prompt_reuses_full_blocks_and_gives_the_same_tokens(name, hit):
    client = make_client(model=name, max_num_batched_tokens=64)
    prompt = make_prompt(193)
    expected = client.complete(prompt)
    assert client.complete(prompt) == expected
    assert client.last("request-1").cached_tokens == hit
    other = [*prompt[:100], *make_prompt(50, seed=9)]
    assert client.complete(other) == answer_of(other, model=name)
    assert client.held == 0


def test_a_window_hit_needs_only_its_tail():
    manager = make_client(model="sliding", max_num_batched_tokens=32).engine.scheduler.manager
    tokens = make_prompt(400)
    blocks = manager.new_request()
    for start in range(0, 400, 32):
        assert manager.grow(blocks, None, start, min(400, start + 32)) is not None
        manager.remember(blocks, SimpleNamespace(token_ids=tokens), min(400, start + 32))
    assert blocks.ids[1][0] == 0
    manager.free(blocks)
    # Window blocks at the start of the sequence are given to somebody else.
    gone = manager.find_hit(manager.new_request(), tokens)
    assert gone.num_tokens == 384
    assert gone.blocks[0][0] != 0
    assert gone.blocks[1][:18] == (0,) * 18
    assert all(gone.blocks[1][18:])

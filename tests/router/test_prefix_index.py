"""The index of what nodes have, against sets of prefixes that are kept as they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.router.prefix_index import (
    AllBlocksCleared,
    Hit,
    PrefixIndex,
    RemovedBlocks,
    StoredBlocks,
    prefixes_of,
)


def stored(hashes, parent, token_ids, block_size, extra_keys=None, **more):
    return StoredBlocks(hashes, parent, token_ids, block_size, extra_keys=extra_keys, **more)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 8), st.integers(0, 6))
def test_a_prefix_has_one_hash_however_it_came_and_no_other_has_it(tokens, size, cut):
    whole = prefixes_of(tokens, size)
    assert len(whole) == len(tokens) // size
    cut = min(cut, len(whole))
    first = prefixes_of(tokens[: cut * size], size)
    before = first[-1] if cut else 0
    assert first + prefixes_of(tokens[cut * size :], size, before=before) == whole
    assert len({*whole, *prefixes_of([token + 1 for token in tokens], size)}) == 2 * len(whole)


class Reference:
    """One node: all tokens up to the end of each block that it has, by tier."""

    def __init__(self, size):
        self.size, self.tiers = size, {True: set(), False: set()}

    def hit(self, tokens):
        ends = range(self.size, len(tokens) + 1, self.size)
        device = below = 0
        for end in ends:
            if tuple(tokens[:end]) not in self.tiers[True]:
                break
            device = end
        for end in ends:
            if tuple(tokens[:end]) not in self.tiers[True] | self.tiers[False]:
                break
            below = end
        return Hit(device, below)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)
moves = st.tuples(st.integers(0, 1), st.booleans(), st.sampled_from(["store", "remove", "clear"]), tokens)


@settings(max_examples=200)
@given(st.lists(moves, max_size=30), tokens, st.integers(1, 3))
def test_nodes_have_what_they_published(steps, asked, cut):
    media = {True: "GPU", False: "CPU"}
    index, nodes = PrefixIndex(), {"0": Reference(2), "1": Reference(4)}
    hashed = lambda node, prefix: hash((node, *prefix)) % 2**64  # noqa: E731
    for number, on_device, verb, prompt in steps:
        node, name = nodes[str(number)], str(number)
        ends = list(range(node.size, len(prompt) + 1, node.size))
        if verb == "clear":
            if on_device:
                index.apply(name, AllBlocksCleared())
                node.tiers[True] = set()
            else:
                index.forget(name)
                node.tiers = {True: set(), False: set()}
        elif verb == "remove":
            gone = [hashed(name, prompt[:end]) for end in ends[-cut:]]
            index.apply(name, RemovedBlocks(gone, media[on_device]))
            node.tiers[on_device] -= {tuple(prompt[:end]) for end in ends[-cut:]}
        else:
            # What is published follows on what the node has already, or on nothing.
            known = [end for end in ends if tuple(prompt[:end]) in node.tiers[True] | node.tiers[False]]
            start = known[-1] if known else 0
            new = [end for end in ends if end > start]
            if not new:
                continue
            # In one event, or in several of which each follows on the one before.
            for some in filter(None, (new[:cut], new[cut:])):
                event = stored(
                    [hashed(name, prompt[:end]) for end in some],
                    hashed(name, prompt[: some[0] - node.size]) if some[0] > node.size else None,
                    prompt[some[0] - node.size : some[-1]],
                    node.size,
                    medium=media[on_device],
                )
                index.apply(name, event)
            node.tiers[on_device] |= {tuple(prompt[:end]) for end in new}
    for prompt in (asked, *(step[3] for step in steps)):
        assert index.hits(nodes, prompt) == {name: node.hit(prompt) for name, node in nodes.items()}
    assert len(index) == sum(len(tier) for node in nodes.values() for tier in node.tiers.values())


def test_extra_keys_tell_equal_tokens_apart():
    index = PrefixIndex()
    index.apply("a", stored([1, 2], None, [5] * 8, 4, [["lora", "salt"], ["lora"]]))
    index.apply("b", stored([1, 2], None, [5] * 8, 4))
    ask = lambda *keys: {node: hit.num_tokens for node, hit in index.hits("ab", [5] * 8, keys).items()}  # noqa: E731
    assert ask(("lora", "salt"), ("lora",)) == {"a": 8, "b": 0}
    assert ask(("other", "salt"), ("lora",)) == {"a": 0, "b": 0}
    assert ask() == {"a": 0, "b": 8}


def test_what_cannot_be_placed_is_left_out_and_counted():
    index = PrefixIndex(most=3)
    index.apply("a", stored([2], 1, [0] * 4, 4))
    assert (len(index), index.num_left_out) == (0, 1)
    index.apply("a", stored([1, 2, 3], None, [0] * 12, 4))
    index.apply("a", stored([4], 3, [0] * 4, 4))
    assert (len(index), index.num_left_out) == (3, 2)
    index.apply("a", RemovedBlocks([3]))
    index.apply("a", stored([b"long hash, of which the end counts"], 2, [1] * 4, 4))
    assert index.hits("a", [0] * 8 + [1] * 4) == {"a": Hit(12, 12)}


@pytest.mark.parametrize(("tokens", "size"), [([0] * 4, 0), ([0] * 5, 4), ([0] * 3, 4)])
def test_an_event_that_is_none_is_not_taken(tokens, size):
    index = PrefixIndex()
    index.apply("a", stored([1], None, tokens, size))
    assert len(index) == 0


def test_of_several_cache_groups_one_counts():
    index = PrefixIndex()
    index.apply("a", stored([1], None, [0] * 4, 4, group_idx=1))
    index.apply("a", stored([2], None, [0] * 8, 8, group_idx=0))
    index.apply("a", RemovedBlocks([1], group_idx=0))
    assert index.hits("a", [0] * 8) == {"a": Hit(4, 4)}

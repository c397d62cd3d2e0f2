"""The index of what nodes have, against sets of prefixes that are kept as they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.router.hash_table import HashTable, mixed
from kvconnect.router.prefix_index import Hit, PrefixIndex, StoredRun, prefixes_of

numbers = st.integers(0, 2**64 - 1)
# Few keys, so that they meet, and those that the table uses itself.
keys = st.one_of(st.integers(0, 40), numbers)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "remove"]), st.lists(st.tuples(keys, numbers), max_size=80)))
)
def test_a_table_has_what_a_dictionary_has(steps):
    table, known = HashTable(), {}
    # The table's two marks are the keys after them.
    name = lambda key: key if key > 1 else key + 2  # noqa: E731
    for verb, entries in steps:
        found = np.array([key for key, _ in entries], dtype=np.uint64)
        if verb == "put":
            unique = {name(key): value for key, value in reversed(entries)}
            table.put(
                np.array(list(unique), dtype=np.uint64), np.array(list(unique.values()), dtype=np.uint64)
            )
            known.update(unique)
        else:
            table.remove(found)
            for key, _ in entries:
                known.pop(name(key), None)
        asked = np.array([*found.tolist(), *known], dtype=np.uint64)
        values, is_known = table.get(asked)
        assert len(table) == len(known)
        for key, value, is_there in zip(asked.tolist(), values.tolist(), is_known.tolist(), strict=True):
            assert is_there == (name(key) in known)
            assert value == known.get(name(key), 0)


def test_a_table_grows_and_shrinks_with_what_it_has():
    table, rng = HashTable(), np.random.default_rng(1)
    every = rng.integers(2, 2**63, 50_000, dtype=np.uint64)
    for part in np.array_split(every, 7):
        table.put(part, part + np.uint64(1))
    values, is_known = table.get(every)
    assert is_known.all()
    assert (values == every + np.uint64(1)).all()
    table.remove(every[::2])
    assert len(table) == 25_000
    assert table.get(every)[1].tolist() == [False, True] * 25_000
    # Places of what was removed are used again, sooner or later.
    for _ in range(20):
        some = rng.integers(2, 2**63, 5_000, dtype=np.uint64)
        table.put(some, some)
        table.remove(some)
    assert len(table._keys) <= 1 << 18


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 8), st.integers(0, 6))
def test_a_prefix_has_one_number_however_it_came(tokens, size, cut):
    whole = prefixes_of(tokens, size)
    assert len(whole) == len(tokens) // size
    cut = min(cut, len(whole))
    first = prefixes_of(tokens[: cut * size], size)
    before = int(first[-1]) if cut else 0
    assert [*first, *prefixes_of(tokens[cut * size :], size, before=before)] == [*whole]
    value = 0
    for at, token in enumerate(tokens[: len(whole) * size], 1):
        value = (value * 0x9E3779B97F4A7C15 + int(mixed(np.array([token + 1], dtype=np.uint64))[0])) % 2**64
        if at % size == 0:
            assert value == int(whole[at // size - 1])


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
    index, nodes = PrefixIndex(), {"0": Reference(2), "1": Reference(4)}
    hashed = lambda node, prefix: hash((node, *prefix)) % 2**64  # noqa: E731
    for number, on_device, verb, prompt in steps:
        node, name = nodes[str(number)], str(number)
        ends = list(range(node.size, len(prompt) + 1, node.size))
        if verb == "clear":
            index.cleared(name, on_device=on_device)
            node.tiers[on_device] = set()
        elif verb == "remove":
            index.removed(name, [hashed(name, prompt[:end]) for end in ends[-cut:]], on_device=on_device)
            node.tiers[on_device] -= {tuple(prompt[:end]) for end in ends[-cut:]}
        else:
            # What is published follows on what the node has already, or on nothing.
            known = [end for end in ends if tuple(prompt[:end]) in node.tiers[True] | node.tiers[False]]
            start = known[-1] if known else 0
            new = [end for end in ends if end > start]
            if not new:
                continue
            # In one run, or in several of which each follows on the one before.
            runs = [
                StoredRun(
                    [hashed(name, prompt[:end]) for end in ends],
                    hashed(name, prompt[: ends[0] - node.size]) if ends[0] > node.size else None,
                    prompt[ends[0] - node.size : ends[-1]],
                    node.size,
                )
                for ends in (new[:cut], new[cut:])
                if ends
            ]
            index.stored(name, runs, on_device=on_device)
            node.tiers[on_device] |= {tuple(prompt[:end]) for end in new}
    for prompt in (asked, *(step[3] for step in steps)):
        assert index.hits(nodes, prompt) == {name: node.hit(prompt) for name, node in nodes.items()}
    assert len(index) == sum(len(tier) for node in nodes.values() for tier in node.tiers.values())


def test_extra_keys_tell_equal_tokens_apart():
    index = PrefixIndex()
    index.stored("a", [StoredRun([1, 2], None, [5] * 8, 4, [("lora", "salt"), ("lora",)])])
    index.stored("b", [StoredRun([1, 2], None, [5] * 8, 4)])
    ask = lambda *keys: {node: hit.num_tokens for node, hit in index.hits("ab", [5] * 8, keys).items()}  # noqa: E731
    assert ask(("lora", "salt"), ("lora",)) == {"a": 8, "b": 0}
    assert ask(("other", "salt"), ("lora",)) == {"a": 0, "b": 0}
    assert ask() == {"a": 0, "b": 8}


def test_what_cannot_be_placed_is_left_out_and_counted():
    index = PrefixIndex(most=3)
    index.stored("a", [StoredRun([2], 1, [0] * 4, 4)])
    assert (len(index), index.num_left_out) == (0, 1)
    index.stored("a", [StoredRun([1, 2, 3], None, [0] * 12, 4)])
    index.stored("a", [StoredRun([4], 3, [0] * 4, 4)])
    assert (len(index), index.num_left_out) == (3, 2)
    index.removed("a", [3])
    index.stored("a", [StoredRun([b"long hash, of which the end counts"], 2, [1] * 4, 4)])
    assert index.hits("a", [0] * 8 + [1] * 4) == {"a": Hit(12, 12)}


@pytest.mark.parametrize(("tokens", "size"), [([0] * 4, 0), ([0] * 5, 4), ([0] * 3, 4)])
def test_an_event_that_is_none_is_not_taken(tokens, size):
    index = PrefixIndex()
    index.stored("a", [StoredRun([1], None, tokens, size)])
    assert len(index) == 0


def test_of_several_cache_groups_one_counts():
    index = PrefixIndex()
    index.stored("a", [StoredRun([1], None, [0] * 4, 4)], group=1)
    index.stored("a", [StoredRun([2], None, [0] * 8, 8)], group=0)
    index.removed("a", [1], group=0)
    assert index.hits("a", [0] * 8) == {"a": Hit(4, 4)}

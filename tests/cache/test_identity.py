"""What two identities differ in, by name and with both values."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache import identity as i
from kvconnect.cache.identity import Identity
from kvconnect.peer.agreement import other_identity, other_weights
from kvconnect.peer.messages import CacheMeaning

EQUAL = [entry.name for entry in i.ENTRIES if entry.rule is i.Rule.EQUAL and entry.name != i.WEIGHTS]
OTHERS = [entry.name for entry in i.ENTRIES if entry.rule is not i.Rule.EQUAL]
ALL = {name: {"field": f"{name} 1"} for name in [*EQUAL, *OTHERS]} | {i.WEIGHTS: {"files": "f"}}
BASE = Identity.of(ALL)


def test_one_differs_in_nothing_from_itself():
    assert i.differences(BASE, BASE) == []
    assert i.marks_differ(BASE.marks, BASE.marks) == []


@pytest.mark.parametrize("name", EQUAL)
def test_an_entry_that_must_be_equal_is_named_with_both_values(name):
    other = BASE.replace(**{name: {"field": "2"}})
    flags = {entry.name: entry.flags for entry in i.ENTRIES}[name]
    expected = f"{name}.field is {name} 1 on the prefill node, 2 on the decode node ({flags})"
    assert i.differences(BASE, other) == [expected]
    assert i.marks_differ(BASE.marks, other.marks) == [name]
    assert other.facts != BASE.facts


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_bridged_is_no_difference_between_peers_and_is_one_on_disk(name):
    other = BASE.replace(**{name: {"field": "2"}})
    assert i.differences(BASE, other) == []
    assert i.marks_differ(BASE.marks, other.marks) == []
    assert other.facts != BASE.facts


def test_what_is_not_on_the_list_counts_as_different():
    other = BASE.replace(**{"of tomorrow": "x"})
    assert i.differences(BASE, other) == ["of tomorrow is none on the prefill node, x on the decode node"]


def test_all_that_differs_is_named_at_once():
    other = BASE.replace(configuration={"a": 1, "b": 2}, rotary="r", weights={"files": "g"})
    found = i.differences(BASE, other)
    assert [one.partition(" is ")[0] for one in found] == [
        *("configuration.a", "configuration.b", "configuration.field", "rotary", "rotary.field"),
        "weights.files",
    ]
    assert i.shown([*found, *found]).endswith("; and 6 more")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (i.default("2"), None, True),
        (i.default("2"), "2", True),
        (i.default("2"), i.default("3"), False),
        (i.default("2"), "3", False),
        ("2", None, False),
        (i.noted("2", "a"), i.noted("2", "b"), True),
        (i.noted("2", "a"), i.noted("3", "a"), False),
    ],
)
def test_a_default_equals_no_field_and_a_note_is_not_compared(one, other, same):
    sides = [Identity.of({"configuration": {} if text is None else {"f": text}}) for text in (one, other)]
    for pair in (sides, sides[::-1]):
        assert (i.differences(*pair) == []) is same


SIDES = "float16 on the prefill node, bfloat16 on the decode node"


def test_a_cache_that_follows_the_models_dtype_is_no_second_difference():
    sides = [Identity.of({"dtype": name, "cache dtype": name}) for name in ("float16", "bfloat16")]
    assert i.differences(*sides) == [f"dtype is {SIDES} (--dtype)"]
    by_itself = sides[0].replace(**{"cache dtype": "fp8_e4m3"})
    assert [one.partition(" is ")[0] for one in i.differences(by_itself, sides[1])] == [
        "dtype",
        "cache dtype",
    ]
    alike = [Identity.of({"dtype": "bfloat16", "cache dtype": name}) for name in ("float16", "bfloat16")]
    assert i.differences(*alike) == [f"cache dtype is {SIDES} (--kv-cache-dtype)"]


def served(folder: str, **values) -> Identity:
    return Identity.of({"model": i.noted("Qwen3ForCausalLM", folder), **values})


def test_models_are_named_as_they_were_given_to_the_servers_where_they_differ():
    small, large = (
        served("/m/small", configuration={"width": 1}),
        served("/m/large", configuration={"width": 2}),
    )
    for refusal in (
        other_identity(CacheMeaning(small, None, 1), CacheMeaning(large, None, 1)),
        other_weights(
            CacheMeaning(served("/m/small", weights={"files": "f"}), None, 1),
            CacheMeaning(served("/m/large", weights={"files": "g"}), None, 1),
        ),
    ):
        assert (
            "model is /m/small (Qwen3ForCausalLM) on the prefill node, /m/large (Qwen3ForCausalLM) on the "
            "decode node (--model); " in refusal.text
        )
    moved = served("/elsewhere", configuration={"width": 1})
    assert other_identity(CacheMeaning(small, None, 1), CacheMeaning(moved, None, 1)) is None
    assert not i.marks_differ(small.marks, moved.marks)
    assert small.facts == moved.facts, "the disk keeps what it has"


FILES, MEMORY, ROWS = {"files": "f"}, {"tensors": "t over 1 ranks"}, {"embeddings": "bfloat16 e"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({**FILES, **MEMORY}, {**FILES, "tensors": "t over 2 ranks"}, True),
        ({**FILES, **MEMORY}, {"files": "g", **MEMORY}, False),
        ({**FILES, **MEMORY}, MEMORY, True),
        ({**FILES, "tensors": "u"}, MEMORY, False),
        (FILES, MEMORY, False),
        (FILES, {}, False),
        ({**FILES, **ROWS}, {**FILES, "embeddings": "bfloat16 x"}, False),
        ({**FILES, **ROWS}, {**FILES, "embeddings": "float16 x"}, True),
        ({**FILES, **ROWS}, FILES, True),
        ({}, {}, True),
    ],
)
def test_weights_are_the_same_by_files_or_else_by_memory_and_by_every_row(one, other, same):
    for pair in ((one, other), (other, one)):
        assert (i.weights_differ(*pair) == []) is same


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.text(max_size=20), st.dictionaries(st.text(max_size=20), values, max_size=3), max_size=4
    )
)
def test_any_values_travel(entries):
    made = Identity.of(entries)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Identity) == made
    assert i.differences(made, made) == []

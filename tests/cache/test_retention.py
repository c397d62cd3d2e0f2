"""The rules of what layers see, against a reference that asks of every two positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvconnect.cache.retention import FULL, Chunked, Draft, Full, Retention, State, Window, joined, parse
from kvconnect.cache.specs import AttentionSpec, KVCacheGroup
from kvconnect.errors import LayoutError

LONGEST = 60


@dataclass(frozen=True)
class Sinks(Retention):
    """A kind that the package does not have: the ``first`` tokens, and the ``last``, itself among them."""

    first: int
    last: int

    def seen(self, position):
        begin = max(self.first, position - self.last + 1)
        return joined((range(min(self.first, position)), range(begin, max(begin, position))))


MADE_UP: dict[type[Retention], Callable[[Any, int, int], bool]] = {}
"""What ``sees`` is for rules of other tests."""


def sees(rule: Retention, position: int, token: int) -> bool:
    """Whether computing ``position`` reads what is kept of an earlier token."""
    match rule:
        case Full():
            return True
        case Window():
            # vLLM's: the window of W tokens ends with the position itself.
            return position - token < rule.tokens
        case Chunked():
            return position // rule.tokens == token // rule.tokens
        case State():
            return token == position - 1
        case Sinks():
            return token < rule.first or position - token < rule.last
        case Draft():
            return sees(rule.of, position, token)
    return MADE_UP[type(rule)](rule, position, token)


SIZES = st.integers(1, 20)
RULES = st.one_of(
    st.just(FULL),
    st.just(State()),
    st.builds(Window, SIZES),
    st.builds(Chunked, SIZES),
    st.builds(Sinks, SIZES, SIZES),
)
RULES = RULES | st.builds(Draft, RULES)


def tokens_of(parts) -> set[int]:
    """Tokens of ranges, which must be in order, apart and not empty."""
    found = [token for part in parts for token in part]
    assert found == sorted(set(found))
    assert all(parts)
    assert all(a.stop < b.start for a, b in itertools.pairwise(parts))
    return set(found)


@given(RULES, st.integers(0, LONGEST))
def test_what_a_token_sees_is_what_the_reference_says(rule, position):
    expected = {token for token in range(position) if sees(rule, position, token)}
    assert tokens_of(rule.seen(position)) == expected
    assert rule.sees_all == (isinstance(rule, Full) or (isinstance(rule, Draft) and rule.of == FULL))
    if rule.sees_previous and position:
        assert position - 1 in expected
    # What is out of sight stays so: by this law blocks are freed.
    for earlier in range(position):
        gone = set(range(earlier)) - tokens_of(rule.seen(earlier))
        assert not gone & expected


@given(RULES, st.integers(0, LONGEST), st.integers(0, 3))
def test_what_is_kept_is_what_the_next_token_or_a_later_one_reads(rule, num_tokens, replay):
    begin = max(0, num_tokens - replay)
    read = {
        token
        for position in range(begin, num_tokens + 45)
        for token in range(num_tokens)
        if token < position and sees(rule, position, token)
    }
    kept = tokens_of(rule.kept(num_tokens, replay))
    assert read <= kept
    # Tokens that are computed again are kept, whether or not a later one sees them.
    assert kept - read <= set(range(begin, num_tokens))


@given(RULES, st.integers(0, LONGEST), st.integers(1, 9), st.integers(0, 2), st.integers(0, 12))
def test_blocks_are_kept_if_any_of_their_tokens_is(rule, num_tokens, size, replay, first):
    kept = {token // size for token in tokens_of(rule.kept(num_tokens, replay))}
    assert tokens_of(rule.blocks(num_tokens, size, replay)) == kept
    ids = [100 + position for position in range(first, first + 15)]
    expected = [id_ if id_ - 100 in kept else 0 for id_ in ids]
    whole = rule.sees_all or not rule.by_position
    assert list(rule.only_kept(ids, first, num_tokens, size, replay)) == (ids if whole else expected)
    freed = rule.num_freed(num_tokens, size)
    assert not {token // size for token in tokens_of(rule.seen(num_tokens))} & set(range(freed))
    assert freed <= num_tokens // size


@example(Sinks(1, 1), 7, 3, 2)
@given(RULES, st.integers(1, LONGEST), st.integers(1, 9), st.integers(0, 20))
def test_no_step_holds_more_blocks_than_the_most(rule, num_tokens, size, step):
    most = rule.most_blocks(num_tokens, size, step)
    for start in range(num_tokens):
        held = tokens_of(rule.seen(start)) | set(range(start, min(start + step, num_tokens)))
        assert len({token // size for token in held}) <= most
    assert most <= -(-num_tokens // size)
    seen = [tokens_of(rule.seen(position)) for position in range(num_tokens + 1)]
    assert len(seen[rule.widest(num_tokens)]) == max(map(len, seen))


def test_the_two_first_tokens_of_a_window_are_one_apart():
    assert Window(4).kept(7) == (range(4, 7),)  # vLLM's example: the next token is at 7, and sees 4 to 7
    assert Window(4).kept(7, replay=1) == (
        range(3, 7),
    )  # the last of the 7 is computed again, and sees 3 to 6
    assert Chunked(8).kept(13) == (range(8, 13),)  # vLLM's examples of local chunks
    assert Chunked(8).kept(8) == ()
    assert Chunked(8).kept(7) == (range(7),)
    assert Chunked(8).kept(8, replay=1) == (range(8),)


@given(RULES.filter(lambda rule: not isinstance(rule, Draft)))
def test_a_rule_is_known_by_its_text(rule):
    assert parse(rule.text) == rule


NO_RULES = [
    "", "Window", "Window 0", "Window -1", "Window 1 2", "Window 2147483648", "Window 1.5", "Window \u0663",
    "Window " + "9" * 5000, "W" * 10**6, "Full 1", "Draft 1", "Retention", "object",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_RULES, ids=range(len(NO_RULES)))
def test_a_text_that_is_no_rule_is_refused(text):
    with pytest.raises(LayoutError, match="no rule") as error:
        parse(text)
    assert len(str(error.value)) < 400


def test_layers_that_share_blocks_must_see_the_same():
    specs = {
        "a": AttentionSpec(16, 1, 8, torch.float16),
        "b": AttentionSpec(16, 1, 8, torch.float16, retention=Window(8)),
    }
    with pytest.raises(LayoutError, match="see different tokens: Full in blocks of 16, Window 8 in"):
        KVCacheGroup.of(specs)

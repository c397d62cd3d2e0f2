"""What hits need and what is kept for them, against a cache that is written down token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.retention import Chunked, Draft, Full, State, Window
from kvconnect.errors import ConfigError
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from tests.cache.test_retention import Sinks
from tests.offload.endless import Endless


@st.composite
def mixes(draw):
    """Random groups and their alignment."""
    align = draw(st.sampled_from([2, 4, 8, 12]))
    sizes = [size for size in range(1, align + 1) if align % size == 0]
    groups = []
    for index in range(draw(st.integers(1, 3))):
        tokens = st.integers(1, 3 * align)
        rule = draw(
            st.one_of(
                st.just(Full()),
                st.just(State()),
                st.builds(Window, tokens),
                st.builds(Chunked, tokens),
                st.builds(Sinks, tokens, tokens),
            )
        )
        is_draft = draw(st.booleans()) and draw(st.booleans())
        size = draw(st.sampled_from(sizes)) if rule.by_position else align
        groups.append(HitGroup(index, size, Draft(rule) if is_draft else rule))
    return tuple(groups), align


def keep(requirements, checkpoint, tokens):
    """What ``HitRequirements`` keeps of a prompt: group, position, and the tokens that its name covers."""
    kept = set()
    spans = requirements.kept(requirements.boundaries(len(tokens), checkpoint))
    whole = requirements.last_boundary(len(tokens))
    for group in requirements.groups:
        ranges = [range(whole // group.block_tokens)] if group.is_whole else spans[group.group]
        hashes = [
            tuple(tokens[: end * group.block_tokens])
            for end in range(1, len(tokens) // group.block_tokens + 1)
        ]
        for span in ranges:
            names = group.names(hashes, span.start, span.stop)
            assert len(names) == len(span)
            kept |= {(group.group, at, name) for at, name in zip(span, names, strict=True)}
    return kept


def has_of(requirements, kept, tokens):
    by_group = {group.group: group for group in requirements.groups}

    def has(index, position):
        group = by_group[index]
        hashes = [
            tuple(tokens[: end * group.block_tokens])
            for end in range(1, len(tokens) // group.block_tokens + 1)
        ]
        return (index, position, *group.names(hashes, position, position + 1)) in kept

    return has


def hit(requirements, max_tokens, has, start=0):
    """The longest hit, where ``has`` says of a group and a position whether its block is known."""

    def known(group, first, end):
        return [has(group.group, position) for position in range(first, end)]

    return requirements.hit(start, max_tokens, known)[0]


@settings(max_examples=60, deadline=None)
@given(mixes(), st.integers(0, 30), st.data())
def test_what_is_kept_and_hit_is_what_an_endless_cache_gives(mix, checkpoint, data):
    groups, align = mix
    requirements, endless = HitRequirements(groups, align), Endless(groups, align, checkpoint)
    kept = set()
    prompts = []
    for _ in range(data.draw(st.integers(1, 3))):
        shared = data.draw(st.integers(0, len(prompts[-1]))) if prompts else 0
        fresh = data.draw(st.integers(0, 4 * align))
        prompt = (prompts[-1][:shared] if prompts else []) + [100 * len(prompts) + n for n in range(fresh)]
        prompts.append(prompt)
        kept |= keep(requirements, checkpoint, prompt)
        endless.keep(prompt)
        assert kept == endless.kept
    for prompt in [*prompts, prompts[-1] + [7] * (align + 3)]:
        for start in range(0, len(prompt), align):
            assert hit(
                requirements, len(prompt) - 1, has_of(requirements, kept, prompt), start
            ) == endless.hit(prompt, start)


@given(mixes(), st.integers(0, 4), st.integers(0, 4))
def test_what_is_at_hand_is_not_needed(mix, boundary, start):
    groups, align = mix
    endless = Endless(groups, align, 0)
    boundary, start = boundary * align, start * align
    for group in groups:
        assert [at for part in group.needed(boundary, start) for at in part] == [
            position
            for position in range(start // group.block_tokens, boundary // group.block_tokens)
            if endless.reads(group, position, boundary)
        ]


@pytest.mark.parametrize("window", range(1, 40))
def test_the_least_rows_are_what_the_longest_tail_needs(window):
    for rule in (Window(window), Chunked(4 * window), Sinks(window, 5)):
        group = HitGroup(0, 4, rule)
        requirements = HitRequirements((group,), 8)
        needed = (group.needed(boundary) for boundary in range(8, 800, 8))
        most = max(1, *(sum(map(len, parts)) for parts in needed))
        # Of a chunk no boundary need see the most.
        assert requirements.least_rows()[0] == most or (
            requirements.least_rows()[0] > most and isinstance(rule, Chunked)
        )


def test_a_hit_of_fewer_tokens_than_are_ever_restored_is_not_the_shortest():
    requirements = HitRequirements((HitGroup(0, 4, Full()), HitGroup(1, 8, State())), 8)
    assert requirements.least_rows() == {0: 2, 1: 1}
    assert requirements.least_rows(min_tokens=17) == {0: 6, 1: 1}


def test_block_sizes_that_do_not_divide_the_alignment_are_named():
    with pytest.raises(ConfigError, match="blocks of 16 tokens.* aligned to 24.*Mamba.*prefix caching"):
        HitRequirements((HitGroup(0, 16, Full()),), 24)
    with pytest.raises(ConfigError, match="0 groups"):
        HitRequirements((), 16)

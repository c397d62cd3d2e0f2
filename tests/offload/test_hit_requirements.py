"""What hits need and what is kept for them, against a cache that is written down token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.retention import Chunked, Draft, Full, State, Window
from kvconnect.errors import ConfigError
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from tests.cache.test_retention import Sinks, sees


class Oracle:
    """An endless cache of token lists. Shares nothing with the code but the description of groups."""

    def __init__(self, groups, align, checkpoint):
        self.groups, self.align, self.checkpoint = groups, align, checkpoint
        self.kept = set()

    def key(self, group, position, tokens):
        """What a block is known by: all tokens that its bytes depend on, in whole blocks; None if unknown."""
        end = (position + 1) * group.block_tokens + (group.block_tokens if group.is_draft else 0)
        return (group.group, position, tuple(tokens[:end])) if end <= len(tokens) else None

    def reads(self, group, position, boundary):
        """Whether computing token ``boundary`` reads a block, given that all before it are at hand."""
        size = group.block_tokens
        first, last = position * size, (position + 1) * size - 1
        tokens = range(first, last + 1)
        return last < boundary and any(sees(group.retention, boundary, token) for token in tokens)

    def is_possible(self, boundary, num_tokens):
        drafts = [group.block_tokens for group in self.groups if group.is_draft]
        return boundary % self.align == 0 and boundary + max(drafts, default=0) <= num_tokens

    def boundaries(self, num_tokens):
        """Ends of hits for which windows and states are kept of a prompt."""
        ends = [b for b in range(1, num_tokens + 1) if self.is_possible(b, num_tokens)]
        again = [b for b in range(1, num_tokens) if self.is_possible(b, num_tokens - 1)]
        found = set(ends[-1:] + again[-1:])
        if self.checkpoint:
            step = self.align
            while step < self.checkpoint:
                step += self.align
            found |= {b for b in ends if b % step == 0}
        return found

    def keep(self, tokens):
        """A prompt was computed."""
        for group in self.groups:
            for position in range(len(tokens) // group.block_tokens):
                if group.is_whole:
                    reached = [b for b in range(1, len(tokens) + 1) if self.is_possible(b, len(tokens))]
                else:
                    reached = self.boundaries(len(tokens))
                if any(self.reads(group, position, b) for b in reached):
                    key = self.key(group, position, tokens)
                    assert key is not None
                    self.kept.add(key)

    def hit(self, tokens, start=0, kept=None):
        """The longest hit of a prompt, of which ``start`` tokens are at hand."""
        best, kept = start, self.kept if kept is None else kept
        for boundary in range(start + 1, len(tokens)):
            if self.is_possible(boundary, len(tokens) - 1) and all(
                self.key(group, position, tokens) in kept
                for group in self.groups
                for position in range(boundary // group.block_tokens)
                if self.reads(group, position, boundary) and (position + 1) * group.block_tokens > start
            ):
                best = boundary
        return best


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
    requirements, oracle = HitRequirements(groups, align), Oracle(groups, align, checkpoint)
    kept = set()
    prompts = []
    for _ in range(data.draw(st.integers(1, 3))):
        shared = data.draw(st.integers(0, len(prompts[-1]))) if prompts else 0
        fresh = data.draw(st.integers(0, 4 * align))
        prompt = (prompts[-1][:shared] if prompts else []) + [100 * len(prompts) + n for n in range(fresh)]
        prompts.append(prompt)
        kept |= keep(requirements, checkpoint, prompt)
        oracle.keep(prompt)
        assert kept == oracle.kept
    for prompt in [*prompts, prompts[-1] + [7] * (align + 3)]:
        for start in range(0, len(prompt), align):
            assert hit(
                requirements, len(prompt) - 1, has_of(requirements, kept, prompt), start
            ) == oracle.hit(prompt, start)


@given(mixes(), st.integers(0, 4), st.integers(0, 4))
def test_what_is_at_hand_is_not_needed(mix, boundary, start):
    groups, align = mix
    oracle = Oracle(groups, align, 0)
    boundary, start = boundary * align, start * align
    for group in groups:
        assert [at for part in group.needed(boundary, start) for at in part] == [
            position
            for position in range(start // group.block_tokens, boundary // group.block_tokens)
            if oracle.reads(group, position, boundary)
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

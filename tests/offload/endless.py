"""What a cache without bounds finds again, token by token: the reference of every test of hits."""

from __future__ import annotations

from tests.cache.test_retention import sees


class Endless:
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

"""What the scheduler half of the offload remembers of one request. Records, changed by their owner alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.offload.index.session_pins import Pin
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from kvconnect.offload.tier import Content
from kvconnect.transfer.stack import RequestView

NEVER = 1 << 62
"""A token count that no request reaches."""

Pins = dict[int, list[bytes]]
"""Names by group, each pinned once."""


@dataclass(eq=False)
class Lookup:
    """What a request waits for before it is promised anything, and then what it is promised.

    ``waits_for`` are contents under way to host memory, each with the tier that brings it, or none where
    another request stores it. ``asked`` are jobs that ask tiers, ``found`` the answers by tier. ``lost``
    could not be brought, and is not tried again. ``brought`` are the contents that came from each tier.

    Once it ``is_answered``, ``length`` tokens beyond ``start_tokens`` are promised; 0 was true at
    ``looked_at``. ``pins`` are what is promised, or here while it waits.
    """

    deadline: float
    waits_for: dict[Content, str] = field(default_factory=dict)
    asked: dict[int, str] = field(default_factory=dict)
    was_asked: bool = False
    found: dict[str, set[Content]] = field(default_factory=dict)
    lost: set[Content] = field(default_factory=set)
    brought: dict[str, set[Content]] = field(default_factory=dict)
    is_settled: bool = False
    pins: Pins = field(default_factory=dict)
    is_answered: bool = False
    start_tokens: int = 0
    num_tokens: int = 0
    length: int = 0
    looked_at: float = 0.0
    version: int = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self.waits_for or self.asked)


@dataclass(eq=False)
class OffloadRequest:
    """``reads``: it may be promised something. ``most_tokens`` of it may be kept.

    ``known_tokens`` are those that it had when it was admitted last, and which need no sampling;
    ``computed_tokens`` those that the device was given since, ``computed_before`` the same a step earlier.
    ``boundaries`` are where windows and states are kept of the known tokens; one is at ``junction``, where
    other prompts begin to differ. ``next_position`` is by group the first one that was not considered for a
    store. ``trail`` is, by group, what was kept while decoding, and is superseded as the answer grows.
    Of windows nothing is kept that begins in the first ``ragged_tokens``: a peer may not have filled it.
    ``is_admitted``: it had blocks at some time. ``is_offered``: it was promised what is kept, of which lower
    tiers brought ``sources``. What is kept of it is held by ``pin``, if that was asked for.
    """

    view: RequestView
    reads: bool
    most_tokens: int
    prompt_tokens: int = 0
    known_tokens: int = 0
    computed_tokens: int = 0
    computed_before: int = 0
    boundaries: tuple[int, ...] = ()
    junction: int = 0
    kept: dict[int, tuple[range, ...]] = field(default_factory=dict)
    block_ids: dict[int, list[int]] = field(default_factory=dict)
    next_position: dict[int, int] = field(default_factory=dict)
    trail: dict[int, deque[tuple[int, bytes]]] = field(default_factory=dict)
    lookup: Lookup | None = None
    ragged_tokens: int = 0
    is_admitted: bool = False
    is_offered: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    pin: Pin | None = None

    @property
    def last_boundary(self) -> int:
        """Where what is kept of the known tokens ends, and of an answer begins."""
        return self.boundaries[-1] if self.boundaries else 0

    def lay_out(self, requirements: HitRequirements, checkpoint_tokens: int) -> None:
        self.known_tokens = self.view.num_tokens
        found = set(requirements.boundaries(min(self.known_tokens, self.most_tokens), checkpoint_tokens))
        if 0 < self.junction < self.known_tokens:
            found.add(self.junction)
        self.boundaries = tuple(sorted(found))
        self.kept = requirements.kept(self.boundaries)

    def checkpoints(self, requirements: HitRequirements) -> tuple[int, ...]:
        """Where its state is useful: its boundaries, and those that an answer can make one."""
        align, last = requirements.align_tokens, requirements.last_boundary(self.known_tokens)
        if self.boundaries and self.boundaries[-1] < last:
            return self.boundaries
        return (*self.boundaries, *range(last + align, self.known_tokens + 1, align))

    def lose_blocks(self) -> None:
        self.block_ids = {}
        self.next_position = {}
        self.computed_tokens = self.computed_before = 0

    def computed(
        self, num_tokens: int, groups: Sequence[HitGroup], new_block_ids: Sequence[Sequence[int]] | None
    ) -> None:
        """The device was given so many of its tokens, and it has got these blocks."""
        self.computed_before, self.computed_tokens = self.computed_tokens, num_tokens
        if new_block_ids is None:
            return
        for group in groups:
            if not group.is_state and (ids := new_block_ids[group.group]):
                self.block_ids.setdefault(group.group, []).extend(ids)

    def valid_tokens(self) -> int:
        """How many of its tokens have KV that is final and under way at least."""
        # What was sampled counts once the token after it is known: drafts may have been in its place.
        return min(self.computed_tokens, max(self.known_tokens, self.view.num_tokens - 1))

    def final_tokens(self) -> int:
        """The same when it has ended. The last token has no KV yet."""
        if self.view.num_tokens > self.known_tokens > 0:
            # Something was sampled since it was admitted, after all that it had was computed.
            return self.view.num_tokens - 1
        return self.valid_tokens()

    def held(self, group: HitGroup) -> tuple[range, ...]:
        """The positions of a group whose blocks were still the request's in the last ``computed`` step."""
        # While decoding not every step is reported; a step computes at least one token.
        is_prefill = self.computed_before < self.known_tokens
        return group.held(max(0, self.computed_before if is_prefill else self.computed_tokens - 1))

    def worth_keeping(
        self, requirements: HitRequirements, group: HitGroup, positions: range, *, decoded: bool
    ) -> list[int]:
        """Those positions of a group with a window that are to be kept."""
        found: list[int] = []
        for span in self.kept.get(group.group, ()):
            found.extend(range(max(positions.start, span.start), min(positions.stop, span.stop)))
        if decoded:
            begin = max(positions.start, self.last_boundary // group.block_tokens)
            found.extend(at for at in range(begin, positions.stop) if requirements.lasts(group, at))
        return found

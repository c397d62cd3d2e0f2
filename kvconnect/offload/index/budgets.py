"""The plan of the host memory for blocks: rows of a few lengths, and how many rows each cache group may take.

A row holds one logical block of one cache group, in all its layers. Groups whose rows have the same length
share a class, so that one can use rows that another leaves idle. Both halves compute the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

import msgspec

from kvconnect.cache.specs import KVCacheGroup, div_ceil
from kvconnect.config import OffloadConfig
from kvconnect.errors import ConfigError, LocalError

ROW_ALIGN_BYTES = 64
# The prompt length from which default shares are computed: long enough that groups which grow with the prompt
# count, short enough that windows and states still do.
USUAL_PROMPT_TOKENS = 16384
_SETTING = "kv_connector_extra_config.offload"


class RowClass(msgspec.Struct, frozen=True):
    """Rows of one length, contiguous from ``offset_bytes`` of the arena on.

    The last ``num_lent`` rows are lent: no order of the scheduler half names them. A worker reads contents
    from its disk into them when peers fetch these contents.
    """

    row_bytes: int
    num_rows: int
    offset_bytes: int
    num_lent: int = 0

    @property
    def num_all(self) -> int:
        return self.num_rows + self.num_lent

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.num_all * self.row_bytes


class ArenaPlan(msgspec.Struct, frozen=True):
    """The classes of rows in an arena of ``length_bytes``, and the rows of each cache group.

    ``class_of`` maps a cache group to an index in ``classes``. ``limits`` maps it to the number of rows that
    the group adds to its class: they add up to ``num_rows``. Groups of a class share all of its rows.
    """

    classes: tuple[RowClass, ...]
    class_of: Mapping[int, int]
    limits: Mapping[int, int]
    length_bytes: int

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(sorted(self.class_of))

    def row_class(self, group: int) -> RowClass:
        """The class of a group's rows. Raises ``LocalError``: the group has no rows."""
        return self.classes[self.class_index(group)]

    def class_index(self, group: int) -> int:
        if group not in self.class_of:
            raise LocalError(f"cache group {group} has no rows; those that have: {list(self.groups)}")
        return self.class_of[group]

    def groups_of(self, index: int) -> tuple[int, ...]:
        return tuple(group for group in self.groups if self.class_of[group] == index)

    def offset_bytes(self, group: int, row: int) -> int:
        """The offset of a row in the arena, in bytes. Raises ``LocalError``: there is no such row."""
        rows = self.row_class(group)
        if not 0 <= row < rows.num_all:
            raise LocalError(f"cache group {group} has rows 0 to {rows.num_all - 1}, row {row} was asked for")
        return rows.offset_bytes + row * rows.row_bytes


def aligned_row_bytes(content_bytes: int) -> int:
    return div_ceil(content_bytes, ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


def plan_arena(
    cpu_bytes: int,
    row_bytes: Mapping[int, int],
    shares: Mapping[int, float],
    least_rows: Mapping[int, int] = MappingProxyType({}),
    lent_share: float = 0.0,
) -> ArenaPlan:
    """Divide ``cpu_bytes`` among cache groups, in whole rows of one block, by ``shares`` of at most 1 in all.

    Larger shares are scaled down. ``row_bytes``, those of a block, are aligned to ``ROW_ALIGN_BYTES``. The
    shortest hit needs ``least_rows``, by default 1. ``lent_share`` of each group's memory is lent rows.

    Raises ``ConfigError``: a group would get fewer than ``least_rows``; the text has the bytes that suffice.
    """
    whole = max(Fraction(1), sum((Fraction(share) for share in shares.values()), Fraction(0)))
    lengths = {group: aligned_row_bytes(row_bytes[group]) for group in sorted(row_bytes)}
    lent = Fraction(lent_share)
    parts = {group: Fraction(shares[group]) / whole * (1 - lent) for group in lengths}
    needed = {group: max(1, least_rows.get(group, 1)) for group in lengths}
    for group, part in parts.items():
        if not part:
            raise ConfigError(
                f"{_SETTING}.shares gives cache group {group} nothing; accepted: more than 0 for every group"
            )
    for group, part in parts.items():
        if cpu_bytes * part < needed[group] * lengths[group]:
            least = max(math.ceil(needed[each] * lengths[each] / parts[each]) for each in parts)
            raise ConfigError(
                f"{_SETTING}.cpu_bytes is {cpu_bytes}: cache group {group} may take {float(part):.3g} of it, "
                f"one of its blocks has {lengths[group]} bytes, and the shortest hit needs {needed[group]} "
                f"of them; it must be at least {least}"
            )
    limits = {group: int(cpu_bytes * part) // lengths[group] for group, part in parts.items()}
    distinct = sorted(set(lengths.values()), reverse=True)
    class_of = {group: distinct.index(length) for group, length in lengths.items()}
    classes: list[RowClass] = []
    for index, length in enumerate(distinct):
        mine = [group for group, own in class_of.items() if own == index]
        num_lent = int(cpu_bytes * sum(parts[group] for group in mine) * lent / (1 - lent)) // length
        offset = classes[-1].end_bytes if classes else 0
        classes.append(RowClass(length, sum(limits[group] for group in mine), offset, num_lent))
    return ArenaPlan(tuple(classes), class_of, limits, classes[-1].end_bytes)


def plan_for(
    config: OffloadConfig,
    groups: Sequence[KVCacheGroup],
    row_bytes: Mapping[int, int],
    least_rows: Mapping[int, int] = MappingProxyType({}),
) -> ArenaPlan:
    """``plan_arena`` for a configuration. Raises ``ConfigError`` also if ``shares`` has not one per group."""
    if not config.shares:
        shares = usual_shares(groups, row_bytes, config.checkpoint_tokens)
    elif len(config.shares) != len(groups):
        raise ConfigError(
            f"{_SETTING}.shares is {list(config.shares)}, it must have one number for each of the "
            f"{len(groups)} cache groups"
        )
    else:
        shares = {group: config.shares[group] for group in row_bytes}
    return plan_arena(config.cpu_bytes, row_bytes, shares, least_rows, config.peer_share or 0.0)


def usual_shares(
    groups: Sequence[KVCacheGroup],
    row_bytes: Mapping[int, int],
    checkpoint_tokens: int,
    prompt_tokens: int = USUAL_PROMPT_TOKENS,
) -> dict[int, float]:
    """Default shares by group, which add up to 1: the bytes that ``prompt_tokens`` leave in each group."""
    # Windows and states are kept at the ends of prompt and answer, and at checkpoints of the prompt.
    ends = 2 + (prompt_tokens // checkpoint_tokens if checkpoint_tokens else 0)
    left: dict[int, int] = {}
    for group, length in row_bytes.items():
        spec = groups[group]
        blocks = max(1, prompt_tokens // spec.block_size)
        if spec.is_state:
            blocks = ends
        elif not spec.retention.sees_all:
            blocks = min(blocks, ends * spec.most_blocks(prompt_tokens, 1))
        left[group] = blocks * aligned_row_bytes(length)
    whole = sum(left.values())
    return {group: length / whole for group, length in left.items()}

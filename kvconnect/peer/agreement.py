"""What two workers must agree on before one's KV means anything to the other, and what one has of it."""

from __future__ import annotations

import math

import msgspec

from kvconnect.cache.shard import layer_number, shared_tokens
from kvconnect.peer.messages import DRAFT, OTHER_WEIGHTS, CacheMeaning, Introduction
from kvconnect.plan.align import TableCard, card_refusal
from kvconnect.plan.blocks import WHOLE, Share

_MOST_GROUPS = 256


def disagreement(ours: Introduction, theirs: Introduction) -> str | None:
    """Why two workers cannot work together, naming what differs with both values; None if they can.

    The tables themselves are compared when they are lined up.
    """
    if ours.meaning.model != theirs.meaning.model:
        return f"model differ: {_model_differences(ours.meaning.model, theirs.meaning.model)}"
    for what, our_value, their_value in (
        ("number of KV heads", ours.meaning.num_heads, theirs.meaning.num_heads),
        ("prompt tokens left to the decode node", ours.meaning.held_back, theirs.meaning.held_back),
        ("engine", ours.engine, theirs.engine),
    ):
        if our_value != their_value:
            return f"{what} differ: {their_value!r} asks {our_value!r}"
    return (
        other_weights(ours.meaning, theirs.meaning)
        or card_refusal(theirs.table)
        or rank_refusal(theirs)
        or _unnumbered(ours, theirs)
        or _unlike_turns(ours, theirs)
    )


def rank_refusal(rank: Introduction) -> str | None:
    """Why no node can have such a rank; None if one can."""
    return rank.meaning.topology.refusal(rank.rank, rank.meaning.num_heads)


def _unnumbered(ours: Introduction, theirs: Introduction) -> str | None:
    """A layer of which it is unknown whose it is, where one side divides layers over pipeline ranks."""
    stages = [len(side.meaning.topology.stages) for side in (ours, theirs)]
    for region in (*ours.table.regions, *theirs.table.regions) if max(stages) > 1 else ():
        if layer_number(region.layer) is None:
            return (
                f"layer {region.layer[:200]!r} has no number, by which layers are told apart between "
                f"{stages[1]} and {stages[0]} pipeline ranks"
            )
    return None


def _unlike_turns(ours: Introduction, theirs: Introduction) -> str | None:
    """Why blocks cannot be matched that ranks keep in turns, where the two sides differ in that."""
    sides = [side.meaning for side in (theirs, ours)]
    contexts = [[side.context, side.interleave] for side in sides]
    if contexts[0] == contexts[1]:
        return None
    units = {unit for context, unit in contexts if context > 1}
    period, what = math.lcm(*(context for context, _ in contexts)), "[context-parallel ranks, tokens in turn]"
    if len(units) > 1:
        return f"{what} differ: {contexts[0]} asks {contexts[1]}; accepted: turns of equal length"
    for side in (theirs, ours):
        for group in side.table.groups if side.meaning.context < period else ():
            tokens = group.block_tokens * group.blocks_per_kv_block
            if tokens not in units or group.is_state or not group.rule.sees_all:
                return (
                    f"{what} differ: {contexts[0]} asks {contexts[1]}, and cache group {group.group} of "
                    f"{side.engine_id!r} has blocks of {tokens} tokens ({group.retention}); accepted: blocks "
                    "of one turn, of layers that see all tokens"
                )
    return None


def source_share(source: Introduction, target: Introduction) -> Share:
    """What a rank of P and one of D both keep, for that of P."""
    own, theirs = (side.meaning.topology.tokens(side.rank) for side in (source, target))
    shared = shared_tokens(own, theirs)
    return WHOLE if shared is None or own.context == theirs.context == 1 else Share(shared, own)


def target_share(source: Introduction, target: Introduction) -> Share:
    """The same for that of D, which other ranks of P have other layers for, or other ranks of D."""
    is_divided = len(target.meaning.topology.stages) > 1
    groups = range(_MOST_GROUPS) if is_divided else target.table.geometry()
    elsewhere = frozenset(groups) - {region.group for region in wanted_card(source, target).regions}
    return source_share(target, source)._replace(elsewhere=elsewhere)


def wanted_card(source: Introduction, target: Introduction) -> TableCard:
    """What a rank of D keeps of the layers that a rank of P owns.

    A draft model's layers are left out where P runs another one or none: what they guess is verified.
    """
    topology, table = source.meaning.topology, target.table
    regions = tuple(region for region in table.regions if topology.owns(source.rank, region.layer))
    drafts = [side.meaning.weights.partition(DRAFT)[2] for side in (source, target)]
    if (first := target.meaning.draft_from) and drafts[0] != drafts[1]:
        regions = tuple(region for region in regions if (layer_number(region.layer) or 0) < first)
    return msgspec.structs.replace(table, regions=regions)


def fills_windows(source: Introduction, target: Introduction) -> bool:
    """Whether P has all of a block of D that a window begins in: that before the window, too."""
    rules = [(group.rule, group.block_tokens * group.blocks_per_kv_block) for group in target.table.groups]
    cut = [tokens for rule, tokens in rules if rule.by_position and not rule.sees_all]
    theirs = [group.block_tokens * group.blocks_per_kv_block for group in source.table.groups]
    return not any(tokens % ours for ours in cut for tokens in theirs)


def _model_differences(ours: str, theirs: str) -> str:
    """Which parts of two models' words differ; a part is ``name=value``, or a value alone."""
    parts: list[dict[str, list[str]]] = [{}, {}]
    for words, named in zip((ours, theirs), parts, strict=True):
        for part in words.split(":"):
            name, _, value = part.rpartition("=")
            named.setdefault(name, []).append(value)
    our_parts, their_parts = ({name: " ".join(values) for name, values in named.items()} for named in parts)
    return "; ".join(
        f"{name} {their_parts.get(name, 'none')!r} asks {our_parts.get(name, 'none')!r}".strip()
        for name in dict.fromkeys([*our_parts, *their_parts])
        if our_parts.get(name) != their_parts.get(name)
    )


def other_weights(ours: CacheMeaning, theirs: CacheMeaning) -> str | None:
    """Why KV of one side's weights is useless to the other's; None if they are the same but for a draft's."""
    if ours.weights.partition(DRAFT)[0] == theirs.weights.partition(DRAFT)[0]:
        return None
    return f"{OTHER_WEIGHTS}: {theirs.weights!r} asks {ours.weights!r}"

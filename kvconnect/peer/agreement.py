"""What two workers must agree on before one's KV means anything to the other, and what one has of it."""

from __future__ import annotations

import msgspec

from kvconnect.cache.shard import layer_number
from kvconnect.peer.messages import OTHER_WEIGHTS, CacheMeaning, Introduction
from kvconnect.plan.align import TableCard, card_refusal

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
        or theirs.meaning.topology.refusal(theirs.rank)
        or _unnumbered(ours, theirs)
    )


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


def wanted_card(source: Introduction, target: Introduction) -> TableCard:
    """What a rank of D keeps of the layers that a rank of P owns."""
    topology, table = source.meaning.topology, target.table
    regions = tuple(region for region in table.regions if topology.owns(source.rank, region.layer))
    return msgspec.structs.replace(table, regions=regions)


def groups_elsewhere(source: Introduction, target: Introduction) -> frozenset[int]:
    """Groups of which a rank of D wants nothing of a rank of P; those that other ranks of D have, too."""
    is_divided = len(target.meaning.topology.stages) > 1
    groups = range(_MOST_GROUPS) if is_divided else target.table.geometry()
    return frozenset(groups) - {region.group for region in wanted_card(source, target).regions}


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
    """Why KV of one side's weights is useless to the other's; None if they are the same."""
    if ours.weights == theirs.weights:
        return None
    return f"{OTHER_WEIGHTS}: {theirs.weights!r} asks {ours.weights!r}"

"""A kind of attention that the package does not have: its rule is all that is added.

A token of these layers sees the first tokens of the sequence (the sinks) and the last ones. What is in
between is freed while a request runs, so the blocks that are kept have a hole. The bytes of such a group must
come through pack, streaming and offload as those of any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.retention import Retention, joined
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import OffloadConfig
from kvconnect.errors import LayoutError
from kvconnect.offload.worker.offload_worker import OffloadWorker
from kvconnect.peer.agreement import table_refusal
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.prefill.leases import Lease
from kvconnect.transfer.orders import Progress
from kvconnect.transfer.stack import RankCache
from tests.cache.test_retention import MADE_UP
from tests.caches import attention_layer, block_values, fill_random
from tests.identities import named
from tests.offload.half_kit import Kind
from tests.offload.test_offload_scheduler import check_hits, traffic
from tests.slots import carry_over

HEADS, CONTENT = 2, 8


@dataclass(frozen=True)
class FirstAndLast(Retention):
    """The ``sinks`` first tokens, and the ``last`` ones, itself among them."""

    sinks: int
    last: int

    def seen(self, position):
        begin = max(self.sinks, position - self.last + 1)
        return joined((range(min(self.sinks, position)), range(begin, max(begin, position))))


def is_read(token: int, position: int, sinks: int, last: int) -> bool:
    """Whether computing ``position`` reads an earlier token. Shares nothing with the rule."""
    return token < sinks or position - token < last


MADE_UP[FirstAndLast] = lambda rule, position, token: is_read(token, position, rule.sinks, rule.last)


class Side:
    """One side's cache: a group of all tokens, and one of the made-up kind."""

    def __init__(self, num_blocks: int, kernel: int, ratio: int, sinks: int, last: int, seed: int) -> None:
        self.size, self.ratio, self.kernel = kernel * ratio, ratio, kernel
        self.tensors = {
            name: attention_layer("block token head", num_blocks * ratio, HEADS, kernel, CONTENT)
            for name in ("full", "made_up")
        }
        for at, cache in enumerate(self.tensors.values()):
            fill_random(cache, seed + at)
        sizes = (self.size, HEADS, CONTENT // 2, torch.float16)
        self.config = KVCacheConfig(
            num_blocks,
            (
                KVCacheGroup(("full",), AttentionSpec(*sizes)),
                KVCacheGroup(("made_up",), AttentionSpec(*sizes, retention=FirstAndLast(sinks, last))),
            ),
        )
        self.kernels = {0: kernel, 1: kernel}
        heads = dict.fromkeys(self.tensors, HeadInterval(0, HEADS))
        self.table = RegionTable.build(self.config, self.kernels, self.tensors, heads)

    def token(self, name: str, ids: list[int], token: int) -> torch.Tensor:
        """What a layer keeps of one token, head by head; raw bits."""
        block, at = divmod(token, self.size)
        values = block_values(self.tensors[name], ids[block] * self.ratio + at // self.kernel)
        return values.reshape(HEADS, self.kernel, -1)[:, at % self.kernel]


def blocks_at(ids: list[int], size: int, num_tokens: int, sinks: int, last: int) -> list[int]:
    """The ids of blocks that hold something that a token from the last of ``num_tokens`` on reads."""
    return [
        block
        if any(
            is_read(token, num_tokens - 1, sinks, last) or token == num_tokens - 1
            for token in range(at * size, min((at + 1) * size, num_tokens))
        )
        else 0
        for at, block in enumerate(ids)
    ]


handovers = st.tuples(
    st.integers(1, 60), st.integers(1, 12), st.integers(1, 20), st.sampled_from([(1, 1), (2, 1), (1, 3)])
)


def both_sides(case):
    """A cache at either end, what P holds and D wants of a prompt, and the ids of both."""
    num_tokens, sinks, last, ratios = case
    sides = [Side(40, 2, ratio, sinks, last, 10 * at) for at, ratio in enumerate(ratios)]
    held, ids = [], []
    for at, side in enumerate(sides):
        count = -(-num_tokens // side.size)
        order = list(range(1, 40))[:: 1 - 2 * at][:count]
        kept = blocks_at(order, side.size, num_tokens, sinks, last)
        held.append([GroupBlocks(0, 0, tuple(order)), GroupBlocks(1, 0, tuple(kept))])
        ids.append(order)
    return sides, held, ids


def check_target(case, sides, ids, before):
    """Every token that D reads is P's, byte by byte; before the copy none was."""
    num_tokens, sinks, last, _ = case
    source, target = sides
    for name in source.tensors:
        for token in range(num_tokens):
            if name == "full" or is_read(token, num_tokens - 1, sinks, last):
                theirs = source.token(name, ids[0], token)
                assert torch.equal(target.token(name, ids[1], token), theirs), (name, token)
                assert not torch.equal(before[name][token], theirs)


def tokens_of(side, ids, num_tokens):
    return {name: [side.token(name, ids, token) for token in range(num_tokens)] for name in side.tensors}


@settings(deadline=None, max_examples=40)
@given(handovers, st.sampled_from([256, 4096, 1 << 20]), st.booleans())
def test_a_handover_carries_it_also_while_the_prompt_is_computed(case, slot_bytes, is_streamed):
    (source, target), (held, wanted), ids = both_sides(case)
    num_tokens = case[0]
    before = tokens_of(target, ids[1], num_tokens)
    if is_streamed:
        # The blocks of a prefill are known as they were given; what was freed since is another request's.
        prefill = Lease("handle", None, num_tokens, epoch=1)
        news = (GroupBlocks(0, 0, tuple(ids[0])), GroupBlocks(1, 0, tuple(ids[0])))
        prefill.add(Progress("handle", num_tokens, num_tokens, news), lambda: True)
        streamed = prefill.blocks_of(source.table.groups, 0, num_tokens)
        assert {blocks.group: blocks.block_ids for blocks in streamed} == {
            blocks.group: blocks.block_ids for blocks in held
        }
        held = list(streamed)
    carry_over(source.table, target.table, held, wanted, num_tokens, slot_bytes=slot_bytes)
    check_target(case, (source, target), ids, before)


def test_a_sink_that_is_gone_is_missed_and_what_lies_between_is_not():
    sides, (held, wanted), ids = both_sides((40, 4, 6, (1, 1)))
    (source, target), kept = sides, list(held[1].block_ids)
    assert kept[2:17] == [0] * 15
    asks_all = [wanted[0], GroupBlocks(1, 0, tuple(ids[1]))]
    carry_over(source.table, target.table, held, asks_all, 40)
    lacks = [held[0], GroupBlocks(1, 0, (kept[0], 0, *kept[2:]))]
    with pytest.raises(LayoutError, match="tokens 2 to 3 of the request shall be packed, but no block holds"):
        carry_over(source.table, target.table, lacks, asks_all, 40)


def test_peers_that_do_not_know_it_refuse_it():
    card = Side(4, 2, 1, 4, 6, 0).table
    assert table_refusal(card) is None
    text = card.groups[1].retention
    assert text == "FirstAndLast 4 6"
    unknown = RegionTable(card.regions, (card.groups[0], type(card.groups[1])(1, 2, 1, "Unheard 4 6")))
    assert "no rule 'Unheard 4 6' of what layers see; known: " in (table_refusal(unknown) or "")


@dataclass(frozen=True)
class FirstAndLastKind(Kind):
    """The kind as a group of the stack that knows what every block and row of the offload should hold."""

    sinks: int = 1
    last: int = 1

    @property
    def rule(self):
        return FirstAndLast(self.sinks, self.last)

    def sees(self, earlier, token):
        return is_read(earlier, token, self.sinks, self.last)


@settings(deadline=None, max_examples=40)
@given(traffic(), st.integers(1, 12), st.integers(1, 8), st.sampled_from([0, 16]), st.integers(1, 12))
def test_the_offload_restores_it(case, sinks, last, checkpoint, max_new):
    _, align, prompts = case
    kinds = Kind(4), FirstAndLastKind(4, sinks=sinks, last=last)
    check_hits(kinds, align, prompts, checkpoint, max_new)


def test_a_worker_has_rows_for_it():
    side = Side(60, 4, 1, 4, 6, 77)
    cache = RankCache(side.config, side.kernels, side.tensors)
    worker = OffloadWorker(OffloadConfig(cpu_bytes=1 << 20), cache, identity=named())
    assert worker.row_bytes == {0: 4 * HEADS * CONTENT * 2, 1: 4 * HEADS * CONTENT * 2}
    worker.close()

"""A kind of attention that the package does not have: its rule and its spec are all that is added.

A token of these layers sees the first tokens of the sequence (the sinks) and the last ones. What is in
between is freed while a request runs, so the blocks that are kept have a hole. The bytes of such a group must
come through pack, streaming and offload as those of any other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from hashlib import sha256

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.retention import Retention, joined
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import OffloadConfig
from kvconnect.errors import LayoutError
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.offload.worker.offload_worker import OffloadWorker
from kvconnect.peer.agreement import table_refusal
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.prefill.leases import Lease
from kvconnect.transfer.orders import Progress
from kvconnect.transfer.stack import Computed, RankCache, Step
from tests.caches import attention_layer, block_values, fill_random
from tests.identities import named
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


@dataclass(frozen=True)
class FirstAndLastSpec(FullAttentionSpec):
    """Keys and values of the tokens that such a layer sees."""

    sinks: int = 0
    last: int = 0

    @property
    def retention(self):
        return FirstAndLast(self.sinks, self.last)


def is_read(token: int, position: int, sinks: int, last: int) -> bool:
    """Whether computing ``position`` reads an earlier token. Shares nothing with the rule."""
    return token < sinks or position - token < last


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
                KVCacheGroup(("full",), FullAttentionSpec(*sizes)),
                KVCacheGroup(("made_up",), FirstAndLastSpec(*sizes, sinks=sinks, last=last)),
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
        prefill = Lease("handle", num_tokens, epoch=1)
        news = (GroupBlocks(0, 0, tuple(ids[0])), GroupBlocks(1, 0, tuple(ids[0])))
        prefill.streamed.add(Progress("handle", num_tokens, num_tokens, news), lambda: True)
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


@dataclass
class Request:
    """``every`` are the tokens of prompt and answer; of the answer, the stack learns each a step late."""

    request_id: str
    every: list[int]
    num_tokens: int
    kv_transfer_params: None = None
    ids: list[list[int]] = field(default_factory=lambda: [[], []])


class Stack:
    """One node: both halves of the offload, and a pool of few blocks that are written anew when reused."""

    def __init__(self, sinks: int, last: int, step_tokens: int) -> None:
        self.side = Side(60, 4, 1, sinks, last, 77)
        self.sees, self.step_tokens = (sinks, last), step_tokens
        self.free = list(range(1, 60))
        config = OffloadConfig(cpu_bytes=1 << 20, checkpoint_tokens=16)
        cache = RankCache(self.side.config, self.side.kernels, self.side.tensors)
        self.worker = OffloadWorker(config, cache, identity=named())
        kept = KeptBlocks(
            self.side.config.groups,
            HitRequirements.of(self.side.config.groups, self.worker.row_bytes, 4),
            hashes=lambda request, size: [
                sha256(repr(request.every[:end]).encode()).digest()
                for end in range(size, request.num_tokens + 1, size)
            ],
            row_bytes=self.worker.row_bytes,
            clock=time.monotonic,
        )
        self.half = OffloadScheduler(config, kept)

    def content(self, request: Request, layer: int, token: int) -> torch.Tensor:
        """What a layer keeps of a token: bits that depend on all tokens so far."""
        name = sha256(repr((layer, request.every[: token + 1])).encode()).digest()
        return torch.frombuffer(bytearray(name), dtype=torch.int16).reshape(HEADS, CONTENT)

    def grow(self, request: Request, computed: int, end: int) -> list[list[int]]:
        """Free what no later token reads, and give blocks up to ``end``. The new ones, by group."""
        new = []
        for group, ids in enumerate(request.ids):
            for at in range(len(ids) if group else 0):
                span = range(at * 4, min(at * 4 + 4, computed))
                if ids[at] and len(span) == 4 and not any(is_read(t, computed, *self.sees) for t in span):
                    # The next to get it is the next to ask.
                    self.free.insert(0, ids[at])
                    ids[at] = 0
            given = []
            for at in range(len(ids), -(-end // 4)):
                span = range(at * 4, at * 4 + 4)
                unread = (
                    group and span[-1] < computed and not any(is_read(t, computed, *self.sees) for t in span)
                )
                given.append(0 if unread else self.free.pop(0))
            ids += given
            new.append(given)
        return new

    def step(self, work=lambda: None) -> None:
        """Orders, a step of the device, and what came of them."""
        orders = self.half.build_orders()
        self.worker.before_step(orders)
        work()
        self.worker.start(orders)
        until = time.monotonic() + 20
        while any(self.worker.state().values()):
            self.half.update_results(self.worker.results())
            assert time.monotonic() < until
            time.sleep(0.001)
        self.half.update_results(self.worker.results())

    def compute(self, request: Request, start: int, end: int) -> None:
        """Check all that the step reads, and write what it computes. What is free is written by others."""
        for group, name in enumerate(self.side.tensors):
            tensor = self.side.tensors[name].tensor.view(torch.int16)
            tensor[self.free] = 0x5555
            ids = request.ids[group]
            for token in range(start):
                if not group or any(is_read(token, at, *self.sees) for at in range(start, end)):
                    found = tensor[ids[token // 4], token % 4]
                    assert torch.equal(found, self.content(request, group, token)), (name, token)
            for token in range(start, end):
                tensor[ids[token // 4], token % 4] = self.content(request, group, token)

    def run(self, request: Request) -> int:
        """Serve a prompt. How many of its tokens were restored."""
        self.half.new_request(request)
        restored, _ = self.half.matched_tokens(request, 0)
        assert restored is not None
        new = self.grow(request, restored, restored)
        self.half.update_after_alloc(request, request.ids, restored)
        if restored:
            self.step()
        at, prompt, untold = restored, request.num_tokens, None
        while at < len(request.every):
            end = min(at + self.step_tokens, prompt) if at < prompt else at + 1
            new = [a + b for a, b in zip(new, self.grow(request, at, end), strict=True)]
            if untold is not None:
                # By now the next step was given its blocks, those among them that this one was freed of.
                self.half.launched(Step((Computed(request.request_id, *untold),)))
                request.num_tokens = max(prompt, untold[0])
            self.step(lambda at=at, end=end: self.compute(request, at, end))
            untold, new, at = (end, new), [[], []], end
        self.half.launched(Step((Computed(request.request_id, *untold),)))
        request.num_tokens = len(request.every)
        self.half.request_finished(request, request.ids)
        for ids in request.ids:
            self.free[:0] = [block for block in ids if block]
        self.step()
        return restored


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(4, 24), st.data())
def test_the_offload_restores_it(sinks, last, step_tokens, data):
    stack = Stack(sinks, last, step_tokens)
    try:
        prompts = []
        for serial in range(data.draw(st.integers(2, 4))):
            base = data.draw(st.sampled_from(prompts)) if prompts else []
            shared = data.draw(st.integers(0, len(base)))
            fresh = data.draw(st.integers(1, 50))
            prompts.append([*base[:shared], *range(1000 * serial, 1000 * serial + fresh)][:90])
            every = prompts[-1] + [-serial - 1] * data.draw(st.integers(0, 30))
            stack.run(Request(f"r{serial}", every, len(prompts[-1])))
            # What goes on from the end of an answer is restored, and checked where it is computed.
            longer = [*every[: max(1, len(every) - data.draw(st.integers(0, 3)))], *range(5)]
            stack.run(Request(f"on{serial}", longer, len(longer)))
        for serial, prompt in enumerate(prompts):
            # The same prompt again: all of it but the last token's block is there.
            restored = stack.run(Request(f"again{serial}", prompt, len(prompt)))
            assert restored == (len(prompt) - 1) // 4 * 4
        assert not any(stack.half.state().values())
        assert sorted(stack.free) == list(range(1, 60))
    finally:
        stack.worker.close()

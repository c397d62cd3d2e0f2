"""Prompts that are sent while they are computed, whatever shape and number of ranks either side has.

What is not computed yet is noise, and so is what a window has left behind; what landed is compared token
by token with what the request is.
"""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.specs import div_ceil
from kvconnect.peer.messages import Fetch, Landed
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import Chunk, Chunker, TokenSpan
from kvconnect.plan.wire import Wire, WireStream
from kvconnect.prefill.leases import Lease
from kvconnect.prefill.outbox import SlotOutbox
from kvconnect.transfer.orders import Hold, Orders, Progress
from kvconnect.transfer.slots import SlotPool
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, Truth, same_blocks
from tests.transfer.test_packed_geometry import any_ranks


class SteppedPrefill:
    """A request that all ranks of P compute step by step."""

    def __init__(self, ranks: Ranks, num_tokens: int) -> None:
        self.ranks, self.num_tokens = ranks, num_tokens
        self.truth = Truth(ranks.model, num_tokens, seed=0)
        self.shape = ranks.prefill[0].cache.shape
        self.groups = {kind: ranks.prefill[0].cache.group_of(kind) for kind in ranks.model.kinds}
        self.begin_anew()
        self.order(expected=("handle-a",), directory=ranks.directory)

    def begin_anew(self) -> None:
        self.blocks = self.ranks.blocks("P", self.num_tokens, drop=False)
        self.computed = 0
        self.told = dict.fromkeys(self.groups, 0)

    def order(self, **orders) -> None:
        for worker in self.ranks.prefill:
            worker.order(Orders(**orders))

    def compute(self, stop: int, *, whole: bool = False) -> None:
        """Write the KV of the tokens before ``stop``; a state only if it is the last one."""
        for worker in self.ranks.prefill:
            worker.cache.write(self.truth, self.blocks, range(self.computed, stop), whole)
        self.computed = max(self.computed, stop)

    def to(self, stop: int) -> None:
        """Compute so far, say so, and lose what the window has left."""
        self.compute(stop)
        news = []
        for kind, group in sorted(self.groups.items(), key=lambda item: item[1]):
            if kind != "state":
                known, blocks = self.told[kind], div_ceil(stop, self.shape.block[kind])
                ids = self.blocks[kind].block_ids[known:blocks]
                news += [GroupBlocks(group, known, ids)] if ids else []
                self.told[kind] = blocks
        self.order(progress=(Progress("handle-a", self.num_tokens, self.computed, tuple(news)),))
        self.leave_window(stop)

    def left(self, kind: str, stop: int) -> int:
        """Blocks that no token from ``stop`` on sees."""
        if kind != "window":
            return 0
        return max(0, stop - self.ranks.model.window) // self.shape.block[kind]

    def leave_window(self, stop: int) -> None:
        for kind in self.groups:
            self.noise(kind, self.blocks[kind].block_ids[: self.left(kind, stop)])

    def noise(self, kind: str, block_ids: tuple[int, ...]) -> None:
        """Somebody else writes these blocks."""
        ratio = 1 if kind == "state" else self.shape.block[kind] // self.shape.kernel[kind]
        pages = [block * ratio + part for block in block_ids for part in range(ratio)]
        for worker in self.ranks.prefill:
            for name in worker.cache.names(kind):
                axis = worker.cache.tensors[name].axes.split().index("block")
                view = worker.cache.bytes_of(name)
                view[(slice(None),) * axis + (pages,)] = self.ranks.random.randrange(256)

    def lose(self) -> None:
        """The request is preempted, and will be computed in other blocks."""
        for kind in self.groups:
            self.noise(kind, self.blocks[kind].block_ids)
        self.order(preempted=("handle-a",))
        self.begin_anew()

    def arrives(self, blocks: dict[str, GroupBlocks], others) -> None:
        """The last token is computed, and the request held: all of it lands."""
        self.hold()
        self.ranks.run_until_received(1)
        self.ranks.check_landed(self.truth, blocks, others)
        self.ranks.assert_idle()

    def hold(self) -> None:
        self.compute(self.num_tokens, whole=True)
        groups = []
        for kind, group in sorted(self.groups.items(), key=lambda item: item[1]):
            left, ids = self.left(kind, self.num_tokens), self.blocks[kind].block_ids
            groups.append(GroupBlocks(group, 0, (0,) * left + ids[left:]))
        self.order(holds=(Hold("a", "handle-a", self.num_tokens, tuple(groups), 0),))


@settings(max_examples=80)
@given(st.data())
def test_any_shape_is_sent_while_it_is_computed(data):
    ranks, num_tokens, known_tokens = any_ranks(data, 3, 200)
    prefill = SteppedPrefill(ranks, num_tokens)
    steps = sorted(data.draw(st.lists(st.integers(1, num_tokens), max_size=6)))
    asks_at = data.draw(st.integers(0, len(steps)))
    loses_at = data.draw(st.one_of(st.none(), st.integers(0, len(steps))))
    blocks, others = None, []
    for number in range(len(steps) + 1):
        if number == asks_at:
            blocks = ranks.fetched("a", num_tokens, known_tokens)
            others = ranks.others(blocks)
        ranks.settle(data.draw(st.sampled_from([0, 1, 6])))
        if number == loses_at:
            prefill.lose()
            ranks.settle(data.draw(st.sampled_from([0, 1, 6])))
        if number < len(steps):
            prefill.to(max(prefill.computed, steps[number]))
    prefill.arrives(blocks, others)


def test_layers_that_need_chunks_of_their_own_are_sent_in_the_order_in_which_they_are_computed():
    """A slot that holds no block of all layers: chunks are first by layers, then by tokens."""
    ranks = Ranks(
        Model({"full": 4}, heads=2, width=16),
        same_blocks(32),
        same_blocks(32),
        num_blocks=60,
        slot_bytes=1 << 13,
    )
    prefill = SteppedPrefill(ranks, 256)
    blocks = ranks.fetched("a", 256)
    others = ranks.others(blocks)
    ranks.settle()
    prefill.to(128)
    ranks.settle(40)
    landed = [message.chunk for message in ranks.network.heard(Landed)]
    assert len(landed) == 8
    assert landed != list(range(8))
    prefill.arrives(blocks, others)


def test_what_a_window_has_left_is_not_read_any_more():
    """It is somebody else's. D asks for it all the same; nobody reads it there."""
    ranks = Ranks(
        Model({"full": 1, "window": 1}, window=32),
        same_blocks(16),
        same_blocks(16),
        num_blocks=60,
        slot_bytes=1 << 12,
    )
    prefill = SteppedPrefill(ranks, 160)
    blocks = ranks.fetched("a", 160, drop=False)
    (worker,) = ranks.decode
    ranks.settle()
    for stop in range(16, 160, 16):
        prefill.to(stop)
        ranks.settle()
    prefill.hold()
    ranks.run_until_received(1)
    assert worker.cache.differences(prefill.truth, blocks) == []
    (group,) = [held for kind, held in blocks.items() if kind == "window"]
    left = worker.cache.bytes_of(worker.cache.names("window")[0])[list(group.block_ids[:8])]
    assert not left.any()


def test_a_row_of_several_tokens_is_sent_once_the_last_of_them_is_computed():
    stream = WireStream("l", 0, 0, False, 0, None, row_tokens=4, head_bytes=64, width_bytes=64, word_bytes=8)
    packer = SimpleNamespace(chunker=Chunker(Wire("pages", (stream,))))
    path = SimpleNamespace(
        packer_of=lambda kept: packer, name="D", mapped=None, coding=None, slot_bytes=1 << 20
    )
    local = SimpleNamespace(table=SimpleNamespace(groups=()), send=SlotPool((), 0, 1))
    lease = Lease("handle", None, 11)
    chunks = [Chunk(0, 1, (TokenSpan(0, 0, 6),)), Chunk(0, 1, (TokenSpan(0, 8, 11),))]

    def due(ready_tokens, chunks):
        lease.ready_tokens = ready_tokens
        fetch = Fetch(1, "handle", 11, 1, 30.0, tuple(chunks))
        return SlotOutbox(lease, path, local, fetch, lambda *event: None).due

    assert [due(7, chunks), due(8, chunks)] == [0, 1]
    assert [due(10, chunks[1:]), due(11, chunks[1:])] == [0, 1], "the last row is never full"

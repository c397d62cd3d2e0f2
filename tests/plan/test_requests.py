"""Requests cut and carried over byte by byte, against rows picked out of the tensors by indexing.

The two sides have different layouts, paddings, block sizes, block ids and ranks; every byte that is not
wanted must stay as it was.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.retention import Window
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.errors import LayoutError
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import Chunker, RequestCutter, TokenSpan
from kvconnect.plan.wire import align_wire
from tests.caches import attention_layer, block_values, fill_random
from tests.pack.sides import NUM_BLOCKS, Shape, Side, held_blocks, models, rank_heads, shapes
from tests.slots import carry_over

LARGE = 1 << 20
"""Bytes of a slot that holds any of these requests. Of a small one a layer's fewest rows may be too many."""


@st.composite
def requests(draw):
    """A model, and of both sides the shape, the number of ranks, and the blocks of one request."""
    model = draw(models())
    ours, worlds = draw(shapes(model)), (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    if draw(st.booleans()):
        # Equal but for the gaps between pages: these travel as they are.
        pads = {layer.name: draw(st.integers(0, 3)) for layer in model.layers}
        theirs, worlds = Shape(ours.layouts, pads, ours.kernel, ours.ratio), (worlds[0], worlds[0])
    else:
        theirs = draw(shapes(model))
    held, wanted = draw(held_blocks(model, ours, False)), draw(held_blocks(model, theirs, True))
    return model, (ours, theirs), worlds, held, wanted, draw(st.sampled_from([500, 2048, LARGE]))


@given(requests(), st.sampled_from([1.0, 1e6, 1e11]))
def test_a_request_is_cut_into_chunks_that_fit_and_hold_every_row_once(case, pack_bytes_per_s):
    model, shapes, worlds, _, wanted, slot_bytes = case
    source, target = (
        Side(model, shape, rank_heads(model, 0, world), NUM_BLOCKS, 0)
        for shape, world in zip(shapes, worlds, strict=True)
    )
    chunker = Chunker(align_wire(source.table, target.table))
    cut, cards = (list(wanted.values()), model.num_tokens), (source.table, target.table)
    try:
        chunks = RequestCutter(chunker, *cards, slot_bytes, pack_bytes_per_s).cut(*cut)
    except LayoutError:
        slot_bytes = LARGE
        chunks = RequestCutter(chunker, *cards, slot_bytes, pack_bytes_per_s).cut(*cut)
    found = [[] for _ in chunker.wire.streams]
    for chunk in chunks:
        placed = chunker.place(chunk)
        assert 0 < placed.total_bytes <= slot_bytes
        for rows, first, count in zip(
            found[chunk.first_stream : chunk.stop_stream], placed.first_row, placed.rows, strict=True
        ):
            rows += range(first, first + count)
    for stream, rows in zip(chunker.wire.streams, found, strict=True):
        assert rows == rows_by_hand(stream, target, wanted[stream.target_group])
    if pack_bytes_per_s == 1e11:
        # So fast that slots alone bound the chunks: no two fit into one.
        for one, other in itertools.pairwise(chunks):
            spans = {span.group: span for span in one.spans}
            next_to = [span for span in other.spans if span.group in spans]
            spans |= {
                span.group: TokenSpan(span.group, spans[span.group].start, span.stop) for span in next_to
            }
            if next_to and one.first_stream == other.first_stream:
                joined = msgspec.structs.replace(one, spans=tuple(spans.values()))
                assert chunker.place(joined).total_bytes > slot_bytes


def rows_by_hand(stream, target, blocks):
    """The rows of all tokens from the first block that the target has to the last."""
    if stream.is_state:
        return [0]
    size = target.shape.kernel[blocks.group] * target.shape.ratio[blocks.group]
    real = [blocks.first_block + at for at, block in enumerate(blocks.block_ids) if block]
    tokens = (t for t in range(target.model.num_tokens) if real and real[0] <= t // size <= real[-1])
    return sorted({token // stream.row_tokens for token in tokens})


def sliding_side(kernel):
    """Blocks of 4 tokens, each of which sees the 8 tokens up to itself."""
    config = KVCacheConfig(
        20, (KVCacheGroup(("l",), AttentionSpec(4, 1, 4, torch.float16, retention=Window(8))),)
    )
    cache = attention_layer("block token head", 80 // kernel, 1, kernel, 8)
    fill_random(cache, kernel)
    return cache, RegionTable.build(config, {0: kernel}, {"l": cache})


@pytest.mark.parametrize("kernel", [4, 2])
def test_blocks_before_the_window_may_be_missing_on_the_source(kernel):
    """Also where the null block is split."""
    (ours, source), (theirs, target) = sliding_side(kernel), sliding_side(kernel)
    wanted = [GroupBlocks(0, 0, (0, 7, 8, 9, 10))]
    carry_over(source, target, [GroupBlocks(0, 0, (0, 0, 3, 4, 5))], wanted, 20)
    ratio = 4 // kernel
    for block, place in ((3, 8), (4, 9), (5, 10)):
        for part in range(ratio):
            landed = block_values(theirs, place * ratio + part)
            assert torch.equal(landed, block_values(ours, block * ratio + part))
    with pytest.raises(LayoutError, match=f"tokens 12 to {12 + kernel - 1} of the request"):
        carry_over(source, target, [GroupBlocks(0, 0, (0, 0, 3, 0, 5))], wanted, 20)


def test_a_state_is_one_block_whatever_its_position():
    def side(num_blocks):
        spec = StateSpec(64, ((10,),), (torch.int8,), page_size_padded=32)
        storage = torch.zeros(num_blocks, 32, dtype=torch.int8)
        tensors = {"s": CacheTensor(storage[:, :10], "block content")}
        config = KVCacheConfig(num_blocks, (KVCacheGroup(("s",), spec),))
        return storage, RegionTable.build(config, {0: 64}, tensors)

    (ours, source), (theirs, target) = side(8), side(9)
    ours[5] = 7
    wanted = [GroupBlocks(0, 3, (2,))]
    carry_over(source, target, [GroupBlocks(0, 0, (5,))], wanted, 1000)
    expected = torch.zeros_like(theirs)
    expected[2, :10] = 7
    assert torch.equal(theirs, expected)
    carry_over(source, target, [GroupBlocks(0, 0, (5,))], [GroupBlocks(0, 0, (0,))], 1000)
    assert torch.equal(theirs, expected), "nothing was wanted"
    for lacking in ((), (0,)):
        with pytest.raises(LayoutError, match="the state of the request shall be packed, but no block holds"):
            carry_over(source, target, [GroupBlocks(0, 0, lacking)], wanted, 1000)

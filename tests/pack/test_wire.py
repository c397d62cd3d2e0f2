"""Wires between unlike tables, and requests cut into chunks: every row once, in order, in a slot."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.errors import LayoutError
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import ALIGN_BYTES, Chunk, Chunker, TokenSpan, wanted_spans
from kvconnect.plan.wire import Wire, WireStream, align_wire
from tests.pack.sides import Layer, Model, Shape, Side


@st.composite
def wires(draw):
    groups = draw(st.integers(1, 3))
    states = [index > 0 and draw(st.booleans()) for index in range(groups)]
    streams = []
    for index in range(draw(st.integers(1, 6))):
        group = draw(st.integers(0, groups - 1))
        width = draw(st.integers(1, 80))
        tokens = 1 if states[group] else draw(st.sampled_from([1, 2, 3, 16]))
        sizes = tokens, width, width, 1
        streams.append(WireStream(f"layer{index}", group, group, states[group], 0, None, *sizes))
    wire = Wire("rows", tuple(streams))
    spans = []
    for group in sorted({stream.target_group for stream in streams}):
        start, stop = sorted((draw(st.integers(0, 200)), draw(st.integers(0, 200))))
        spans.append(TokenSpan(group, 0, 1) if states[group] else TokenSpan(group, start, stop))
    return wire, spans, draw(st.integers(16, 20_000))


def rows_by_hand(stream, span):
    return [
        row
        for row in range(400)
        if any(row == token // stream.row_tokens for token in range(span.start, span.stop))
    ]


@given(wires())
def test_chunks_hold_every_row_once_in_order_and_fit(case):
    wire, spans, slot_bytes = case
    chunker = Chunker(wire)
    by_group = {span.group: span for span in spans}
    try:
        chunks = chunker.cut(spans, slot_bytes)
    except LayoutError as error:
        step = 48
        most = max(stream.width_bytes * step + ALIGN_BYTES for stream in wire.streams)
        assert most > slot_bytes, error
        return
    found = {stream.layer: [] for stream in wire.streams}
    for chunk in chunks:
        placed = chunker.place(chunk)
        at = 0
        for index, stream in enumerate(wire.streams[chunk.first_stream : chunk.stop_stream]):
            rows = range(int(placed.first_row[index]), int(placed.first_row[index]) + int(placed.rows[index]))
            found[stream.layer].extend(rows)
            assert placed.base[index] == at
            at = -(-(at + len(rows) * stream.width_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        assert 0 < placed.total_bytes == at <= slot_bytes
    for stream in wire.streams:
        assert found[stream.layer] == rows_by_hand(stream, by_group[stream.target_group])


@given(wires())
def test_as_few_chunks_as_the_tokens_allow(case):
    """If all streams fit for one step of tokens, no chunk could have taken another step."""
    wire, spans, slot_bytes = case
    chunker = Chunker(wire)
    states = {stream.target_group for stream in wire.streams if stream.is_state}
    every = (0, len(wire.streams))
    step = math.lcm(*(stream.row_tokens for stream in wire.streams if not stream.is_state))
    try:
        chunks = chunker.cut(spans, slot_bytes)
    except LayoutError:
        return
    for chunk, following in pairwise(chunks):
        if (
            any(span.group in states for span in following.spans)
            or (chunk.first_stream, chunk.stop_stream) != every
        ):
            continue
        # The chunk with one more step of tokens that there are.
        reached = (min(span.start for span in following.spans) // step + 1) * step
        begun = {span.group: span.start for span in chunk.spans}
        earliest = min(begun.values())
        more = tuple(
            TokenSpan(span.group, begun.get(span.group, max(span.start, earliest)), min(span.stop, reached))
            for span in spans
            if span.group not in states and (span.group in begun or span.stop > earliest)
        )
        more = tuple(span for span in more if span.start < span.stop)
        assert chunker.place(Chunk(*every, more)).total_bytes > slot_bytes
    whole = Chunk(0, len(wire.streams), tuple(spans))
    if chunker.place(whole).total_bytes <= slot_bytes:
        assert len(chunker.cut(spans, slot_bytes)) <= 1


def test_a_slot_that_is_too_small_names_the_layer():
    wire = Wire("rows", (WireStream("big", 0, 0, False, 0, None, 16, 100, 100, 4),))
    with pytest.raises(LayoutError, match="a slot has 111 bytes, but layer 'big' needs at least 112"):
        Chunker(wire).cut([TokenSpan(0, 0, 32)], 111)
    assert len(Chunker(wire).cut([TokenSpan(0, 0, 32)], 112)) == 2


def test_wires_and_chunks_survive_a_message():
    wire = Wire("rows", (WireStream("a", 1, 0, False, 0, HeadInterval(2, 4), 1, 8, 16, 8),))
    chunk = Chunk(0, 1, (TokenSpan(0, 3, 9),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=Wire) == wire
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(chunk), type=Chunk) == chunk
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Chunk(0, 1, (TokenSpan(0, -1, 9),))), type=Chunk)


def side(
    kind="gqa", width=4, dtype=torch.float16, layout="block token head", kernel=4, heads=(0, 4), row_tokens=1
):
    model = Model((Layer("a", 0, kind, width, dtype, row_tokens),), 4, 1, 8)
    fixed = {"mla": "block token", "state": "block"}.get(kind, layout)
    shape = Shape({"a": fixed}, {"a": 0}, {0: kernel}, {0: 1})
    return Side(model, shape, HeadInterval(*heads), 4, 1)


def card(**choices) -> RegionTable:
    return side(**choices).table


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ({}, {"dtype": torch.float32}, "dtype is float16 on the prefill node, float32 on the decode node"),
        ({}, {"width": 8}, "a head and token have 16 bytes on the prefill node, 32 bytes on the decode node"),
        ({"heads": (0, 2)}, {"heads": (2, 4)}, "none of the heads"),
        (
            {"kind": "mla"},
            {"kind": "mla", "row_tokens": 2},
            "stored as 4 tokens in 4 rows on the prefill node, 4 tokens in 2 rows on the decode node",
        ),
        ({"kind": "mla"}, {"kind": "state"}, "rows of tokens on the prefill node, a recurrent state on the"),
        ({"kind": "mla"}, {}, "the prefill node's pages cannot be divided by head"),
    ],
)
def test_tables_that_do_not_match_are_refused_with_both_values(source, target, reason):
    with pytest.raises(LayoutError, match=reason):
        align_wire(card(**source), card(**target))


def test_a_block_size_that_a_backend_cannot_divide_is_named_once_for_all_layers():
    def undivided(block_tokens: int) -> RegionTable:
        names = [f"model.layers.{number}.attn" for number in range(28)]
        layers = tuple(Layer(name, 0, "mla", 4, torch.float16, block_tokens) for name in names)
        layouts, pads = dict.fromkeys(names, "block token"), dict.fromkeys(names, 0)
        shape = Shape(layouts, pads, {0: block_tokens}, {0: 1})
        return Side(Model(layers, 4, 1, 8), shape, HeadInterval(0, 4), 4, 1).table

    with pytest.raises(LayoutError) as refused:
        align_wire(undivided(128), undivided(64))
    assert str(refused.value) == (
        "the two caches cannot be matched: layers 'model.layers.0.attn' to 'model.layers.27.attn' (28): the "
        "block size is 128 tokens on the prefill node, 64 tokens on the decode node, and the attention "
        "backend's pages cannot be divided by token: set the same --block-size on both"
    )


def test_pages_are_chosen_where_they_are_equal_and_refused_where_not():
    assert align_wire(card(), card()).order == "pages"
    for other in ({"layout": "block head token"}, {"kernel": 2}, {"heads": (0, 2)}):
        assert align_wire(card(), card(**other)).order == "rows"
        with pytest.raises(LayoutError, match="their pages are not alike"):
            align_wire(card(), card(**other), "pages")


def test_a_layer_that_the_source_lacks_is_named():
    ours = RegionTable((), ())
    with pytest.raises(LayoutError, match="layer 'a': the prefill node has none"):
        align_wire(ours, card(), "rows")


def test_what_a_target_wants_begins_at_its_first_real_block():
    groups = side().table.groups
    assert wanted_spans(groups, [GroupBlocks(0, 1, (0, 5, 6))], 100) == (TokenSpan(0, 8, 16),)
    assert wanted_spans(groups, [GroupBlocks(0, 1, (0, 5, 6))], 13) == (TokenSpan(0, 8, 13),)
    assert wanted_spans(groups, [GroupBlocks(0, 0, (0, 0))], 13) == ()
    state = side(kind="state").table.groups
    assert wanted_spans(state, [GroupBlocks(0, 0, (3,))], 100) == (TokenSpan(0, 0, 1),)


@given(wires(), st.sampled_from([4, 16, 48]))
def test_chunks_end_where_blocks_do(case, align_tokens):
    wire, spans, _ = case
    ends = {span.group: span.stop for span in spans}
    for chunk in Chunker(wire).cut(spans, 100_000, align_tokens):
        for span in chunk.spans:
            assert span.stop in (ends[span.group], span.stop // align_tokens * align_tokens)

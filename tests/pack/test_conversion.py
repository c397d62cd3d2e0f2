"""Wires between caches of unlike types: what is converted, where, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec
from kvconnect.errors import LayoutError
from kvconnect.peer.agreement import table_refusal
from kvconnect.plan.wire import Conversion, Wire, align_wire
from tests.pack.sides import Layer, Model, Shape, Side

BFLOAT16, FLOAT16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NHD = "block token head"


def card(
    dtype, kind="gqa", width=4, layout=NHD, row_tokens=1, value_width=None, scales=(1.0, 1.0)
) -> RegionTable:
    layer = Layer("a", 0, kind, width, dtype, row_tokens, value_width)
    # A second layer that is alike on all sides: not every layer of a wire is converted.
    other = Layer("b", 1, "gqa", 3, torch.uint8)
    fixed = {"mla": "block token", "state": "block"}.get(kind, layout)
    shape = Shape({"a": fixed, "b": layout}, {"a": 0, "b": 0}, {0: 4, 1: 4}, {0: 1, 1: 1})
    side = Side(Model((layer, other), 4, 1, 8), shape, HeadInterval(0, 4), 4, 1, {"a": scales})
    return side.table


@pytest.mark.parametrize(
    ("source", "target", "wire_dtype", "head_bytes", "word_bytes"),
    [
        (BFLOAT16, FP8, "float8_e4m3fn", 8, 8),
        (FP8, FLOAT16, "float8_e4m3fn", 8, 8),
        (BFLOAT16, FLOAT16, "bfloat16", 16, 8),
        (FLOAT16, BFLOAT16, "float16", 16, 8),
    ],
)
def test_the_narrower_type_travels(source, target, wire_dtype, head_bytes, word_bytes):
    wire = align_wire(card(source), card(target), convert=True)
    first, second = wire.streams
    assert wire.order == "rows"
    assert first.conversion is not None
    assert first.conversion.wire_dtype == wire_dtype
    assert (first.head_bytes, first.width_bytes, first.word_bytes) == (
        head_bytes,
        4 * head_bytes,
        word_bytes,
    )
    assert second.conversion is None
    assert second == align_wire(card(source), card(source), "rows").streams[1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=Wire) == wire


@pytest.mark.parametrize(("layout", "word_bytes"), [("block token head", 8), ("plane block token head", 4)])
def test_words_divide_the_runs_of_what_travels(layout, word_bytes):
    wire = align_wire(card(BFLOAT16, layout=layout), card(FP8), convert=True)
    assert wire.streams[0].word_bytes == word_bytes


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [((BFLOAT16, (9.0, 9.0)), (FP8, (0.5, 2.0))), ((FP8, (0.5, 2.0)), (BFLOAT16, (9.0, 9.0)))],
)
@pytest.mark.parametrize(
    "shape",
    [
        {"layout": "plane block token head"},
        {},
        {"width": 4, "value_width": 3},
        {"layout": "block token head plane"},
    ],
)
def test_the_scales_are_those_of_the_quantised_side(ours, theirs, shape):
    source, target = (card(dtype, scales=scales, **shape) for dtype, scales in (ours, theirs))
    conversion = align_wire(source, target, convert=True).streams[0].conversion
    assert (conversion.scales, conversion.key_values) == ((0.5, 2.0), 4)


def test_without_quantised_values_there_are_no_scales():
    conversion = align_wire(card(BFLOAT16), card(FLOAT16), convert=True).streams[0].conversion
    assert conversion == Conversion("bfloat16", "float16", "bfloat16", 0, (1.0, 1.0))


def test_a_row_may_stand_for_several_tokens():
    shape = {"kind": "mla", "width": 6, "row_tokens": 2}
    stream = align_wire(card(BFLOAT16, **shape), card(FP8, **shape), convert=True).streams[0]
    assert stream.conversion is not None
    assert (stream.row_tokens, stream.head_bytes) == (2, 6)


def test_it_is_done_only_where_it_was_asked_for():
    with pytest.raises(
        LayoutError,
        match="'a': dtype is bfloat16 on the prefill node, float8_e4m3fn on the .*convert_dtype: true",
    ):
        align_wire(card(BFLOAT16), card(FP8))
    with pytest.raises(LayoutError, match="their pages are not alike"):
        align_wire(card(BFLOAT16), card(FP8), "pages", convert=True)
    equal = card(FP8, scales=(2.0, 3.0))
    for order in (None, "rows"):
        assert align_wire(equal, equal, order, convert=True) == align_wire(equal, equal, order)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ((BFLOAT16, "mla", 576), (torch.uint8, "mla", 656), "uint8 on the decode.*fp8_ds_mla keeps scales"),
        ((BFLOAT16, "mla", 576), (FP8, "mla", 656), "have 576 values of bfloat16 .*, 656 .*as fp8_ds_mla's"),
        (
            (BFLOAT16,),
            (FP8, "gqa", 8),
            "8 values of bfloat16 on the prefill node, 16 of float8_e4m3fn on the",
        ),
        ((BFLOAT16, "state"), (FP8, "state"), "it keeps state, and only"),
        (
            (BFLOAT16, "mla", 4, NHD, 2),
            (FP8, "mla", 4, NHD, 4),
            "4 tokens in 2 rows on the .*, 4 tokens on the",
        ),
        ((torch.float32,), (BFLOAT16,), "bfloat16 on the decode node; accepted: two of"),
        ((BFLOAT16,), (torch.float8_e5m2,), "float8_e5m2 on the decode node; accepted: two of"),
        ((BFLOAT16, "mla"), (FP8,), "the prefill node's pages cannot be divided by head"),
    ],
)
def test_what_is_not_only_values_of_tokens_is_refused_by_name(source, target, reason):
    with pytest.raises(LayoutError, match=f"layer 'a': .*{reason}"):
        align_wire(card(*source), card(*target), convert=True)
    with pytest.raises(LayoutError, match="layer 'a'") as refused:
        align_wire(card(*source), card(*target))
    assert "convert_dtype" not in str(refused.value)


def test_equal_types_with_unlike_scales_are_never_copied_as_they_are():
    ours, theirs = card(FP8, scales=(1.0, 1.0)), card(FP8, scales=(1.0, 0.5))
    reason = r"'a': scales of K and V are \(1.0, 1.0\) on the prefill node, \(1.0, 0.5\) on the decode node"
    for convert in (False, True):
        with pytest.raises(LayoutError, match=reason):
            align_wire(ours, theirs, convert=convert)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e-40, 1e39])
def test_impossible_scales_are_refused_from_a_peer_and_from_the_caller(scale):
    good = card(FP8)
    assert table_refusal(good) is None
    region = msgspec.structs.replace(good.regions[0], scales=(1.0, scale))
    hostile = RegionTable((region, *good.regions[1:]), good.groups)
    assert "layer 'a' of the peer's table has impossible scales" in table_refusal(hostile)
    with pytest.raises(LayoutError, match="'a': scales of K and V are .*; accepted: finite numbers above 0"):
        card(FP8, scales=(scale, 1.0))


def test_an_impossible_end_of_k_is_refused_from_a_peer():
    good = card(FP8)
    for key_bytes in (-1, 9):
        region = msgspec.structs.replace(good.regions[0], key_bytes=key_bytes)
        assert "impossible sizes" in table_refusal(RegionTable((region,), good.groups))


def test_a_card_without_scales_is_one_whose_scales_are_1():
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(card(FP8)))
    sent[0] = [region[:10] for region in sent[0]]
    read = msgspec.convert(sent, RegionTable)
    assert [region.scales for region in read.regions] == [(1.0, 1.0)] * len(read.regions)


def table(spec, tensor, axes, scales):
    config = KVCacheConfig(2, (KVCacheGroup(("a",), spec),))
    return RegionTable.build(config, {0: 4}, {"a": CacheTensor(tensor, axes)}, scales=scales)


def test_a_table_says_scales_and_where_k_ends():
    spec = AttentionSpec(4, 2, 8, FP8, head_size_v=5)
    made = table(spec, torch.zeros(2, 2, 4, 13, dtype=FP8), "block head token content", {"a": (0.5, 2)})
    assert [(region.scales, region.key_bytes) for region in made.regions] == [((0.5, 2), 8)]
    apart = torch.zeros(2, 2, 4, 2, 8, dtype=FP8)
    made = table(replace(spec, head_size_v=None), apart, "plane block token head content", {"a": (0.5, 2)})
    assert [(region.first_plane, region.scales, region.key_bytes) for region in made.regions] == [
        (0, (0.5, 2), None),
        (1, (0.5, 2), None),
    ]


def test_scales_of_wide_values_mean_nothing():
    spec = AttentionSpec(4, 2, 8, BFLOAT16)
    made = table(spec, torch.zeros(2, 2, 4, 16, dtype=BFLOAT16), "block head token content", {"a": (0.5, 2)})
    assert made.regions[0].scales == (1.0, 1.0)


@pytest.mark.parametrize(
    ("spec", "shape", "axes"),
    [
        (MLASpec(4, 16, FP8), (2, 4, 16), "block token content"),
        (AttentionSpec(4, 2, 16, FP8, head_size_v=0), (2, 2, 4, 16), "block head token content"),
        (AttentionSpec(4, 2, 8, FP8), (2, 128), "block content"),
    ],
)
def test_two_scales_need_rows_that_say_where_k_ends(spec, shape, axes):
    tensor = torch.zeros(shape, dtype=FP8)
    assert table(spec, tensor, axes, {"a": (0.5, 0.5)}).regions[0].scales == (0.5, 0.5)
    with pytest.raises(LayoutError, match="'a': scales of K and V are .* do not say where K ends"):
        table(spec, tensor, axes, {"a": (0.5, 2.0)})


def test_scales_of_a_layer_that_no_group_has_are_a_mistake():
    spec = AttentionSpec(4, 2, 8, FP8)
    with pytest.raises(LayoutError, match="no cache group has layer 'b'"):
        table(spec, torch.zeros(2, 2, 4, 16, dtype=FP8), "block head token content", {"b": (1.0, 1.0)})

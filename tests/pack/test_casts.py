"""Caches of unlike types: pack and unpack against values that are cast one at a time by definition."""

from __future__ import annotations

import struct
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvconnect.cache.shard import HeadInterval, Topology, partner_ranks
from kvconnect.errors import LayoutError
from kvconnect.pack import numpy_mover
from kvconnect.pack.packer import Packer
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import Chunk, TokenSpan
from kvconnect.plan.wire import align_wire
from tests.pack.sides import (
    DEVICE,
    KERNELS,
    M64,
    NUM_BLOCKS,
    Layer,
    Model,
    Shape,
    Side,
    digest_by_hand,
    held_blocks,
    interpreted_by,
    models,
    rank_heads,
    rows_of,
    shapes,
    slot_for,
)
from tests.pack.values import ITEM, cast_row

# The interpreter computes with numpy, which warns of what is meant here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
PAIRS = [(source, target) for source in ITEM for target in ITEM if source != target]
BFLOAT16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fill_values(side: Side, seed: int) -> None:
    """Values of every size that an fp8 cache may be made from, beside the random bits that are there."""
    generator = torch.Generator().manual_seed(seed)
    for layer in side.model.layers:
        if name_of(layer.dtype) not in ITEM:
            continue
        tensor = side.tensors[layer.name].tensor
        raw = torch.empty(0, dtype=layer.dtype, device=tensor.device).set_(tensor.untyped_storage())
        sizes = torch.randint(-12, 11, raw.shape, generator=generator)
        values = torch.randn(raw.shape, generator=generator) * torch.exp2(sizes.float())
        kept = torch.rand(raw.shape, generator=generator) < 0.2
        bits = values.to(layer.dtype).view(torch.uint8).view(len(raw), -1)
        merged = torch.where(kept[:, None], raw.cpu().view(torch.uint8).view(len(raw), -1), bits)
        raw.view(torch.uint8).copy_(merged.reshape(-1))


def shared_heads(layer: Layer, side: Side, other: Side) -> list[int]:
    """The heads that travel, as this side counts them; one of everything where there are none."""
    if not layer.has_heads:
        return [0]
    shared = side.heads.intersect(other.heads)
    return [head - side.heads.start for head in range(shared.start, shared.stop)]


def wire_type(source: Layer, target: Layer) -> torch.dtype:
    return target.dtype if target.dtype.itemsize < source.dtype.itemsize else source.dtype


def cast_as(layer: Layer, row: bytes, source: torch.dtype, target: torch.dtype, scales) -> bytes:
    if source == target:
        return row
    keys = layer.width if layer.has_heads else len(row)
    return cast_row(row, name_of(source), name_of(target), keys, scales.get(layer.name, (1.0, 1.0)))


def expected_streams(source: Side, held, target: Side, wire, chunk, scales):
    """The streams of a chunk as (offset, word bytes, data): rows picked out and cast one at a time."""
    at, made = 0, []
    theirs = {layer.name: layer for layer in target.model.layers}
    ours = {layer.name: layer for layer in source.model.layers}
    for stream in wire.streams[chunk.first_stream : chunk.stop_stream]:
        layer = ours[stream.layer]
        travels = wire_type(layer, theirs[stream.layer])
        rows, data = source.reader(layer), b""
        for row in rows_of(layer, chunk):
            block, token = source.kernel_block(layer, held[layer.group], row)
            for head in shared_heads(layer, source, target):
                one = cast_as(layer, rows.row(block, token, head), layer.dtype, travels, scales)
                data += one if block else bytes(len(one))
        made.append((at, stream.word_bytes, data))
        at += -(-len(data) // 16) * 16
    return at, made


def write_streams(source: Side, target: Side, wanted, wire, chunk, streams, scales, images):
    """Cast rows and put them into copies of the target's caches, one at a time."""
    theirs = {layer.name: layer for layer in target.model.layers}
    ours = {layer.name: layer for layer in source.model.layers}
    chosen = wire.streams[chunk.first_stream : chunk.stop_stream]
    for stream, (_, _, data) in zip(chosen, streams, strict=True):
        layer = theirs[stream.layer]
        travels = wire_type(ours[stream.layer], layer)
        rows, heads = rows_of(layer, chunk), shared_heads(layer, target, source)
        width = len(data) // (len(rows) * len(heads)) if len(rows) else 0
        for row in rows:
            block, token = target.kernel_block(layer, wanted[layer.group], row)
            for head in heads:
                one, data = data[:width], data[width:]
                if block:
                    landed = cast_as(layer, one, travels, layer.dtype, scales)
                    images[layer.name].write(block, token, head, landed)


def exchange(kernels, source: Side, held, target: Side, wanted, spans, slot_bytes, seed, scales):
    """Pack and unpack a request chunk by chunk, comparing slot, digests and caches on the way."""
    wire = align_wire(source.card(), target.card(), "rows", convert=True)
    choices = {"device": DEVICE, "kernels": kernels}
    packer = Packer(source.table, wire, side="source", **choices)
    unpacker = Packer(target.table, wire, side="target", **choices)
    try:
        chunks = packer.chunker.cut(spans, slot_bytes)
    except LayoutError:
        chunks = packer.chunker.cut(spans, 1 << 20)
    untouched = {layer.name: source.storage(layer.name) for layer in source.model.layers}
    images = {layer.name: target.reader(layer) for layer in target.model.layers}
    outgoing = packer.stage(list(held.values()), chunks, source.model.num_tokens)
    incoming = unpacker.stage(list(wanted.values()), chunks, source.model.num_tokens)
    for chunk, ours, theirs in zip(chunks, outgoing, incoming, strict=True):
        total, streams = expected_streams(source, held, target, wire, chunk, scales)
        assert total == ours.total_bytes == theirs.total_bytes
        slot = slot_for(ours)
        expected = slot.cpu().numpy().copy()
        for offset, _, data in streams:
            expected[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        ticket = packer.pack(slot, ours, seed)
        ticket.wait()
        assert np.array_equal(slot.cpu().numpy(), expected)
        assert ticket.digest == digest_by_hand(streams, seed)
        landed = unpacker.unpack(slot, theirs, seed)
        landed.wait()
        assert landed.digest == ticket.digest
        assert np.array_equal(slot.cpu().numpy(), expected)
        write_streams(source, target, wanted, wire, chunk, streams, scales, images)
    for name, before in untouched.items():
        assert torch.equal(source.storage(name), before)
        assert torch.equal(target.storage(name), images[name].storage())


layer_scales = st.one_of(
    st.sampled_from([1.0, 0.5, 0.013, 37.7]), st.floats(2.0**-20, 2.0**20, allow_nan=False)
)


@st.composite
def unlike_models(draw):
    """A model as both sides keep it, most layers in other types, and the scales of the quantised ones."""
    model = draw(models(10))
    ours, theirs, scales = [], [], {}
    for layer in model.layers:
        if layer.kind == "state" or layer.row_tokens > 1:
            ours.append(layer)
            theirs.append(layer)
            continue
        value_width = draw(st.sampled_from([None, None, 1, 2, 5])) if layer.has_heads else None
        width = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16]))
        source, target = draw(st.sampled_from([*PAIRS, ("float8_e4m3fn", "float8_e4m3fn")]))
        layer = replace(layer, width=width, value_width=value_width)
        ours.append(replace(layer, dtype=getattr(torch, source)))
        theirs.append(replace(layer, dtype=getattr(torch, target)))
        key = draw(layer_scales)
        scales[layer.name] = (key, draw(layer_scales) if layer.has_heads else key)
    return replace(model, layers=tuple(ours)), replace(model, layers=tuple(theirs)), scales


@st.composite
def exchanges(draw):
    model, other, scales = draw(unlike_models())
    spans = []
    for group in model.groups:
        if any(layer.kind == "state" and layer.group == group for layer in model.layers):
            spans.append(TokenSpan(group, 0, 1))
            continue
        start = draw(st.integers(0, model.num_tokens - 1))
        spans.append(TokenSpan(group, start, draw(st.integers(start, model.num_tokens))))
    ours, theirs = draw(shapes(model)), draw(shapes(other))
    return (
        (model, ours, draw(held_blocks(model, ours, False))),
        (other, theirs, draw(held_blocks(other, theirs, True))),
        draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        spans,
        draw(st.sampled_from([64, 200, 1000, 1 << 20])),
        draw(st.integers(0, M64 - 1)),
        scales,
        draw(st.sampled_from([1, 2, 3, 8])),
        draw(st.sampled_from([1, 7, 64, 1 << 15])),
    )


def check(kernels, case):
    (
        (model, ours, held),
        (other, theirs, wanted),
        worlds,
        spans,
        slot_bytes,
        seed,
        scales,
        programs,
        at_once,
    ) = case
    attention = any(layer.has_heads for layer in model.layers)
    rank = seed % worlds[1]
    target = Side(other, theirs, rank_heads(other, rank, worlds[1]), NUM_BLOCKS, 7, scales)
    fill_values(target, 8)
    with interpreted_by(programs), mock.patch.object(numpy_mover, "_VALUES_AT_ONCE", at_once):
        for partner in partner_ranks(
            rank, *map(Topology, reversed(worlds)), model.total_heads if attention else None
        ):
            source = Side(model, ours, rank_heads(model, partner, worlds[0]), NUM_BLOCKS, 100, scales)
            fill_values(source, partner)
            exchange(kernels, source, held, target, wanted, spans, slot_bytes, seed, scales)


@pytest.mark.skipif("numpy" not in KERNELS, reason="needs CPU memory")
@settings(max_examples=200)
@given(exchanges())
def test_torch_casts_exactly_the_rows(case):
    check("numpy", case)


@pytest.mark.skipif("triton" not in KERNELS, reason="Triton is not installed")
# An example takes Triton's interpreter more than a second.
@pytest.mark.parametrize(
    "examples", [15 if DEVICE == "cpu" else 300, pytest.param(200, marks=pytest.mark.full)]
)
@pytest.mark.timeout(900)
def test_triton_casts_exactly_the_rows(examples):
    @settings(max_examples=examples)
    @given(exchanges())
    def every_row(case):
        check("triton", case)

    every_row()


def one_layer(dtype, layout="block token head", width=128, kernel=16, heads=1, scales=(1.0, 1.0), blocks=18):
    """A cache of one layer with all of its heads, and the model that it keeps."""
    model = Model((Layer("a", 0, "gqa", width, dtype),), heads, 1, kernel * (blocks - 2))
    shape = Shape({"a": layout}, {"a": 0}, {0: kernel}, {0: 1})
    return Side(model, shape, HeadInterval(0, heads), blocks, 1, {"a": scales})


def whole(side: Side, packer: Packer):
    """All tokens of the cache as one chunk."""
    tokens = side.model.num_tokens
    blocks = tuple(range(2, 2 + tokens // side.shape.kernel[0]))
    (staged,) = packer.stage([GroupBlocks(0, 0, blocks)], [Chunk(0, 1, (TokenSpan(0, 0, tokens),))], tokens)
    return staged


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("pair", "scales"),
    [
        *((pair, (1.0, 0.37)) for pair in PAIRS),
        *((pair, (2.0**-40, 2.0**100)) for pair in PAIRS if "float8_e4m3fn" in pair),
    ],
)
def test_every_bit_pattern_is_cast_as_defined(kernels, pair, scales):
    """K holds every second pattern, V the others, since each has its own scale."""
    source, target = (one_layer(getattr(torch, name), scales=scales) for name in pair)
    cache = source.tensors["a"].tensor
    patterns = torch.arange(1 << 16).to(torch.uint16).view(torch.uint8)
    spread = patterns.view(-1, 2)[:, : ITEM[pair[0]]].reshape(-1)
    cache[2:].view(torch.uint8).copy_(spread.view(cache[2:].view(torch.uint8).shape))
    wire = align_wire(source.card(), target.card(), "rows", convert=True)
    packer, unpacker = (
        Packer(side.table, wire, side=name, device=DEVICE, kernels=kernels)
        for side, name in ((source, "source"), (target, "target"))
    )
    ours, theirs = whole(source, packer), whole(target, unpacker)
    slot = slot_for(ours)
    packer.pack(slot, ours, 1).wait()
    unpacker.unpack(slot, theirs, 1).wait()
    rows = spread.numpy().tobytes()
    row_bytes = 256 * ITEM[pair[0]]
    expected = b"".join(
        cast_row(rows[at : at + row_bytes], *pair, 128, scales) for at in range(0, len(rows), row_bytes)
    )
    found = target.tensors["a"].tensor[2:].contiguous().view(torch.uint8).cpu().numpy().tobytes()
    assert found == expected


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_was_quantised_is_read_as_it_was_written(kernels):
    """What an fp8 cache says at first hand: its values times its scales."""
    scales = (0.25, 3.0)
    wide = one_layer(BFLOAT16, "plane block head token", width=32, kernel=8, heads=2)
    narrow = one_layer(FP8, "block token head", width=32, kernel=16, heads=2, scales=scales, blocks=10)
    wanted = torch.randn(2, 128, 2, 32).clamp(-3, 3)
    # (plane, block, head, token, content)
    wide.tensors["a"].tensor[:, 2:] = wanted.view(2, 16, 8, 2, 32).permute(0, 1, 3, 2, 4).to(BFLOAT16)
    wire = align_wire(wide.card(), narrow.card(), convert=True)
    packer = Packer(wide.table, wire, side="source", device=DEVICE, kernels=kernels)
    unpacker = Packer(narrow.table, wire, side="target", device=DEVICE, kernels=kernels)
    ours, theirs = whole(wide, packer), whole(narrow, unpacker)
    slot = slot_for(ours)
    packer.pack(slot, ours, None).wait()
    unpacker.unpack(slot, theirs, None).wait()
    read = narrow.tensors["a"].tensor[2:].cpu().float().view(128, 2, 2, 32) * torch.tensor(scales).view(2, 1)
    assert torch.allclose(read.permute(2, 0, 1, 3), wanted, rtol=0.07, atol=0.004)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_zeros_travel_where_the_source_has_no_block_and_nothing_lands_where_the_target_has_none(
    kernels, pair
):
    def model(name):
        return Model((Layer("a", 0, "window", 4, getattr(torch, name)),), 2, 3, 16)

    shape = Shape({"a": "block head token"}, {"a": 0}, {0: 4}, {0: 1})
    scales = {"a": (0.5, 2.0)}
    source, target = (Side(model(name), shape, HeadInterval(0, 2), 8, 1, scales) for name in pair)
    held, wanted = {0: GroupBlocks(0, 0, (0, 3, 0, 5))}, {0: GroupBlocks(0, 0, (2, 0, 7, 1))}
    exchange(kernels, source, held, target, wanted, [TokenSpan(0, 1, 16)], 1 << 20, 5, scales)


class _Allocated(TorchDispatchMode):
    """The largest tensor that torch makes, beyond memory that was there before."""

    def __init__(self, known) -> None:
        super().__init__()
        self.known = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in known]
        self.most_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if not any(low <= storage.data_ptr() < high for low, high in self.known):
                    self.most_bytes = max(self.most_bytes, storage.nbytes())
        return made


@pytest.mark.skipif("numpy" not in KERNELS, reason="needs CPU memory")
@pytest.mark.parametrize("pair", [("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")])
def test_no_copy_of_the_whole_is_made_on_the_way(pair):
    source, target = (one_layer(getattr(torch, name), kernel=64, blocks=200) for name in pair)
    wire = align_wire(source.card(), target.card(), "rows", convert=True)
    for side, name in ((source, "source"), (target, "target")):
        packer = Packer(side.table, wire, side=name, device="cpu", kernels="numpy")
        staged = whole(side, packer)
        slot = slot_for(staged)
        with _Allocated([slot, side.tensors["a"].tensor]) as allocated:
            packer.pack(slot, staged, 1)
            packer.unpack(slot, staged, 1)
        assert staged.total_bytes > 3 << 20
        assert allocated.most_bytes <= 1 << 18


def test_a_table_that_keeps_another_type_than_the_wire_says_is_refused():
    wide, narrow = one_layer(BFLOAT16), one_layer(FP8)
    wire = align_wire(wide.card(), narrow.card(), convert=True)
    with pytest.raises(
        LayoutError, match="'a': the wire has bfloat16 on this side, this table float8_e4m3fn"
    ):
        Packer(narrow.table, wire, side="source", device=DEVICE)


def test_the_reference_knows_the_landmarks():
    """The reference itself, against numbers that everybody knows."""
    packed = struct.pack("<4e", 1.0, -447.0, 0.001, 65504.0)
    assert cast_row(packed, "float16", "float8_e4m3fn", 4, (1.0, 1.0)) == bytes([0x38, 0xFE, 0x01, 0x7E])
    back = cast_row(bytes([0x38, 0xFE, 0x01, 0x7F]), "float8_e4m3fn", "float16", 2, (2.0, 0.5))
    assert struct.unpack("<3e", back[:6]) == (2.0, -896.0, 2.0**-10)
    assert back[6:] == b"\x00\x7e"

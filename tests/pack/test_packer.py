"""Pack and unpack against byte-by-byte copying that shares no code, over caches of every shape."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.shard import HeadInterval, Topology, partner_ranks
from kvconnect.errors import LayoutError, LocalError
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
    exchange,
    fill_values,
    held_blocks,
    interpreted_by,
    models,
    rank_heads,
    shapes,
    slot_for,
)
from tests.pack.values import PAIRS

layer_scales = st.one_of(
    st.sampled_from([1.0, 0.5, 0.013, 37.7]), st.floats(2.0**-20, 2.0**20, allow_nan=False)
)


@st.composite
def unlike_models(draw):
    """A model as both sides keep it, perhaps most layers in other types, and the scales of the quantised."""
    model = draw(models())
    if draw(st.booleans()):
        return model, model, {}
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
        draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 5, 8, 16])] * 2)),
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


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.timeout(900)
def test_exactly_the_rows_are_moved(kernels, is_long):
    """Between any layouts, types and worlds. An example takes Triton's interpreter a third of a second."""
    examples = {"numpy": 300, "torch": 100, "triton": 40 if DEVICE == "cpu" else 300}[kernels]

    @settings(max_examples=10 * examples if is_long else examples)
    @given(exchanges())
    def every_row(case):
        check(kernels, case)

    every_row()


@st.composite
def equal_sides(draw):
    model = draw(models())
    shape = draw(shapes(model))
    stop = {group: draw(st.integers(1, model.num_tokens)) for group in model.groups}
    start = {group: draw(st.integers(0, stop[group])) for group in model.groups}
    pads = {layer.name: draw(st.integers(0, 3)) for layer in model.layers}
    other = Shape(shape.layouts, pads, shape.kernel, shape.ratio)
    return (
        model,
        shape,
        other,
        draw(held_blocks(model, shape, False)),
        draw(held_blocks(model, other, True)),
        start,
        stop,
        draw(st.integers(0, M64 - 1)),
    )


def region_pages(side: Side, stream, blocks, span, images):
    """The pages of a region that a span touches, as (block, view of the page in a copy)."""
    layer = next(layer for layer in side.model.layers if layer.name == stream.layer)
    rows = images.setdefault(layer.name, side.reader(layer))
    kernel = side.shape.kernel[layer.group]
    region = next(
        region
        for region in side.table.regions
        if (region.layer, region.first_plane, region.heads) == (layer.name, stream.first_plane, stream.heads)
    )
    plane = region.first_plane if "plane" in rows.axes and region.axes.planes == 1 else None
    heads = (region.heads.start, region.heads.stop) if region.heads and "head" in rows.axes else None
    positions = range(1) if layer.kind == "state" else range(span.start // kernel, -(-span.stop // kernel))
    if layer.kind != "state" and span.start == span.stop:
        return
    for position in positions:
        row = 0 if layer.kind == "state" else position * kernel // layer.row_tokens
        block, _ = side.kernel_block(layer, blocks[layer.group], row)
        yield block, rows.page(block, plane, heads)


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=30)
@given(case=equal_sides())
def test_whole_pages_are_moved_as_they_are(kernels, case):
    model, ours, theirs, held, wanted, start, stop, seed = case
    everything = HeadInterval(0, model.total_heads)
    source = Side(model, ours, everything, NUM_BLOCKS, 100)
    target = Side(model, theirs, everything, NUM_BLOCKS, 7)
    wire = align_wire(source.table, target.table)
    assert wire.order == "pages"
    spans = tuple(
        TokenSpan(group, *((0, 1) if wire_state(wire, group) else (start[group], stop[group])))
        for group in model.groups
    )
    packer = Packer(source.table, wire, side="source", device=DEVICE, kernels=kernels)
    unpacker = Packer(target.table, wire, side="target", device=DEVICE, kernels=kernels)
    chunk = Chunk(0, len(wire.streams), spans)
    (out,) = packer.stage(list(held.values()), [chunk], model.num_tokens)
    (back,) = unpacker.stage(list(wanted.values()), [chunk], model.num_tokens)
    slot = slot_for(out)
    expected = slot.cpu().numpy().copy()
    at, found, copies, images = 0, [], {}, {}
    for stream in wire.streams:
        span = next(span for span in spans if span.group == stream.target_group)
        data = b""
        taken = list(region_pages(source, stream, held, span, copies))
        put = list(region_pages(target, stream, wanted, span, images))
        for (block, page), (into, place) in zip(taken, put, strict=True):
            one = page.tobytes() if block else bytes(page.size)
            if into:
                place[...] = np.frombuffer(one, dtype=np.uint8).reshape(place.shape)
            data += one
        expected[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
        found.append((at, stream.word_bytes, data))
        at += -(-len(data) // 16) * 16
    ticket = packer.pack(slot.data_ptr(), out, seed)
    ticket.wait()
    assert out.total_bytes == at
    assert np.array_equal(slot.cpu().numpy(), expected)
    assert ticket.digest == digest_by_hand(found, seed)
    landed = unpacker.unpack(slot.data_ptr(), back, seed)
    landed.wait()
    assert landed.digest == ticket.digest
    for layer in model.layers:
        rows = images.get(layer.name) or target.reader(layer)
        assert torch.equal(target.storage(layer.name), rows.storage())


def wire_state(wire, group):
    return any(stream.is_state for stream in wire.streams if stream.target_group == group)


def simple_model(num_tokens=12, heads=4, width=8):
    return Model(
        (Layer("a", 0, "gqa", width, torch.float16), Layer("b", 0, "gqa", width, torch.float16)),
        heads,
        1,
        num_tokens,
    )


def simple_shape(layout="block token head", kernel=4):
    names = ("a", "b")
    return Shape(dict.fromkeys(names, layout), dict.fromkeys(names, 0), {0: kernel}, {0: 1})


def simple_blocks(model, shape):
    tokens = shape.kernel[0] * shape.ratio[0]
    return {0: GroupBlocks(0, 0, tuple(range(3, 3 + -(-model.num_tokens // tokens))))}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("sizes", [(16, 256), (256, 16), (64, 96)])
def test_block_sizes_in_any_ratio(kernels, sizes):
    model = simple_model(300, 2, 16)
    ours, theirs = (
        simple_shape("block token head", sizes[0]),
        simple_shape("plane block head token", sizes[1]),
    )
    source, target = (
        Side(model, shape, HeadInterval(0, 2), 24, seed) for shape, seed in ((ours, 1), (theirs, 2))
    )
    exchange(
        kernels,
        source,
        simple_blocks(model, ours),
        target,
        simple_blocks(model, theirs),
        [TokenSpan(0, 3, 299)],
        20_000,
        5,
    )


def one_way(kernels):
    """A side, a packer that reads its caches by address, and a chunk. The caches live as long as the side."""
    model, shape = simple_model(), simple_shape()
    side = Side(model, shape, HeadInterval(0, 4), NUM_BLOCKS, 1)
    wire = align_wire(side.table, side.table, "rows")
    packer = Packer(side.table, wire, side="source", device=DEVICE, kernels=kernels)
    chunk = Chunk(0, 2, (TokenSpan(0, 1, 11),))
    (staged,) = packer.stage(list(simple_blocks(model, shape).values()), [chunk], 12)
    return side, packer, staged


@settings(max_examples=60)
@given(data=st.data())
def test_a_digest_tells_any_damage(data):
    _side, packer, staged = one_way(KERNELS[0])
    slot = slot_for(staged)
    seed = data.draw(st.integers(0, M64 - 1))
    packed = packer.pack(slot.data_ptr(), staged, seed)
    packed.wait()
    raw = slot.cpu().numpy()[: staged.total_bytes].copy()
    damage = data.draw(st.sampled_from(["bit", "swap", "generation", "zeros", "shift", "high bits"]))
    other_seed = seed
    words = raw.view(np.uint64)
    a, b = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    if damage == "bit":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "swap":
        words[[a, b]] = words[[b, a]]
    elif damage == "generation":
        other_seed = data.draw(st.integers(0, M64 - 1).filter(lambda other: other != seed))
    elif damage == "zeros":
        words[min(a, b) : max(a, b)] = 0
    elif damage == "shift":
        words[:] = np.roll(words, 1)
    else:
        words[[a, b]] ^= np.uint64(1 << 63)
    slot[: staged.total_bytes] = torch.from_numpy(raw)
    landed = packer.unpack(slot.data_ptr(), staged, other_seed)
    landed.wait()
    assert landed.digest != packed.digest
    again = packer.pack(slot.data_ptr(), staged, other_seed)
    again.wait()
    assert again.digest == landed.digest, "what was written is what was digested"


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_digests_of_tickets_may_be_read_in_any_order(kernels):
    _side, packer, staged = one_way(kernels)
    slot = slot_for(staged)
    tickets = [packer.pack(slot.data_ptr(), staged, seed) for seed in (1, 2, 1)]
    for ticket in reversed(tickets):
        ticket.wait()
        assert ticket.done
    assert tickets[2].digest == tickets[0].digest != tickets[1].digest
    for _ in range(300):
        last = packer.pack(slot.data_ptr(), staged, 1) if kernels == "numpy" else tickets[2]
    assert last.digest == tickets[0].digest
    slot[0] ^= 1
    torn = packer.unpack(slot.data_ptr(), staged, 1)
    torn.wait()
    assert torn.digest != last.digest


@pytest.mark.skipif("numpy" not in KERNELS, reason="needs CPU memory")
def test_a_processor_packs_and_unpacks_in_one_thread_however_many_torch_may_begin():
    """A serving stack may bind torch's threads to the cores where it computes, and refuse other numbers."""
    model, shape, heads = simple_model(1024, 4, 128), simple_shape(kernel=256), HeadInterval(0, 4)
    side = Side(model, shape, heads, NUM_BLOCKS, 1)
    wire = align_wire(side.table, side.table, "pages")
    blocks = list(simple_blocks(model, shape).values())
    threads = []

    def move() -> None:
        at_first = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            for way in ("source", "target"):
                packer = Packer(side.table, wire, side=way, device="cpu", kernels="numpy")
                (chunk,) = packer.chunker.cut([TokenSpan(0, 0, 1024)], 1 << 24)
                (staged,) = packer.stage(blocks, [chunk], 1024)
                slot = torch.from_numpy(np.ones(staged.total_bytes, np.uint8))
                threads.append(set(os.listdir("/proc/self/task")))
                (packer.pack if way == "source" else packer.unpack)(slot.data_ptr(), staged, 1)
                threads.append(set(os.listdir("/proc/self/task")))
        finally:
            torch.set_num_threads(at_first)

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    assert len(threads) == 4
    assert not threads[1] - threads[0]
    assert not threads[3] - threads[2]


@pytest.mark.skipif("triton" not in KERNELS, reason="Triton is not installed")
def test_more_tickets_than_places_keep_their_digests(monkeypatch):
    monkeypatch.setattr("kvconnect.pack.triton_mover._PLACES", 8)
    _side, packer, staged = one_way("triton")
    slot = slot_for(staged)
    seeds = list(range(30))
    tickets = []
    for seed in seeds:
        tickets.append(packer.pack(slot.data_ptr(), staged, seed))
        if seed % 5 == 4:
            tickets[-1].wait()
    tickets[-1].wait()
    digests = [ticket.digest for ticket in tickets]
    assert len(set(digests)) == len(seeds)
    once = packer.pack(slot.data_ptr(), staged, 0)
    once.wait()
    assert once.digest == digests[0]


def test_slots_that_are_askew_are_refused():
    _side, packer, staged = one_way(KERNELS[0])
    slot = slot_for(staged)
    for move, offset in ((packer.pack, 8), (packer.unpack, 4)):
        with pytest.raises(LocalError, match="multiples of 16"):
            move(slot.data_ptr() + offset, staged, 1)
    packer.pack(slot.data_ptr(), staged, 1).wait()


def test_what_cannot_be_staged_is_refused():
    model, shape = simple_model(), simple_shape()
    side = Side(model, shape, HeadInterval(0, 4), NUM_BLOCKS, 1)
    wire = align_wire(side.table, side.table, "rows")
    packer = Packer(side.table, wire, side="source", device=DEVICE)
    chunk = Chunk(0, 2, (TokenSpan(0, 0, 12),))
    with pytest.raises(LocalError, match=rf"the\s+cache has 0..{NUM_BLOCKS - 1}"):
        packer.stage([GroupBlocks(0, 0, (3, NUM_BLOCKS, 4))], [chunk], 12)
    with pytest.raises(LayoutError, match="tokens 4 to 7 of the request"):
        packer.stage([GroupBlocks(0, 0, (3, 0, 4))], [chunk], 12)
    with pytest.raises(LayoutError, match="tokens 8 to 11 of the request"):
        packer.stage([GroupBlocks(0, 0, (3, 4))], [chunk], 12)
    with pytest.raises(LayoutError, match="group 0 of this side, the request has none"):
        packer.stage([], [chunk], 12)
    with pytest.raises(LayoutError, match="the cache 40"):
        packer.stage([GroupBlocks(0, 0, (3,))], [Chunk(0, 2, (TokenSpan(0, 0, 2**31 - 1),))], 12)
    for bad in (
        Chunk(0, 3, ()),
        Chunk(1, 1, ()),
        Chunk(0, 2, (TokenSpan(1, 0, 1),)),
        Chunk(0, 2, (TokenSpan(0, 4, 3),)),
        Chunk(0, 2, (TokenSpan(0, 0, 1), TokenSpan(0, 1, 2))),
    ):
        with pytest.raises(LayoutError, match="a chunk"):
            packer.stage([GroupBlocks(0, 0, (3, 4, 5))], [bad], 12)


def test_a_side_that_does_not_exist_is_refused():
    side, _, _ = one_way(KERNELS[0])
    with pytest.raises(LocalError, match="side is 'P'"):
        Packer(side.table, align_wire(side.table, side.table), side="P", device=DEVICE)


def test_a_wire_of_other_tables_is_refused():
    model = simple_model()
    one = Side(model, simple_shape(), HeadInterval(0, 4), NUM_BLOCKS, 1)
    half = Side(model, simple_shape(), HeadInterval(0, 2), NUM_BLOCKS, 1)
    long = Side(model, simple_shape(kernel=8), HeadInterval(0, 4), NUM_BLOCKS, 1)
    for wire, table in (
        (align_wire(one.table, one.table, "rows"), half.table),
        (align_wire(one.table, one.table, "pages"), long.table),
    ):
        with pytest.raises(LayoutError, match="layer 'a'"):
            Packer(table, wire, side="target", device=DEVICE)

"""Two sides of a transfer in any shape, and the plainest possible way to read and write their rows.

``Side.row`` and ``Side.page`` pick bytes out of tensors by indexing; they share no code with the wire.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable, Scales
from kvconnect.cache.retention import FULL, Window
from kvconnect.cache.shard import HeadInterval, shard_heads
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec, StateSpec
from kvconnect.errors import LayoutError
from kvconnect.pack.digest import MULTIPLIER, STEP
from kvconnect.pack.packer import Packer
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import Chunk
from kvconnect.plan.wire import align_wire
from tests.caches import attention_layer, fill_random
from tests.pack.values import ITEM, cast_row

TOGETHER = ["block token head", "block head token", "head block token"]
APART = [
    "plane block token head",
    "block plane head token",
    "plane block head token",
    "block token head plane",
    "plane head block token",
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
try:
    import triton  # noqa: F401

    KERNELS = ["torch", "triton"] if DEVICE == "cuda" else ["numpy", "torch", "triton"]
except ImportError:
    KERNELS = ["numpy", "torch"]
NUM_BLOCKS = 40
M64 = 2**64


def interpreted_by(programs: int):
    """While this is open, kernels that are made are of so many programs, where nothing runs at a time."""
    if "triton" not in KERNELS:
        return nullcontext()
    return mock.patch("kvconnect.pack.launcher._INTERPRETED_PROGRAMS", programs)


@dataclass(frozen=True)
class Layer:
    """What both sides agree on. ``width`` are values of a head's K, of a latent row or a state.

    A head's V has as many values as its K, or ``value_width`` of them.
    """

    name: str
    group: int
    kind: str
    width: int
    dtype: torch.dtype
    row_tokens: int = 1
    value_width: int | None = None

    @property
    def has_heads(self) -> bool:
        return self.kind in ("gqa", "window")


@dataclass(frozen=True)
class Model:
    layers: tuple[Layer, ...]
    total_heads: int
    window: int
    num_tokens: int

    @property
    def groups(self) -> list[int]:
        return sorted({layer.group for layer in self.layers})


@dataclass(frozen=True)
class Shape:
    """How one side keeps the model: layouts and pads by layer, kernel tokens and ratio by group."""

    layouts: dict[str, str]
    pads: dict[str, int]
    kernel: dict[int, int]
    ratio: dict[int, int]


class Side:
    def __init__(
        self,
        model: Model,
        shape: Shape,
        heads: HeadInterval,
        num_blocks: int,
        seed: int,
        scales: dict[str, Scales] | None = None,
    ) -> None:
        self.model, self.shape, self.heads = model, shape, heads
        self.layers = {layer.name: layer for layer in model.layers}
        self.tensors: dict[str, CacheTensor] = {}
        specs = {}
        for index, layer in enumerate(model.layers):
            kernel, ratio = shape.kernel[layer.group], shape.ratio[layer.group]
            pad = shape.pads[layer.name] if ratio == 1 else 0
            layout, blocks, tokens = shape.layouts[layer.name], num_blocks * ratio, kernel // layer.row_tokens
            content = layer.width
            if layer.has_heads and "plane" not in layout:
                content += layer.width if layer.value_width is None else layer.value_width
            cache = attention_layer(layout, blocks, len(heads), tokens, content, layer.dtype, pad)
            fill_random(cache, seed + index)
            self.tensors[layer.name] = on_device(cache)
            specs[layer.name] = layer_spec(layer, model, kernel * ratio, len(heads))
        made = []
        for group in model.groups:
            made.append(
                KVCacheGroup.of({one.name: specs[one.name] for one in model.layers if one.group == group})
            )
        intervals = {layer.name: heads for layer in model.layers if layer.has_heads}
        sizes = {group: shape.kernel[group] for group in model.groups}
        config = KVCacheConfig(num_blocks, tuple(made))
        self.table = RegionTable.build(config, sizes, self.tensors, intervals, scales)

    def storage(self, name: str) -> torch.Tensor:
        """Every byte of a layer's storage; a copy."""
        tensor = self.tensors[name].tensor
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return raw.set_(tensor.untyped_storage()).cpu().clone()

    def reader(self, layer: Layer) -> Rows:
        """The layer as it is now; a copy."""
        cache = self.tensors[layer.name]
        view = (
            self.storage(layer.name)
            .view(cache.tensor.dtype)
            .as_strided(cache.tensor.shape, cache.tensor.stride(), cache.tensor.storage_offset())
        )
        return Rows(self, layer, view)

    def kernel_block(self, layer: Layer, blocks: GroupBlocks, row: int) -> tuple[int, int]:
        """The kernel block that has a row of the sequence, 0 for none, and the row's place in it."""
        if layer.kind == "state":
            return blocks.block_ids[0], 0
        kernel, ratio = self.shape.kernel[layer.group], self.shape.ratio[layer.group]
        token = row * layer.row_tokens
        index = token // (kernel * ratio) - blocks.first_block
        if not 0 <= index < len(blocks.block_ids) or not blocks.block_ids[index]:
            return 0, 0
        block = blocks.block_ids[index] * ratio + token % (kernel * ratio) // kernel
        return block, token % kernel // layer.row_tokens


class Rows:
    """A copy of a layer's cache, read and written row by row."""

    def __init__(self, side: Side, layer: Layer, view: torch.Tensor) -> None:
        self.axes = side.tensors[layer.name].axes.split()
        self.tensor = view
        self.bytes = view.view(torch.uint8).numpy()

    def at(self, block: int, token: int, head: int) -> list[np.ndarray]:
        where = {"block": block, "token": token, "head": head}
        planes = range(2) if "plane" in self.axes else range(1)
        return [
            self.bytes[tuple({**where, "plane": plane}[axis] for axis in self.axes if axis != "content")]
            for plane in planes
        ]

    def row(self, block: int, token: int, head: int) -> bytes:
        """K, then V, of one token and head."""
        return b"".join(piece.tobytes() for piece in self.at(block, token, head))

    def write(self, block: int, token: int, head: int, row: bytes) -> None:
        data = np.frombuffer(row, dtype=np.uint8)
        for piece in self.at(block, token, head):
            piece[:], data = data[: len(piece)], data[len(piece) :]

    def storage(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.tensor.untyped_storage())


def on_device(cache: CacheTensor) -> CacheTensor:
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.tensor.untyped_storage()).to(DEVICE)
    view = raw.view(cache.tensor.dtype).as_strided(
        cache.tensor.shape, cache.tensor.stride(), cache.tensor.storage_offset()
    )
    return CacheTensor(view, cache.axes)


def layer_spec(layer: Layer, model: Model, block_tokens: int, heads: int):
    if layer.has_heads:
        rule = Window(model.window) if layer.kind == "window" else FULL
        sizes = block_tokens, heads, layer.width, layer.dtype, layer.value_width
        return AttentionSpec(*sizes, retention=rule)
    if layer.kind == "mla":
        return MLASpec(
            block_tokens, layer.width, layer.dtype, stored_block_size=block_tokens // layer.row_tokens
        )
    return StateSpec(block_tokens, ((layer.width,),), (layer.dtype,))


DTYPES = [torch.float16, torch.uint8, torch.float32, torch.float64]


@st.composite
def models(draw, max_tokens: int = 14):
    layers = [
        Layer(f"full{index}", 0, "gqa", draw(st.sampled_from([1, 3, 4, 8])), draw(st.sampled_from(DTYPES)))
        for index in range(draw(st.integers(1, 2)))
    ]
    if draw(st.booleans()):
        layers.append(
            Layer(
                "latent",
                0,
                "mla",
                draw(st.integers(1, 9)),
                draw(st.sampled_from(DTYPES)),
                draw(st.sampled_from([1, 2])),
            )
        )
    group = 1
    if draw(st.booleans()):
        layers.append(Layer("window", group, "window", 4, torch.float16))
        group += 1
    if draw(st.booleans()):
        layers.append(Layer("state", group, "state", draw(st.integers(1, 40)), torch.float16))
    return Model(
        tuple(layers),
        draw(st.sampled_from([1, 2, 3, 4, 6])),
        draw(st.integers(1, 8)),
        draw(st.integers(1, max_tokens)),
    )


@st.composite
def shapes(draw, model: Model):
    layouts, pads, kernel, ratio = {}, {}, {}, {}
    for group in model.groups:
        kinds = {layer.kind for layer in model.layers if layer.group == group}
        # Rows for two tokens need kernel blocks of an even number of them.
        kernel[group] = (
            draw(st.sampled_from([2, 4, 6])) if "mla" in kinds else draw(st.sampled_from([1, 2, 3, 4]))
        )
        ratio[group] = 1 if "state" in kinds else draw(st.integers(1, 3))
    for layer in model.layers:
        fixed = {"mla": "block token", "state": "block"}
        possible = TOGETHER + APART if layer.value_width is None else TOGETHER
        layouts[layer.name] = fixed.get(layer.kind) or draw(st.sampled_from(possible))
        pads[layer.name] = draw(st.integers(0, 3))
    return Shape(layouts, pads, kernel, ratio)


def rank_heads(model: Model, rank: int, world: int) -> HeadInterval:
    return shard_heads(model.total_heads, rank, world)


@st.composite
def held_blocks(draw, model: Model, shape: Shape, may_skip: bool):
    """Blocks of every group. The source lacks only what lies before a window; the target lacks any."""
    ids = iter(draw(st.permutations(range(1, NUM_BLOCKS))))
    made = {}
    for layer in model.layers:
        group = layer.group
        if group in made:
            continue
        if layer.kind == "state":
            made[group] = GroupBlocks(group, 0, (next(ids),))
            continue
        tokens = shape.kernel[group] * shape.ratio[group]
        blocks = []
        for position in range(-(-model.num_tokens // tokens)):
            gone = layer.kind == "window" and (position + 1) * tokens <= model.num_tokens - model.window
            missing = draw(st.booleans()) if gone else may_skip and draw(st.integers(0, 4)) == 0
            blocks.append(0 if missing else next(ids))
        first = 0
        while blocks and not blocks[0] and draw(st.booleans()):
            first, blocks = first + 1, blocks[1:]
        made[group] = GroupBlocks(group, first, tuple(blocks))
    return made


def digest_by_hand(streams, seed):
    """The digest of (offset, word bytes, data), word by word."""
    total = 0
    for offset, word, data in streams:
        for at in range(0, len(data), word):
            x = int.from_bytes(data[at : at + word], "little") + seed + STEP * ((offset + at) // word)
            x %= M64
            x ^= x >> 32
            x = x * MULTIPLIER % M64
            x ^= x >> 32
            total += x
    return total % M64


def rows_of(layer: Layer, chunk: Chunk) -> range:
    for span in chunk.spans:
        if span.group == layer.group:
            return range(span.start // layer.row_tokens, -(-span.stop // layer.row_tokens))
    return range(0)


def slot_for(staged, fill=0xA5):
    return torch.full((staged.total_bytes + 32,), fill, dtype=torch.uint8, device=DEVICE)


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


def pages_of(side: Side, stream, blocks, chunk: Chunk):
    """The pages of a region that a chunk touches, as (block, place in the layer's storage)."""
    layer = side.layers[stream.layer]
    (region,) = (
        region
        for region in side.table.regions
        if (region.layer, region.first_plane, region.heads) == (layer.name, stream.first_plane, stream.heads)
    )
    first = region.address - side.tensors[layer.name].tensor.untyped_storage().data_ptr()
    rows, page_rows = rows_of(layer, chunk), region.axes.tokens
    if layer.kind != "state":
        page_rows = side.shape.kernel[layer.group] // layer.row_tokens
    for row in range(rows.start // page_rows * page_rows, rows.stop, page_rows):
        block, _ = side.kernel_block(layer, blocks[layer.group], row)
        at = first + block * region.block_stride
        yield block, slice(at, at + region.page_bytes)


def expected_streams(source: Side, held, target: Side, wire, chunk, scales):
    """The streams of a chunk as (offset, word bytes, data): pages, or rows cast one at a time, picked out."""
    at, made = 0, []
    for stream in wire.streams[chunk.first_stream : chunk.stop_stream]:
        layer, data = source.layers[stream.layer], b""
        if wire.order == "pages":
            raw = source.storage(layer.name).numpy()
            for block, place in pages_of(source, stream, held, chunk):
                data += raw[place].tobytes() if block else bytes(place.stop - place.start)
        else:
            travels, rows = wire_type(layer, target.layers[stream.layer]), source.reader(layer)
            for row, head in itertools.product(rows_of(layer, chunk), shared_heads(layer, source, target)):
                block, token = source.kernel_block(layer, held[layer.group], row)
                one = cast_as(layer, rows.row(block, token, head), layer.dtype, travels, scales)
                data += one if block else bytes(len(one))
        made.append((at, stream.word_bytes, data))
        at += -(-len(data) // 16) * 16
    return at, made


def write_streams(source: Side, target: Side, wanted, wire, chunk, streams, scales, images):
    """Put pages, or rows cast one at a time, into copies of the target's caches."""
    chosen = wire.streams[chunk.first_stream : chunk.stop_stream]
    for stream, (_, _, data) in zip(chosen, streams, strict=True):
        layer, image = target.layers[stream.layer], images[stream.layer]
        if wire.order == "pages":
            raw = image.storage().numpy()
            for block, place in pages_of(target, stream, wanted, chunk):
                page, data = data[: stream.width_bytes], data[stream.width_bytes :]
                if block:
                    raw[place] = np.frombuffer(page, dtype=np.uint8)
            continue
        travels = wire_type(source.layers[stream.layer], layer)
        places = list(itertools.product(rows_of(layer, chunk), shared_heads(layer, target, source)))
        width = len(data) // max(1, len(places))
        for row, head in places:
            block, token = target.kernel_block(layer, wanted[layer.group], row)
            one, data = data[:width], data[width:]
            if block:
                image.write(block, token, head, cast_as(layer, one, travels, layer.dtype, scales))


def exchange(
    kernels, source: Side, held, target: Side, wanted, spans, slot_bytes, seed, scales=None, order="rows"
):
    """Pack and unpack a request chunk by chunk, comparing slot, digests and caches on the way."""
    wire, scales = align_wire(source.table, target.table, order, convert=True), scales or {}
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
        ticket = packer.pack(slot.data_ptr(), ours, seed)
        ticket.wait()
        assert np.array_equal(slot.cpu().numpy(), expected)
        assert ticket.digest == digest_by_hand(streams, seed)
        landed = unpacker.unpack(slot.data_ptr(), theirs, seed)
        landed.wait()
        assert landed.digest == ticket.digest
        assert np.array_equal(slot.cpu().numpy(), expected)
        write_streams(source, target, wanted, wire, chunk, streams, scales, images)
    for name, before in untouched.items():
        assert torch.equal(source.storage(name), before)
        assert torch.equal(target.storage(name), images[name].storage())

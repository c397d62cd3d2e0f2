"""Values cast while they are packed and unpacked, against casts one at a time by definition."""

from __future__ import annotations

import functools
import tracemalloc

import pytest
import torch

from kvconnect.cache.shard import HeadInterval
from kvconnect.errors import LayoutError
from kvconnect.pack.packer import Packer
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import Chunk, TokenSpan
from kvconnect.plan.wire import align_wire
from tests.pack.sides import DEVICE, KERNELS, Layer, Model, Shape, Side, slot_for
from tests.pack.values import ITEM, PAIRS, cast_row

# The interpreter computes with numpy, which warns of what is meant here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
BFLOAT16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WAYS = [("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")]
"""The narrower type travels: values are cast while they are packed, or while they are unpacked."""


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


@functools.cache
def cast_rows(rows: bytes, pair: tuple[str, str], scales: tuple[float, float]) -> bytes:
    """Rows of 256 values, one value at a time."""
    row_bytes = 256 * ITEM[pair[0]]
    return b"".join(
        cast_row(rows[at : at + row_bytes], *pair, 128, scales) for at in range(0, len(rows), row_bytes)
    )


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
    wire = align_wire(source.table, target.table, "rows", convert=True)
    packer, unpacker = (
        Packer(side.table, wire, side=name, device=DEVICE, kernels=kernels)
        for side, name in ((source, "source"), (target, "target"))
    )
    ours, theirs = whole(source, packer), whole(target, unpacker)
    slot = slot_for(ours)
    packer.pack(slot.data_ptr(), ours, 1).wait()
    unpacker.unpack(slot.data_ptr(), theirs, 1).wait()
    found = target.tensors["a"].tensor[2:].contiguous().view(torch.uint8).cpu().numpy().tobytes()
    assert found == cast_rows(spread.numpy().tobytes(), pair, scales)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_was_quantised_is_read_as_it_was_written(kernels):
    """What an fp8 cache says at first hand: its values times its scales."""
    scales = (0.25, 3.0)
    wide = one_layer(BFLOAT16, "plane block head token", width=32, kernel=8, heads=2)
    narrow = one_layer(FP8, "block token head", width=32, kernel=16, heads=2, scales=scales, blocks=10)
    wanted = torch.randn(2, 128, 2, 32).clamp(-3, 3)
    # (plane, block, head, token, content)
    wide.tensors["a"].tensor[:, 2:] = wanted.view(2, 16, 8, 2, 32).permute(0, 1, 3, 2, 4).to(BFLOAT16)
    wire = align_wire(wide.table, narrow.table, convert=True)
    packer = Packer(wide.table, wire, side="source", device=DEVICE, kernels=kernels)
    unpacker = Packer(narrow.table, wire, side="target", device=DEVICE, kernels=kernels)
    ours, theirs = whole(wide, packer), whole(narrow, unpacker)
    slot = slot_for(ours)
    packer.pack(slot.data_ptr(), ours, 1).wait()
    unpacker.unpack(slot.data_ptr(), theirs, 1).wait()
    read = narrow.tensors["a"].tensor[2:].cpu().float().view(128, 2, 2, 32) * torch.tensor(scales).view(2, 1)
    assert torch.allclose(read.permute(2, 0, 1, 3), wanted, rtol=0.07, atol=0.004)


@pytest.mark.skipif("numpy" not in KERNELS, reason="needs CPU memory")
@pytest.mark.parametrize("pair", WAYS)
def test_no_copy_of_the_whole_is_made_on_the_way(pair):
    source, target = (one_layer(getattr(torch, name), kernel=64, blocks=200) for name in pair)
    wire = align_wire(source.table, target.table, "rows", convert=True)
    for side, name in ((source, "source"), (target, "target")):
        packer = Packer(side.table, wire, side=name, device="cpu", kernels="numpy")
        staged = whole(side, packer)
        slot = slot_for(staged)
        tracemalloc.start()
        packer.pack(slot.data_ptr(), staged, 1)
        packer.unpack(slot.data_ptr(), staged, 1)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert staged.total_bytes > 3 << 20
        assert most_bytes <= 1 << 20


def test_a_table_that_keeps_another_type_than_the_wire_says_is_refused():
    wide, narrow = one_layer(BFLOAT16), one_layer(FP8)
    wire = align_wire(wide.table, narrow.table, convert=True)
    with pytest.raises(
        LayoutError, match="'a': the wire has bfloat16 on this side, this table float8_e4m3fn"
    ):
        Packer(narrow.table, wire, side="source", device=DEVICE)

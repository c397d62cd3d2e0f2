"""The null block may lie where no memory is: it is never read."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, mmap
import msgspec, numpy as np, torch
from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.retention import Window
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.pack.packer import Packer
from kvconnect.plan.chunks import Chunk, TokenSpan
from kvconnect.plan.wire import align_wire

def table_of(dtype):
    spec = AttentionSpec(4, 1, 8, dtype, retention=Window(4))
    tensor = CacheTensor(torch.ones(8, 4, 1, 16, dtype=dtype), "block token head content")
    config = KVCacheConfig(8, (KVCacheGroup(("a",), spec),))
    return tensor, RegionTable.build(config, {0: 4}, {"a": tensor})

for converts in (False, True):
    size = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0)
    kept, ours = table_of(torch.float16)
    _, theirs = table_of(torch.bfloat16 if converts else torch.float16)
    (region,) = ours.regions
    moved = msgspec.structs.replace(region, address=address + size - region.block_stride)
    ours = RegionTable((moved,), ours.groups)
    wire = align_wire(ours, theirs, convert=converts)
    packer = Packer(ours, wire, side="source", device="cpu")
    slot = torch.full((4096,), 7, dtype=torch.uint8)
    for ids in ((0, 0, 0, 1, 2), (0, 0, 0)):
        tokens = 4 * len(ids)
        blocks = [GroupBlocks(0, 0, ids)]
        chunk = Chunk(0, 1, (TokenSpan(0, 0, tokens),))
        (staged,) = packer.stage(blocks, [chunk], 100)
        packer.pack(slot.data_ptr(), staged, 1)
        assert not slot[: staged.total_bytes].any()
    print("packed", converts)
"""


def test_the_null_block_is_not_read():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["packed", "False", "packed", "True"]), done.stderr

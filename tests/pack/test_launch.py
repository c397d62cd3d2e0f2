"""How the Triton kernel is launched: a kernel that is compiled is started with nothing but its arguments."""

from __future__ import annotations

import inspect

import pytest
import torch

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.pack.packer import Packer
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import Chunk, TokenSpan
from kvconnect.plan.wire import align_wire
from tests.pack.sides import DEVICE

pytest.importorskip("triton")

from kvconnect.pack import launcher

PARAMETERS = tuple(inspect.signature(launcher.move_kernel.fn).parameters)


class Compiled:
    """What a launch by the language returns; started like that, it takes all arguments by position."""

    def __init__(self):
        self.starts = []

    def __getitem__(self, grid):
        return lambda *given: self.starts.append((grid, dict(zip(PARAMETERS, given, strict=True))))


class Language:
    """Compiles at each launch, and remembers with what."""

    def __init__(self):
        self.launches = []
        self.made = []

    def __getitem__(self, grid):
        def launch(*given, num_warps, **named):
            self.launches.append((grid, {**dict(zip(PARAMETERS, given, strict=False)), **named}))
            self.made.append(Compiled())
            return self.made[-1]

        return launch


def test_a_compiled_kernel_is_started_with_the_same_arguments(monkeypatch):
    language = Language()
    monkeypatch.setattr(launcher, "CompiledKernel", Compiled)
    monkeypatch.setattr(launcher, "move_kernel", language)
    cache = torch.zeros(8, 4, 2, 16, dtype=torch.float16, device=DEVICE)
    spec = FullAttentionSpec(4, 2, 8, torch.float16)
    table = RegionTable.build(
        KVCacheConfig(8, (KVCacheGroup(("a",), spec),)),
        {0: 4},
        {"a": CacheTensor(cache, "block token head content")},
    )
    packer = Packer(table, align_wire(table, table), side="source", device=DEVICE, kernels="triton")
    staged = packer.stage(
        [GroupBlocks(0, 0, (3, 5))],
        [Chunk(0, 1, (TokenSpan(0, 0, 4),)), Chunk(0, 1, (TokenSpan(0, 0, 8),))],
        8,
    )
    slot = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    for chunk in staged:
        for move, seed in ((packer.pack, 7), (packer.unpack, 7)):
            move(slot.data_ptr(), chunk, seed)
    assert len(language.launches) == 2, "one for each kind of kernel, whatever the chunk"
    for made, (grid, given) in zip(language.made, language.launches, strict=True):
        ((started_on, started_with),) = made.starts
        assert started_on[0] >= grid[0]
        assert tuple(started_with) == PARAMETERS
        varying = ("numbers", "batches_at", "num_items", "seed")
        assert {name: value for name, value in started_with.items() if name not in varying} == {
            name: value for name, value in given.items() if name not in varying
        }
        assert started_with["numbers"].data_ptr() % 16 == 0

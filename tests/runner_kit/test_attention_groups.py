"""The order in which a runner's attention is set up, and the kit used alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvconnect.cache.specs import (
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    StateSpec,
    UniformTypeSpec,
)
from kvconnect.errors import LayoutError
from kvconnect.runner_kit.attention_groups import GraphSupport, init_attention
from kvconnect.runner_kit.kernel_blocks import MultipleOf
from tests.runner_kit import example


@dataclass
class Backend:
    name: str
    kernel_block_sizes: tuple[int | MultipleOf, ...]
    graph_support: GraphSupport = GraphSupport.ALWAYS
    made_for: list[int] = field(default_factory=list)

    def make_metadata_builder(self, kernel_block_size):
        self.made_for.append(kernel_block_size)
        return (self.name, kernel_block_size)


SPECS = {"mla": MLASpec(128, 64, torch.bfloat16), "draft": FullAttentionSpec(128, 2, 16, torch.bfloat16)}
MIXED = KVCacheGroup(tuple(SPECS), UniformTypeSpec(SPECS))
STATE = KVCacheGroup(("state",), StateSpec(4096, ((4,),), (torch.float32,)))


def test_builders_are_made_once_with_the_size_that_all_backends_of_the_group_take():
    mla = Backend("mla", (64,), GraphSupport.UNIFORM_DECODE)
    draft = Backend("draft", (MultipleOf(16),))
    config = KVCacheConfig(8, (MIXED, STATE, KVCacheGroup(("enc",), EncoderOnlySpec(16))))
    setup = init_attention(config, {"mla": mla, "draft": draft})
    assert setup.kernel_block_sizes == {0: 64, 1: 4096}
    assert [(g.cache_group, g.layer_names, g.metadata_builder) for g in setup.groups] == [
        (0, ("mla",), ("mla", 64)),
        (0, ("draft",), ("draft", 64)),
    ]
    assert (mla.made_for, draft.made_for) == ([64], [64])
    assert setup.graph_support is GraphSupport.UNIFORM_DECODE


def test_layers_of_one_backend_share_a_builder():
    shared = Backend("shared", (MultipleOf(16),))
    config = KVCacheConfig(8, (KVCacheGroup(("a", "b"), FullAttentionSpec(32, 1, 8, torch.float16)),))
    (group,) = init_attention(config, {"a": shared, "b": shared}).groups
    assert group.layer_names == ("a", "b")
    assert shared.made_for == [32]


def test_a_state_layer_that_no_graph_can_hold_weakens_the_whole():
    config = KVCacheConfig(8, (MIXED, STATE))
    backends = {name: Backend(name, (64,)) for name in SPECS}
    backends["state"] = Backend("scan", (), GraphSupport.NEVER)
    setup = init_attention(config, backends)
    assert setup.graph_support is GraphSupport.NEVER
    assert setup.groups[-1].kernel_block_size == 4096


def test_layers_without_a_backend_and_backends_without_a_layer_are_errors():
    config = KVCacheConfig(8, (MIXED,))
    with pytest.raises(LayoutError, match="'draft' of cache group 0 has no attention backend"):
        init_attention(config, {"mla": Backend("mla", (64,))})
    backends = {name: Backend(name, (64,)) for name in (*SPECS, "ghost")}
    with pytest.raises(LayoutError, match="'ghost'"):
        init_attention(config, backends)


def test_the_kit_works_alone():
    done = subprocess.run(
        [sys.executable, "-m", "tests.runner_kit.example"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "builder for pages of 64 tokens",
        "pages of request 0: [14, 15, 6, 7]",
        "slot of its token 129: 385 and of the padding: -1",
        "fresh pages hold NaN: False",
    ]
    assert Path(example.__file__).read_text().count("\n") < 60

"""Kernel block sizes, the order in which a runner's attention is set up, and the kit used alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.specs import (
    AttentionSpec,
    EncoderOnlySpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    StateSpec,
)
from kvconnect.errors import ConfigError, LayoutError
from kvconnect.runner_kit.kernel_blocks import (
    GraphSupport,
    MultipleOf,
    init_attention,
    prepare_kernel_block_sizes,
    select_common_block_size,
    split_refusal,
    sync_block_size,
)
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


SPECS = {"mla": MLASpec(128, 64, torch.bfloat16), "draft": AttentionSpec(128, 2, 16, torch.bfloat16)}
MIXED = KVCacheGroup.of(SPECS)
STATE = KVCacheGroup(("state",), StateSpec(4096, ((4,),), (torch.float32,)))


def test_no_common_size_names_every_backend_and_what_it_takes():
    with pytest.raises(LayoutError, match=r"128.*flash takes 64.*mla takes 48"):
        select_common_block_size(128, [Backend("flash", (64,)), Backend("mla", (48,))])


@settings(max_examples=200)
@given(
    st.integers(1, 256),
    st.lists(
        st.lists(st.one_of(st.integers(1, 256), st.integers(1, 64).map(MultipleOf)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
)
def test_the_choice_is_the_largest_that_all_take(block_size, accepted):
    backends = [Backend(f"b{index}", tuple(sizes)) for index, sizes in enumerate(accepted)]

    def all_take(size):
        return all(
            any(size % a.base == 0 if isinstance(a, MultipleOf) else size == a for a in sizes)
            for sizes in accepted
        )

    possible = [size for size in range(1, block_size + 1) if block_size % size == 0 and all_take(size)]
    if possible:
        assert select_common_block_size(block_size, backends) == max(possible)
    else:
        with pytest.raises(LayoutError):
            select_common_block_size(block_size, backends)


def test_builders_are_made_once_with_the_size_that_all_backends_of_the_group_take():
    mla = Backend("mla", (64,), GraphSupport.UNIFORM_DECODE)
    draft, shared = Backend("draft", (MultipleOf(16),)), Backend("shared", (MultipleOf(16),))
    encoder = KVCacheGroup(("enc",), EncoderOnlySpec(16))
    alike = KVCacheGroup(("a", "b"), AttentionSpec(32, 1, 8, torch.float16))
    config = KVCacheConfig(8, (MIXED, STATE, encoder, alike))
    setup = init_attention(config, {"mla": mla, "draft": draft, "a": shared, "b": shared})
    assert setup.kernel_block_sizes == {0: 64, 1: 4096, 3: 32}
    assert [(g.cache_group, g.layer_names, g.metadata_builder) for g in setup.groups] == [
        (0, ("mla",), ("mla", 64)),
        (0, ("draft",), ("draft", 64)),
        (3, ("a", "b"), ("shared", 32)),
    ]
    assert (mla.made_for, draft.made_for, shared.made_for) == ([64], [64], [32])
    assert setup.graph_support is GraphSupport.UNIFORM_DECODE


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
    for of_groups in ([], [[]]):
        with pytest.raises(LayoutError, match="backend"):
            prepare_kernel_block_sizes(config, of_groups)


@settings(max_examples=200)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_stored_rows_split_whole_or_not_at_all(rows, kernel, factor):
    spec = MLASpec(kernel * factor, 8, torch.float16, stored_block_size=rows)
    whole = (rows * kernel) % (kernel * factor) == 0
    assert (split_refusal(spec, kernel) is None) == (whole or factor == 1)


def test_what_forbids_a_split_is_said():
    few_rows = MLASpec(256, 8, torch.float16, stored_block_size=2)
    padded = AttentionSpec(128, 1, 8, torch.float16, page_size_padded=8192)
    for spec, why in ((few_rows, "2 stored rows per 256 tokens"), (padded, "padded to 8192")):
        with pytest.raises(LayoutError, match=why):
            select_common_block_size(spec.block_size, [Backend("flash", (64,))], [spec])
    assert select_common_block_size(128, [Backend("any", (MultipleOf(16),))], [padded]) == 128


def test_sync_says_both_numbers_once_and_refuses_a_kernel_block_that_is_no_part(caplog):
    with caplog.at_level(logging.INFO):
        assert [sync_block_size(configured, 64) for configured in (128, 64)] == [64, 64]
    (said,) = caplog.messages
    assert "block_size is 128 tokens: using kernel blocks of 64" in said
    for configured in (16, 96):
        with pytest.raises(ConfigError, match=rf"block_size is {configured}.*64"):
            sync_block_size(configured, 64)


def test_the_example_shows_the_kit_in_few_lines(capsys):
    example.main()
    assert capsys.readouterr().out.splitlines() == [
        "builder for pages of 64 tokens",
        "pages of request 0: [14, 15, 6, 7]",
        "slot of its token 129: 385 and of the padding: -1",
        "fresh pages hold NaN: False",
    ]
    assert Path(example.__file__).read_text().count("\n") < 60

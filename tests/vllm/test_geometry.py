"""Caches as vLLM registers them, against copying by hand. Needs no vLLM: its objects are imitated.

The imitations have what a worker really gets: four-dimensional views of one storage, in any order of the
dimensions in memory, with kernel blocks where the block is split.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.retention import Window
from kvconnect.cache.shard import HeadInterval, Topology, partner_ranks, shard_heads
from kvconnect.errors import LayoutError
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.wire import align_wire
from kvconnect.vllm.geometry import (
    HeadCounts,
    held_back,
    running_states,
    scheduler_config,
    transferred_groups,
    worker_cache,
)
from tests.slots import carry_over
from tests.vllm.specs import BLOCK, CHUNKED, FULL, LATENT, LATENT_WINDOW, STATE, cache_config, spec


def attention(num_blocks: int, heads: int, content: int, split: int = 1, layout: str = "BHNC"):
    """A cache of int16 values: blocks, heads, tokens, content, in the given order in memory."""
    sizes = {"B": num_blocks * split, "H": heads, "N": BLOCK // split, "C": content}
    made = torch.zeros([sizes[axis] for axis in layout], dtype=torch.int16)
    return made.permute([layout.index(axis) for axis in "BHNC"])


def build(config, tensors: dict[str, torch.Tensor], rank: int, world: int, counts: HeadCounts):
    cache = worker_cache(config, tensors, tensor_rank=rank, num_ranks=world, head_counts=counts)
    table = RegionTable.build(cache.config, cache.kernel_block_sizes, cache.tensors, cache.heads)
    return cache, table


LATENT_WIDTH, TARGET_HEADS, DRAFT_HEADS = 14, 2, 4
COUNTS = HeadCounts(main=TARGET_HEADS, draft=DRAFT_HEADS, num_layers=2)


def mixed(num_blocks: int, rank: int, world: int, split: int, layout: str):
    """A latent layer, a layer of 2 heads and a draft layer of 4, with pages of three sizes in one group."""
    heads = [len(shard_heads(count, rank, world)) for count in (TARGET_HEADS, DRAFT_HEADS)]
    tensors = {
        "latent": attention(num_blocks, 1, LATENT_WIDTH, split, layout),
        "model.layers.1.attn": attention(num_blocks, heads[0], 6, split, layout),
        "model.layers.2.attn": attention(num_blocks, heads[1], 10, split, layout),
    }
    specs = dict(zip(tensors, (LATENT, FULL, FULL), strict=True))
    config = cache_config(num_blocks, {tuple(tensors): spec("UniformTypeKVCacheSpecs", kv_cache_specs=specs)})
    return config, tensors, build(config, tensors, rank, world, COUNTS)


def put(tensors, ids, rank: int, world: int, split: int, num_tokens: int) -> None:
    for (layer, tensor), heads in zip(tensors.items(), (None, TARGET_HEADS, DRAFT_HEADS), strict=True):
        owned = HeadInterval(0, 1) if heads is None else shard_heads(heads, rank, world)
        # Values of each layer, head and token, whoever keeps them.
        values = 1000 * torch.arange(owned.start, owned.stop)[:, None] + torch.arange(tensor.shape[3])
        for token in range(num_tokens):
            kernel, row = divmod(token % BLOCK, BLOCK // split)
            tensor[ids[token // BLOCK] * split + kernel, :, row] = values.short() + 20 * token + len(layer)


@given(
    # As vLLM divides heads: evenly, or each of them over several ranks.
    worlds=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    layouts=st.tuples(st.sampled_from(["BHNC", "BNHC", "HBNC"]), st.sampled_from(["BHNC", "BNHC", "HBNC"])),
    split=st.sampled_from([1, 2, 4]),
    num_tokens=st.integers(1, 20),
    ids=st.permutations(range(1, 8)),
)
def test_every_rank_gets_its_heads_of_latent_target_and_draft_layers(worlds, layouts, split, num_tokens, ids):
    if split > 1:
        # Heads outside of the blocks leave gaps between the kernel blocks of a page.
        layouts = tuple("BHNC" if layout == "HBNC" else layout for layout in layouts)
    prefill_world, decode_world = worlds
    blocks = -(-num_tokens // BLOCK)
    source_ids, target_ids = ids[:blocks], ids[::-1][:blocks]
    prefill = []
    for rank in range(prefill_world):
        _, tensors, (_, table) = mixed(9, rank, prefill_world, split, layouts[0])
        put(tensors, source_ids, rank, prefill_world, split, num_tokens)
        prefill.append((tensors, table))
    for rank in range(decode_world):
        _, tensors, (cache, table) = mixed(11, rank, decode_world, split, layouts[1])
        assert not cache.rank_bound
        for partner in partner_ranks(rank, Topology(decode_world), Topology(prefill_world), COUNTS.finest):
            held, wanted = (GroupBlocks(0, 0, tuple(ids)) for ids in (source_ids, target_ids))
            carry_over(prefill[partner][1], table, [held], [wanted], num_tokens)
        _, expected, _ = mixed(11, rank, decode_world, split, layouts[1])
        put(expected, target_ids, rank, decode_world, split, num_tokens)
        for layer, tensor in tensors.items():
            assert torch.equal(tensor, expected[layer]), (layer, rank)


def test_one_head_of_an_unknown_number_travels_whole_and_only_between_equal_ranks():
    """It may be one of as many as there are ranks, or one that several ranks keep."""
    tensors = {"layer": attention(5, 1, 4)}
    config = cache_config(5, {"layer": FULL})
    cache, table = build(config, tensors, 1, 2, HeadCounts(8))
    assert cache.rank_bound == ("layer",)
    assert table.regions[0].heads is None
    _, other = build(config, {"layer": attention(5, 2, 4)}, 0, 1, HeadCounts(8))
    with pytest.raises(LayoutError, match="the decode node's pages cannot be divided by head"):
        align_wire(other, table)


def test_layers_with_another_number_of_heads_than_their_model_are_divided_evenly():
    config = cache_config(5, {"layer": FULL})
    cache, table = build(config, {"layer": attention(5, 3, 4)}, 1, 2, HeadCounts(2))
    assert (cache.rank_bound, cache.heads) == ((), {"layer": HeadInterval(3, 6)})
    assert cache.finest(HeadCounts(2)) == 6
    whole, other = build(config, {"layer": attention(5, 6, 4)}, 0, 1, HeadCounts(2))
    assert whole.finest(HeadCounts(2)) == 6
    (stream,) = align_wire(other, table).streams
    assert (stream.heads, stream.width_bytes * BLOCK) == (HeadInterval(3, 6), table.regions[0].page_bytes)


def slots(num_blocks: int, heads: int, rank: int = 0, world: int = 1, split: int = 1, layout: str = "BHNC"):
    """A layer of four KV heads whose backend has K and V of a head, or their scales, in slots of its own."""
    of_slots = spec("FullAttentionSpec", num_head_slots=2 * heads)
    tensors = {"layer": attention(num_blocks, 2 * heads, 5, split, layout)}
    made = build(cache_config(num_blocks, {"layer": of_slots}), tensors, rank, world, HeadCounts(4))
    return tensors["layer"], *made


@pytest.mark.parametrize("layout", ["BHNC", "BNHC"])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 11, 16])
def test_pages_of_slots_travel_whole(layout, split, num_tokens):
    """Where in a page the values of a token lie only the backend knows."""
    source, _, ours = slots(9, 4, split=split, layout=layout)
    target, _, theirs = slots(12, 4, split=split, layout=layout)
    source.copy_(torch.randint(1, 30_000, source.shape, dtype=torch.int16))
    moved = -(-num_tokens // BLOCK)
    source_ids, target_ids = (5, 2)[:moved], (3, 9)[:moved]
    carry_over(ours, theirs, [GroupBlocks(0, 0, source_ids)], [GroupBlocks(0, 0, target_ids)], num_tokens)
    rows = BLOCK // split
    for number, (at, to) in enumerate(zip(source_ids, target_ids, strict=True)):
        kernels = min(split, -(-(num_tokens - number * BLOCK) // rows))
        first, into = source[at * split :][:kernels], target[to * split :][:kernels]
        assert torch.equal(first, into), "each kernel block that has a token"
    untouched = set(range(12)) - set(target_ids)
    assert not any(target[block * split :][:split].any() for block in untouched)


@pytest.mark.parametrize(
    "other",
    [{"heads": 2, "world": 2}, {"heads": 2, "world": 2, "rank": 1}, {"heads": 4, "split": 2}],
    ids=str,
)
@pytest.mark.parametrize("role", ["P", "D"])
def test_pages_of_slots_are_refused_between_sides_that_divide_them_otherwise(role, other):
    _, cache, one = slots(9, 4)
    _, _, unlike = slots(12, **other)
    assert not cache.heads
    pair = (one, unlike) if role == "P" else (unlike, one)
    with pytest.raises(LayoutError):
        align_wire(*(table for table in pair))


def test_state_is_a_page_with_padding_that_is_not_moved():
    storage = torch.zeros(6, 64, dtype=torch.int8)
    tensors = {"state": storage[:, :40].view(6, 1, 1, 40)}
    config = cache_config(6, {"state": STATE})
    cache, table = build(config, tensors, 0, 2, HeadCounts(None))
    assert cache.rank_bound == ("state",)
    (region,) = table.regions
    assert (region.page_bytes, region.block_stride, region.num_blocks) == (40, 64, 6)
    assert table.groups[0].is_state


@given(scratch=st.integers(0, 3), before=st.integers(0, 4), state=st.integers(1, 99))
def test_of_a_state_group_only_the_running_state_counts(scratch, before, state):
    config = cache_config(
        9, {"a": FULL, "s": spec("MambaSpec", shapes=((4,),), num_speculative_blocks=scratch)}
    )
    ids = [0] * before + [state] + list(range(100, 100 + scratch))
    assert running_states(config, ([1, 2], ids)) == ([1, 2], [state])
    assert running_states(config, ([], [])) == ([], [])


def test_a_window_of_latent_rows_keeps_its_window():
    tensors = {"layer": attention(5, 1, 4)}
    _, table = build(cache_config(5, {"layer": LATENT_WINDOW}), tensors, 0, 1, HeadCounts(None))
    assert table.groups[0].rule == Window(16)


def test_what_prefill_leaves_to_decode():
    plain = cache_config(5, {"a": FULL})
    assert [held_back(plain, ahead) for ahead in (0, 1, 3)] == [0, 0, 2]
    replayed = spec("SlidingWindowMLASpec", sliding_window=16, bounded_replay=True)
    for forgetful in (LATENT_WINDOW, CHUNKED, STATE, replayed):
        config = cache_config(5, {"a": FULL, "b": forgetful})
        assert [held_back(config, ahead) for ahead in (0, 1, 3)] == [1, 1, 2]


def test_groups_that_are_not_transferred_are_left_alone():
    config = cache_config(5, {"a": FULL, "b": FULL}, transfer_group_ids=(1,))
    assert transferred_groups(config) == (1,)
    assert [group.has_cache for group in scheduler_config(config).groups] == [False, True]
    cache = worker_cache(
        config,
        {"a": torch.zeros(3, dtype=torch.int8), "b": attention(5, 1, 4)},
        tensor_rank=0,
        num_ranks=1,
        head_counts=HeadCounts(1),
    )
    assert set(cache.tensors) == {"b"}


@pytest.mark.parametrize(
    ("shape", "problem"),
    [((5, 1, 8), "four dimensions"), ((7, 1, 8, 4), "7 kernel blocks for 5 blocks")],
)
def test_a_tensor_of_another_form_is_refused_by_name(shape, problem):
    config = cache_config(5, {"layer": FULL})
    with pytest.raises(LayoutError, match=problem) as caught:
        worker_cache(
            config, {"layer": torch.zeros(shape)}, tensor_rank=0, num_ranks=1, head_counts=HeadCounts(1)
        )
    assert "'layer'" in str(caught.value)

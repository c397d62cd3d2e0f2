"""Recurrent states between unequal numbers of ranks, byte by byte. Needs no vLLM: its objects are imitated.

What a rank's page must hold is cut by hand out of arrays of the whole model, head by head and channel by
channel, which shares no code with sections, tables and wires.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.shard import Topology, partner_ranks, shard_heads
from kvconnect.errors import LayoutError
from kvconnect.peer.agreement import table_refusal
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.wire import align_wire
from kvconnect.vllm.geometry import HeadCounts, worker_cache
from kvconnect.vllm.stated_identity import _states
from tests.slots import carry_over
from tests.vllm.specs import BLOCK, FULL, cache_config, spec
from tests.vllm.test_geometry import attention

WORLDS = (1, 2, 4)
STATE, ATTENTION = "model.layers.0.mixer", "model.layers.1.attn"
Kind = enum.Enum("Kind", ["MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV", "LINEAR"])


@dataclass
class Model:
    """One recurrent layer of the whole model: the convolution's projections, each by units that are not cut
    and channels and taps, then the temporal state by units; with projections that every rank has whole."""

    kind: Kind
    conv: dict[str, np.ndarray]
    temporal: np.ndarray | None
    whole: tuple[str, ...] = ()
    groups: int = 0
    kv_heads: int = 4

    def share(self, name: str, of: np.ndarray, rank: int, world: int) -> np.ndarray:
        if name in self.whole:
            return of
        each = len(of) // world
        return of[rank * each : (rank + 1) * each]

    def states(self, rank: int, world: int, layout: str) -> list[np.ndarray]:
        """The states of a rank's page, one after the other."""
        states = []
        if self.conv:
            parts = [self.share(name, part, rank, world) for name, part in self.conv.items()]
            conv = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
            states.append(conv if layout == "DS" else np.ascontiguousarray(conv.T))
        if self.temporal is not None:
            states.append(self.share("temporal", self.temporal, rank, world))
        return states


def numbered(kind: type, *shape: int, first: int) -> np.ndarray:
    """Values that differ wherever they are compared with each other."""
    return (first + np.arange(np.prod(shape))).astype(kind).reshape(shape)


@st.composite
def models(draw, kinds=tuple(Kind)):
    kind = draw(st.sampled_from(kinds))
    heads = 4 * draw(st.integers(1, 3))
    groups = 1 if kind is Kind.MAMBA2 and draw(st.booleans()) else 4 * draw(st.integers(1, 2))
    value, key, taps = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    temporal = numbered(np.float32, heads, value, key, first=50_000)
    of_values = numbered(np.int16, heads, value, taps, first=1000)
    of_keys = [numbered(np.int16, groups, key, taps, first=first) for first in (9000, 18_000)]
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    match kind:
        case Kind.MAMBA2:
            conv = {"x": of_values, "B": of_keys[0], "C": of_keys[1]}
            whole = ("B", "C") if groups == 1 else ()
            return Model(kind, conv, temporal, whole, groups, kv_heads)
        case Kind.GDN_ATTN:
            conv = {"q": of_keys[0], "k": of_keys[1], "v": of_values}
            return Model(kind, conv, temporal, kv_heads=kv_heads)
        case Kind.MAMBA1:
            channels = of_values.reshape(-1, 1, taps)
            states = numbered(np.float32, len(channels), key, first=50_000)
            return Model(kind, {"x": channels}, states, kv_heads=kv_heads)
        case Kind.SHORT_CONV:
            return Model(kind, {"x": of_values}, None, kv_heads=kv_heads)
    return Model(kind, {}, temporal, kv_heads=kv_heads)


class Rank:
    """A rank's caches as vLLM registers them: pages of bytes with padding, and an attention layer."""

    def __init__(self, model: Model, rank: int, world: int, layout: str, num_blocks: int, pad: int) -> None:
        LAYOUT[0] = layout
        self.states = model.states(rank, world, layout)
        content = sum(state.nbytes for state in self.states)
        self.storage = torch.full((num_blocks, content + pad), -1, dtype=torch.int8)
        heads = shard_heads(model.kv_heads, rank, world)
        self.attention = attention(num_blocks, len(heads), 2)
        self.rows = torch.arange(heads.start, heads.stop, dtype=torch.int16)[:, None, None] + 70
        dtypes = tuple({np.dtype("int16"): torch.int16}.get(s.dtype, torch.float32) for s in self.states)
        shapes = tuple(state.shape for state in self.states)
        self.spec = spec("MambaSpec", 4096, shapes=shapes, dtypes=dtypes, mamba_type=model.kind)
        tensors = {STATE: self.storage[:, :content].view(num_blocks, 1, 1, -1), ATTENTION: self.attention}
        self.config = cache_config(num_blocks, {STATE: self.spec, ATTENTION: FULL})
        layers = {STATE: SimpleNamespace(norm=SimpleNamespace(n_groups=model.groups))}
        self.counts = HeadCounts(model.kv_heads)
        self.cache = worker_cache(
            self.config, tensors, tensor_rank=rank, num_ranks=world, head_counts=self.counts, layers=layers
        )
        cache = self.cache
        self.table = RegionTable.build(cache.config, cache.kernel_block_sizes, cache.tensors, cache.heads)

    def fill(self, block: int) -> None:
        page = np.concatenate(
            [np.ascontiguousarray(state).reshape(-1).view(np.int8) for state in self.states]
        )
        self.storage[block, : len(page)] = torch.from_numpy(page)
        self.attention[block] = self.rows


LAYOUT = ["SD"]
"""What vLLM's environment says of the order within a convolution's state."""


@pytest.fixture(autouse=True, scope="module")
def layout():
    with pytest.MonkeyPatch.context() as patched:
        for module in ("states", "stated_identity"):
            patched.setattr(f"kvconnect.vllm.{module}.conv_layout", lambda: LAYOUT[0])
        yield


@settings(max_examples=150, deadline=None)
@given(
    models(),
    st.tuples(st.sampled_from(WORLDS), st.sampled_from(WORLDS)),
    st.sampled_from(["SD", "DS"]),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_every_rank_gets_its_heads_and_channels_from_those_that_have_them(model, worlds, order, pads):
    sources = [Rank(model, rank, worlds[0], order, 6, 4 * pads[0]) for rank in range(worlds[0])]
    for source in sources:
        source.fill(3)
    held = [GroupBlocks(0, 0, (3,)), GroupBlocks(1, 0, (3,))]
    wanted = [GroupBlocks(0, 0, (5,)), GroupBlocks(1, 0, (5,))]
    for rank in range(worlds[1]):
        target, expected = (Rank(model, rank, worlds[1], order, 9, 4 * pads[1]) for _ in range(2))
        assert table_refusal(target.table) is None
        assert not target.cache.rank_bound
        expected.fill(5)
        for partner in partner_ranks(
            rank, Topology(worlds[1]), Topology(worlds[0]), target.cache.finest(target.counts)
        ):
            carry_over(sources[partner].table, target.table, held, wanted, BLOCK, slot_bytes=4096)
        assert torch.equal(target.storage, expected.storage), "a byte is wrong, or one outside was touched"
        assert torch.equal(target.attention, expected.attention)


def text_of(rank: Rank) -> str:
    return str(_states(rank.config, rank.cache.sections))


@given(models(), st.sampled_from(WORLDS), st.sampled_from(["SD", "DS"]))
def test_the_number_of_ranks_is_no_part_of_what_a_state_means(model, world, order):
    one, many = Rank(model, 0, 1, order, 4, 0), Rank(model, world - 1, world, order, 4, 0)
    text = text_of(one)
    assert text_of(many) == text
    other = Rank(model, 0, 1, "DS" if order == "SD" else "SD", 4, 0)
    assert text_of(other) != text


def mamba2(groups: int, **changes) -> Model:
    conv = {
        name: numbered(np.int16, units, 2, 3, first=1)
        for name, units in (("x", 4), ("B", groups), ("C", groups))
    }
    whole = ("B", "C") if groups == 1 else ()
    return Model(Kind.MAMBA2, conv, numbered(np.float32, 4, 2, 2, first=1), whole, groups, **changes)


def test_what_is_not_told_travels_whole_and_only_between_equal_ranks():
    """One group that every rank keeps and one of several look alike in a page: the layer must tell."""
    silent = mamba2(groups=4)
    silent.groups = 0
    rank = Rank(silent, 1, 4, "SD", 4, 0)
    assert rank.cache.rank_bound == (STATE,)
    assert rank.cache.finest(rank.counts) == 4
    whole = Rank(silent, 0, 1, "SD", 4, 0)
    with pytest.raises(LayoutError, match="the prefill node has none of it"):
        align_wire(whole.table, rank.table)
    assert text_of(whole) != text_of(rank)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_page_of_one_group_a_rank_is_divided_as_the_layer_tells(groups):
    rank = Rank(mamba2(groups), 2, 4, "SD", 4, 0)
    owned = {
        part.name: (part.owned.start, part.owned.stop, part.total) for part in rank.cache.sections[STATE]
    }
    assert owned["conv.B"] == owned["conv.C"] == ((0, 1, 1) if groups == 1 else (2, 3, 4))
    assert owned["conv.x"] == owned["temporal"] == (2, 3, 4)


def test_a_state_that_every_rank_keeps_is_not_divided():
    rank = Rank(mamba2(4), 0, 2, "SD", 4, 0)
    rank.spec.tp_replicated = True
    tensors = {STATE: rank.storage.view(4, 1, 1, -1)}
    cache = worker_cache(rank.config, tensors, tensor_rank=0, num_ranks=2, head_counts=rank.counts)
    assert (cache.sections, cache.rank_bound, set(cache.tensors)) == ({STATE: ()}, (), {STATE})

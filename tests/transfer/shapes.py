"""Models of several kinds of layers, kept in any shape, and what a request's KV is in the plainest words.

A ``Truth`` is what a request has, by layer, token and head. ``ShapedCache`` puts it into blocks and reads
it back by indexing arrays: it shares no code with plans, wires and packers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import EncoderOnlySpec, KVCacheConfig, KVCacheGroup
from kvconnect.plan.blocks import GroupBlocks
from tests.caches import attention_layer, fill_random, spec_of

DTYPE = torch.float16
LAYOUTS = {
    "NHD": "block token head",
    "HND": "block head token",
    "heads outside": "head block token",
    "planes outside": "plane block token head",
    "planes in the block": "block plane head token",
}
KINDS = ("full", "window", "latent", "state")


@dataclass(frozen=True)
class Model:
    """So many layers of each kind. ``width`` are the values of a head's K, of a latent row, of a state."""

    layers: dict[str, int]
    heads: int = 2
    width: int = 4
    window: int = 40

    def names(self, kind: str) -> list[str]:
        """Kinds of layers take turns, and layers are numbered over all of them."""
        return [name for name in self.all_names if kind_of(name) == kind]

    @functools.cached_property
    def all_names(self) -> list[str]:
        turns = range(max(self.layers.values(), default=0))
        kinds = [kind for turn in turns for kind in KINDS if turn < self.layers.get(kind, 0)]
        return [f"{kind}.{number}" for number, kind in enumerate(kinds)]

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if self.layers.get(kind)]

    @property
    def num_heads(self) -> int | None:
        """What peers must agree on: None where all ranks keep the same bytes."""
        return self.heads if {"full", "window"} & set(self.kinds) else None


def kind_of(name: str) -> str:
    """The kind of a layer."""
    return name.split(".")[0]


@dataclass(frozen=True)
class Shape:
    """How one side keeps a model: by kind, the tokens of a block and of a kernel block; one group a kind."""

    block: dict[str, int]
    kernel: dict[str, int]
    layout: str = "NHD"
    reverse_groups: bool = False

    def groups(self, model: Model) -> list[str]:
        return model.kinds[::-1] if self.reverse_groups else model.kinds


def same_blocks(tokens: int, kernel: int | None = None, **others) -> Shape:
    """A shape with one block size for all kinds of layers."""
    return Shape(dict.fromkeys(KINDS, tokens), dict.fromkeys(KINDS, kernel or tokens), **others)


class Truth:
    """The KV of one request: bytes by layer, as (token, head, plane, byte); a state as (byte)."""

    def __init__(self, model: Model, num_tokens: int, seed: int) -> None:
        self.num_tokens = num_tokens
        random = np.random.default_rng(seed)
        row = model.width * DTYPE.itemsize
        sizes = {
            "full": (num_tokens, model.heads, 2, row),
            "window": (num_tokens, model.heads, 2, row),
            "latent": (num_tokens, 1, 1, row),
            "state": (row,),
        }
        self.rows = {
            name: random.integers(1, 256, sizes[kind], dtype=np.uint8)
            for kind in model.kinds
            for name in model.names(kind)
        }


class ShapedCache:
    """One rank's cache, every byte of it random. ``heads`` are those that it keeps, of ``names`` or all.

    ``turns``: of so many ranks it is this one, and each keeps so many tokens in turn, of a block of all.
    """

    def __init__(
        self,
        model: Model,
        shape: Shape,
        num_blocks: int,
        heads: HeadInterval,
        seed: int,
        names: Sequence[str] | None = None,
        turns: tuple[int, int, int] = (1, 0, 1),
    ) -> None:
        self.turns = turns
        self.model, self.shape, self.heads = model, shape, heads
        self._names = model.all_names if names is None else names
        self.tensors, groups = {}, []
        for kind in shape.groups(model):
            block, kernel = shape.block[kind], shape.kernel[kind]
            for name in self.names(kind):
                seed += 1
                fixed = {"latent": "block token", "state": "block"}
                layout = fixed.get(kind) or LAYOUTS[shape.layout]
                apart = kind not in fixed and "plane" not in layout
                content = model.width * (2 if apart else 1)
                count = num_blocks * (1 if kind == "state" else block // kernel)
                cache = attention_layer(layout, count, len(heads), kernel, content, DTYPE)
                fill_random(cache, seed)
                self.tensors[name] = cache
            names, spec = tuple(self.names(kind)), EncoderOnlySpec(block)
            if names:
                spec = spec_of(kind, block, len(heads), model.width, DTYPE, model.window)
            groups.append(KVCacheGroup(names or (kind,), spec))
        sizes = {
            index: shape.block[kind] if kind == "state" else shape.kernel[kind]
            for index, kind in enumerate(shape.groups(model))
            if self.names(kind)
        }
        divided = {name: heads for kind in ("full", "window") for name in self.names(kind)}
        self.config = KVCacheConfig(num_blocks, tuple(groups))
        self.table = RegionTable.build(self.config, sizes, self.tensors, divided)

    def names(self, kind: str) -> list[str]:
        """The layers of a kind that this rank has."""
        return [name for name in self._names if kind_of(name) == kind]

    def group_of(self, kind: str) -> int:
        return self.shape.groups(self.model).index(kind)

    def bytes_of(self, name: str) -> np.ndarray:
        """A layer's values as bytes, its axes as they are named; a view."""
        return self.tensors[name].tensor.view(torch.uint8).numpy()

    def _rows(self, name: str) -> np.ndarray:
        """A layer as (kernel block, token, head, plane, byte); a view."""
        axes, view = self.tensors[name].axes.split(), self.bytes_of(name)
        if kind_of(name) == "latent":
            return view[:, :, None, None]
        order = [axis for axis in ("block", "token", "head", "plane", "content") if axis in axes]
        view = view.transpose([axes.index(axis) for axis in order])
        return view if "plane" in axes else view.reshape(*view.shape[:3], 2, -1)

    def _places(self, kind: str, blocks: GroupBlocks, tokens: range) -> tuple[np.ndarray, ...]:
        """Those of some tokens that this rank has blocks for, the kernel block of each, and its row there."""
        block_tokens, kernel = self.shape.block[kind], self.shape.kernel[kind]
        context, turn, interleave = self.turns
        own = np.arange(tokens.stop)
        own = own[own // interleave % context == turn]
        # Of the tokens of all ranks it has its own one after the other.
        index, row = np.divmod(np.arange(len(own)), block_tokens)
        ids = np.zeros(blocks.first_block + len(blocks.block_ids) + len(own), dtype=int)
        ids[blocks.first_block :][: len(blocks.block_ids)] = blocks.block_ids
        held = (ids[index] != 0) & (own >= tokens.start)
        own, block, row = own[held], ids[index[held]], row[held]
        return own, block * (block_tokens // kernel) + row // kernel, row % kernel

    def _known(self, truth: Truth, name: str) -> np.ndarray:
        """What this rank has of a request's tokens in a layer, as (token, head, plane, byte)."""
        rows = truth.rows[name]
        return rows if kind_of(name) == "latent" else rows[:, self.heads.start : self.heads.stop]

    def write(
        self,
        truth: Truth,
        blocks: dict[str, GroupBlocks],
        tokens: range | None = None,
        has_states: bool = True,
    ) -> None:
        """Put a request's KV, or that of some tokens, where its blocks are."""
        wanted = range(truth.num_tokens) if tokens is None else tokens
        for name in self.tensors:
            kind = kind_of(name)
            if kind != "state":
                own, block, row = self._places(kind, blocks[kind], wanted)
                self._rows(name)[block, row] = self._known(truth, name)[own]
            elif has_states:
                self.bytes_of(name)[blocks[kind].block_ids[0]] = truth.rows[name]

    def differences(self, truth: Truth, blocks: dict[str, GroupBlocks]) -> list[str]:
        """What of a request is not in these blocks as it should be; before a window nothing need be."""
        found = []
        for name in self.tensors:
            kind = kind_of(name)
            if kind == "state":
                state = self.bytes_of(name)[blocks[kind].block_ids[0]]
                found += [] if np.array_equal(state, truth.rows[name]) else [f"{name}: the state"]
                continue
            seen_from = max(0, truth.num_tokens - self.model.window) if kind == "window" else 0
            own, block, row = self._places(kind, blocks[kind], range(seen_from, truth.num_tokens))
            differs = self._rows(name)[block, row] != self._known(truth, name)[own]
            found += [f"{name}: token {token}" for token in own[differs.any(axis=(1, 2, 3))]]
        return found

    def outside(self, blocks: dict[str, GroupBlocks]) -> dict[str, np.ndarray]:
        """Every byte of all other blocks; a copy."""
        kept = {}
        for kind in self.model.kinds:
            ratio = 1 if kind == "state" else self.shape.block[kind] // self.shape.kernel[kind]
            used = {
                block * ratio + part for block in blocks[kind].block_ids if block for part in range(ratio)
            }
            for name in self.names(kind):
                axis = self.tensors[name].axes.split().index("block")
                kept[name] = np.delete(self.bytes_of(name), sorted(used), axis=axis)
        return kept

"""The models of a simulation, what the KV of every token is, and the memory of one rank.

Models are tiny, and of every kind that moves differently. The KV of a token depends on all tokens up to it,
on its layer and on its head: it is a stretch of one fixed table of noise, whose place the prompt, the token
and the layer decide, so that two that differ in anything hold other bytes. Pages are written and read by
indexing arrays: nothing is shared with plans, wires and packers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import shard_heads
from kvconnect.cache.specs import KVCacheConfig, KVCacheGroup
from tests.caches import spec_of

if TYPE_CHECKING:
    from tests.simulator.scenario import NodePlan

DTYPE = torch.float16
HEADS = 2
HEAD_SIZE = 2
LATENT_SIZE = 4
STATE_SIZE = 12
WINDOW_TOKENS = 12
_SIZES = {"latent": LATENT_SIZE, "state": STATE_SIZE}

HEAD_BYTES = 2 * HEAD_SIZE * DTYPE.itemsize
"""K and V of one token and head."""


@dataclass(frozen=True)
class Layer:
    """One layer: its kind, its number among all, and the bytes of a row (a token, or the state)."""

    name: str
    kind: str
    number: int

    @property
    def row_bytes(self) -> int:
        """Of the whole model, all heads included."""
        size = _SIZES.get(self.kind)
        return HEADS * HEAD_BYTES if size is None else size * DTYPE.itemsize


@dataclass(frozen=True)
class Model:
    """Kinds of layers, each in a cache group of its own, with so many layers."""

    name: str
    kinds: tuple[tuple[str, int], ...]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        names = [(f"{kind}{index}", kind) for kind, count in self.kinds for index in range(count)]
        return tuple(Layer(name, kind, number) for number, (name, kind) in enumerate(names))

    @property
    def num_heads(self) -> int | None:
        """What peers must agree on: None where all ranks keep the same bytes."""
        return HEADS if self.has("full") or self.has("window") else None

    def has(self, kind: str) -> bool:
        return any(kind == known for known, _ in self.kinds)


MODELS = (
    Model("gqa", (("full", 2),)),
    Model("sliding", (("full", 1), ("window", 1))),
    Model("state", (("full", 1), ("state", 1))),
    Model("mla", (("latent", 2),)),
)


@dataclass(frozen=True)
class Shape:
    """How one side keeps a model. ``head_first``: a page has its heads outermost."""

    block_tokens: int
    kernel_tokens: int
    head_first: bool = False

    def config(self, model: Model, num_blocks: int, heads: int) -> KVCacheConfig:
        """The cache of a rank that keeps so many heads."""
        groups = []
        for kind, _ in model.kinds:
            names = tuple(layer.name for layer in model.layers if layer.kind == kind)
            width = _SIZES.get(kind, HEAD_SIZE)
            spec = spec_of(kind, self.block_tokens, heads, width, DTYPE, WINDOW_TOKENS)
            groups.append(KVCacheGroup(names, spec))
        return KVCacheConfig(num_blocks, tuple(groups))

    def kernel_sizes(self, model: Model) -> dict[int, int]:
        """Tokens of a kernel block by group; a state is never split."""
        return {
            index: self.block_tokens if kind == "state" else self.kernel_tokens
            for index, (kind, _) in enumerate(model.kinds)
        }


Bytes = NDArray[np.uint8]

_NOISE: Bytes = np.random.default_rng(20_24).integers(1, 256, 1 << 20, dtype=np.uint8)


@dataclass(frozen=True)
class Prompt:
    """A text: its first ``prefix_tokens`` are those of every other one with this ``prefix``.

    ``text`` tells it apart from all others after that. What is generated goes on from there. Names are not
    those of the same text with another ``salt``; its KV is.
    """

    text: int
    num_tokens: int
    prefix: int = 0
    prefix_tokens: int = 0
    salt: str = ""

    def name_of_block(self, stop_token: int) -> tuple[int | str, ...]:
        """What all tokens up to ``stop_token`` are, as a key of a prefix cache."""
        salt = (self.salt,) if self.salt else ()
        if stop_token <= self.prefix_tokens:
            return (*salt, self.prefix)
        return (*salt, self.prefix, self.prefix_tokens, self.text)

    def moved(self, by: int) -> Prompt:
        """A prompt that has nothing in common with this one, and as much as it with others so moved."""
        return replace(self, text=self.text + by, prefix=self.prefix + by) if by else self


@functools.lru_cache(4096)
def names_of(prompt: Prompt, num_tokens: int, tokens: int) -> tuple[bytes, ...]:
    """What a node calls a prompt's first tokens, one name for every so many."""
    stops = range(tokens, num_tokens + 1, tokens)
    return tuple(f"{prompt.name_of_block(stop)}@{stop}".encode() for stop in stops)


def rows_of(prompt: Prompt, layer: int, start: int, stop: int, row_bytes: int) -> Bytes:
    """The KV of tokens ``start`` to ``stop - 1`` in a layer, as (token, byte)."""
    shared = min(max(start, prompt.prefix_tokens), stop)
    parts = [
        _stretch(name, layer, first, last, row_bytes)
        for name, first, last in ((prompt.prefix, start, shared), (prompt.text, shared, stop))
        if first < last
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def state_of(prompt: Prompt, layer: int, num_tokens: int, state_bytes: int) -> Bytes:
    """The recurrent state of a layer after so many tokens, as (byte,)."""
    text = prompt.prefix if num_tokens <= prompt.prefix_tokens else prompt.text
    state: Bytes = _stretch(text * 64 + num_tokens, layer + 31, 0, 1, state_bytes)[0]
    return state


def noise(place: int, length: int) -> Bytes:
    """Bytes that are nobody's KV, different for every place."""
    start = place * 7919 % (len(_NOISE) - length)
    return _NOISE[start : start + length]


def _stretch(name: int, layer: int, first: int, last: int, row_bytes: int) -> Bytes:
    start = (name * 1_000_003 + layer * 15_485_863) % (len(_NOISE) // 2) + first * row_bytes
    stretch: Bytes = _NOISE[start : start + (last - first) * row_bytes].reshape(last - first, row_bytes)
    return stretch


_ALIGN_BYTES = 64
BlockIds = Sequence[Sequence[int]]


class RankMemory:
    def __init__(self, plan: NodePlan, rank: int) -> None:
        model, shape = plan.model, plan.shape
        num_slots, slot_bytes, scratch_bytes = plan.extra.num_slots, plan.slot_bytes, plan.scratch_bytes
        self.model, self.shape, self.num_blocks = model, shape, plan.num_blocks
        self.slot_bytes, self.scratch_bytes = slot_bytes, scratch_bytes
        self.heads = shard_heads(HEADS, rank, plan.world_size)
        self.config = shape.config(model, plan.num_blocks, len(self.heads))
        self._ratio = shape.block_tokens // shape.kernel_tokens
        sizes = [self._layer_bytes(layer) for layer in model.layers]
        slots = slot_bytes * num_slots
        total = sum(sizes) + 2 * slots + scratch_bytes
        self._buffer = torch.empty(total + _ALIGN_BYTES, dtype=torch.uint8)
        skip = -self._buffer.data_ptr() % _ALIGN_BYTES
        self._memory = self._buffer[skip : skip + total]
        self.address = self._memory.data_ptr()
        self.length_bytes = total
        self._views: dict[str, Bytes] = {}
        # What other weights make of a prompt is nothing that these would make of any.
        self._weights = 500_000 * plan.keeps.weights if plan.keeps is not None else 0
        self._groups = {kind: index for index, (kind, _) in enumerate(model.kinds)}
        tensors, place = {}, 0
        for layer, size in zip(model.layers, sizes, strict=True):
            tensors[layer.name] = self._tensor(layer, self._memory[place : place + size])
            place += size
        self.page_bytes = place
        divided = {layer.name: self.heads for layer in model.layers if layer.kind in ("full", "window")}
        self.table = RegionTable.build(self.config, shape.kernel_sizes(model), tensors, divided)
        self.landing = tuple(self.address + place + slot_bytes * index for index in range(num_slots))
        self.send = tuple(self.address + place + slots + slot_bytes * index for index in range(num_slots))
        self.scratch_address = self.address + place + 2 * slots if scratch_bytes else 0
        self._bytes: Bytes = self._memory.numpy()
        self._bytes[:] = noise(rank + 7, 4096).repeat(-(-total // 4096))[:total]

    def _block_bytes(self, layer: Layer) -> int:
        row_bytes = layer.row_bytes if layer.kind in ("latent", "state") else len(self.heads) * HEAD_BYTES
        return row_bytes * (1 if layer.kind == "state" else self.shape.block_tokens)

    def _layer_bytes(self, layer: Layer) -> int:
        return -(-self.num_blocks * self._block_bytes(layer) // _ALIGN_BYTES) * _ALIGN_BYTES

    def _tensor(self, layer: Layer, raw: torch.Tensor) -> CacheTensor:
        count, tokens = self.num_blocks * self._ratio, self.shape.kernel_tokens
        heads, width, is_swapped = len(self.heads), 2 * HEAD_SIZE, False
        order: tuple[int, ...]
        match layer.kind:
            case "state":
                order, axes = (self.num_blocks, STATE_SIZE), "block content"
            case "latent":
                order, axes = (count, tokens, LATENT_SIZE), "block token content"
            case _ if self.shape.head_first:
                order, axes, is_swapped = (count, heads, tokens, width), "block head token content", True
            case _:
                order, axes = (count, tokens, heads, width), "block token head content"
        tensor = raw.view(DTYPE)[: math.prod(order)].view(order)
        view = tensor.view(torch.uint8).numpy()
        self._views[layer.name] = view.transpose(0, 2, 1, 3) if is_swapped else view
        return CacheTensor(tensor, axes)

    def _rows(self, layer: Layer, prompt: Prompt, start: int, stop: int) -> Bytes:
        """What this rank keeps of some tokens, in the shape of its rows."""
        rows = rows_of(prompt, layer.number, start, stop, layer.row_bytes)
        if layer.kind == "latent":
            return rows
        return rows.reshape(stop - start, HEADS, HEAD_BYTES)[:, self.heads.start : self.heads.stop]

    def _places(
        self, ids: Sequence[int], start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The kernel block of each token, and its row there. Block 0 where there is none."""
        tokens, kernel = self.shape.block_tokens, self.shape.kernel_tokens
        positions = np.arange(start, stop)
        blocks = np.asarray(ids, dtype=np.int64)[positions // tokens]
        return blocks * self._ratio + positions % tokens // kernel, positions % kernel

    def compute(self, prompt: Prompt, ids: BlockIds, start: int, stop: int) -> None:
        """Write the KV of some tokens where a request's blocks are; the null block takes what has none."""
        prompt = prompt.moved(self._weights)
        places: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for layer in self.model.layers:
            mine = ids[self._groups[layer.kind]]
            view = self._views[layer.name]
            if layer.kind == "state":
                view[mine[-1]] = state_of(prompt, layer.number, stop, layer.row_bytes)
                continue
            if layer.kind not in places:
                places[layer.kind] = self._places(mine, start, stop)
            block, row = places[layer.kind]
            view[block, row] = self._rows(layer, prompt, start, stop)

    def difference(self, prompt: Prompt, ids: BlockIds, num_tokens: int, *, later: bool = False) -> str:
        """What of a request's first tokens is not in its blocks as it should be, or nothing.

        Before a window nothing need be. ``later``: the request has gone on, so that states are others and
        more has left the window.
        """
        prompt = prompt.moved(self._weights)
        for layer in self.model.layers:
            mine = ids[self._groups[layer.kind]]
            view = self._views[layer.name]
            if layer.kind == "state":
                state = state_of(prompt, layer.number, num_tokens, layer.row_bytes)
                if not later and not np.array_equal(view[mine[-1]], state):
                    return f"{layer.name}: in block {mine[-1]} is not the state after {num_tokens} tokens"
                continue
            start = max(0, num_tokens - WINDOW_TOKENS + 1) if layer.kind == "window" else 0
            block, row = self._places(mine, start, num_tokens)
            wrong = view[block, row] != self._rows(layer, prompt, start, num_tokens)
            if later:
                wrong[block < self._ratio] = False
            if wrong.any():
                token = start + int(np.argmax(wrong.reshape(num_tokens - start, -1).any(axis=1)))
                return f"{layer.name}: token {token} in block {mine[token // self.shape.block_tokens]}"
        return ""

    def spoil(self, ids: Sequence[int], place: int) -> None:
        """Blocks are somebody else's now: give them content that is nobody's."""
        blocks = np.asarray(ids, dtype=np.int64)
        kernel_blocks = blocks
        if self._ratio > 1:
            kernel_blocks = (blocks[:, None] * self._ratio + np.arange(self._ratio)).ravel()
        for layer in self.model.layers:
            view = self._views[layer.name]
            index = blocks if layer.kind == "state" else kernel_blocks
            page = view.shape[1:]
            view[index] = noise(place + layer.number, math.prod(page)).reshape(page)

    def read(self, address: int, length: int) -> Bytes:
        """A copy of some bytes."""
        place = address - self.address
        return self._bytes[place : place + length].copy()

    def write(self, address: int, content: Bytes) -> None:
        """Put some bytes where nobody asked for them."""
        place = address - self.address
        self._bytes[place : place + len(content)] = content

    def blocks_at(self, address: int, length_bytes: int) -> set[int]:
        """The logical blocks that a stretch of this memory touches."""
        found: set[int] = set()
        low, place = address - self.address, 0
        for layer in self.model.layers:
            size = self._layer_bytes(layer)
            if low < place + size and low + length_bytes > place:
                page = self._block_bytes(layer)
                found.update(range((low - place) // page, (low + length_bytes - 1 - place) // page + 1))
            place += size
        return found

"""Recurrent states of vLLM's layers as sections: the parts of a page that are divided over ranks separately.

A page holds a layer's states one after the other. A temporal state is divided by heads or channels. A
convolution's state holds the channels of several projections side by side, each divided separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvconnect.cache.region_table import CacheTensor
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import StateSpec

# Further states (rings of drafted tokens) are not supported as sections.
_NUM_STATES = {"MAMBA1": 2, "MAMBA2": 2, "GDN_ATTN": 2, "SHORT_CONV": 1, "LINEAR": 1}
# Most units of channels without heads: a number that the usual rank counts up to 64 divide.
_MOST_UNITS = 960


@dataclass(frozen=True)
class Section:
    """A part of a state's page: in each of ``planes``, the units ``owned`` of the model's ``total``.

    A unit is a head, a group or some channels, and has ``row_bytes`` in each plane. The first plane begins
    ``offset`` bytes into the page, and the others follow ``plane_stride`` bytes apart.
    """

    name: str
    owned: HeadInterval
    total: int
    row_bytes: int
    planes: int
    offset: int
    plane_stride: int

    @property
    def text(self) -> str:
        """The section over the whole model, as text that is equal on every rank."""
        return f"{self.name} {self.total}x{self.planes}x{self.row_bytes}"

    def spec(self, block_size: int) -> StateSpec:
        """The section as a layer of its own."""
        return StateSpec(block_size, ((self.planes, len(self.owned), self.row_bytes),), (torch.int8,))

    def view(self, pages: torch.Tensor) -> CacheTensor:
        """The section in a layer's cache, each block of which is one page."""
        pages = pages.view(torch.int8)
        shape = pages.shape[0], self.planes, len(self.owned), self.row_bytes
        strides = pages.stride(0), self.plane_stride, self.row_bytes, 1
        return CacheTensor(
            pages.as_strided(shape, strides, pages.storage_offset() + self.offset), "block plane head content"
        )


def conv_layout() -> str:
    """The axis order of a convolution's state, "SD" or "DS", from the environment or the platform."""
    from vllm import envs

    return getattr(envs, "VLLM_SSM_CONV_STATE_LAYOUT", None) or "SD"


def state_sections(spec: Any, layer: Any, rank: int, world_size: int) -> tuple[Section, ...]:
    """The sections of a layer's page; empty where spec and layer do not define how it is divided."""
    kind = getattr(getattr(spec, "mamba_type", None), "name", "")
    shapes = tuple(getattr(spec, "shapes", ()))
    if _NUM_STATES.get(kind) != len(shapes) or getattr(spec, "tp_replicated", False):
        return ()
    conv = (0, 0) if kind == "LINEAR" else shapes[0]
    temporal = () if kind == "SHORT_CONV" else shapes[-1]
    by_channel = len(shapes) > 0 and kind != "LINEAR" and conv_layout() == "DS"
    width, taps = conv if by_channel else conv[::-1]
    parts = _projections(kind, width, temporal, layer, world_size)
    if sum(units * channels for _, units, _, channels in parts) != width:
        return ()
    item = spec.dtypes[0].itemsize
    planes, channel_bytes = (1, item * taps) if by_channel else (taps, item)
    made, offset = [], 0
    for name, units, total, channels in parts:
        owned = _owned(units, total, rank)
        row_bytes = channels * channel_bytes
        made.append(Section(f"conv.{name}", owned, total, row_bytes, planes, offset, width * item))
        offset += units * row_bytes
    if temporal:
        units = parts[0][1] if kind == "MAMBA1" else temporal[0]
        row_bytes = math.prod(temporal) * spec.dtypes[-1].itemsize // units
        owned = _owned(units, units * world_size, rank)
        made.append(Section("temporal", owned, units * world_size, row_bytes, 1, width * taps * item, 0))
    return tuple(made)


def _owned(units: int, total: int, rank: int) -> HeadInterval:
    return HeadInterval(0, units) if units == total else HeadInterval(rank * units, (rank + 1) * units)


def _projections(
    kind: str, width: int, temporal: tuple[int, ...], layer: Any, world_size: int
) -> list[tuple[str, int, int, int]]:
    """A convolution's ``width`` channels in order: name, units of this rank, all units, channels per unit."""
    if kind == "LINEAR":
        return []
    if kind in ("MAMBA1", "SHORT_CONV"):
        total = math.gcd(width * world_size, _MOST_UNITS)
        units = total // world_size if total % world_size == 0 else 0
        return [("x", units, total, width // max(1, units))]
    heads, value, key = temporal
    of_values = heads, heads * world_size, value
    units = (width - heads * value) // (2 * key)
    of_keys = units, units * world_size, key
    if kind == "GDN_ATTN":
        return [("q", *of_keys), ("k", *of_keys), ("v", *of_values)]
    if units == 1 < world_size:
        # Either all ranks keep the one group, or each rank has one of several: the shapes are the same.
        total = getattr(getattr(layer, "norm", None), "n_groups", 0)
        if total not in (1, world_size):
            return []
        of_keys = units, total, key
    return [("x", *of_values), ("B", *of_keys), ("C", *of_keys)]

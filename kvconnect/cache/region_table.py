"""The region table: every cache tensor of a worker, described as regions of equal pages.

The page of a block lies at ``address + block * block_stride``. A region is one contiguous stretch of such
pages: a whole cache tensor, or one plane or head of it where the layout puts these outside the block. The
sizes, bounds and overlaps of all regions are checked when the table is built. It knows nothing of requests.

Blocks here are *kernel* blocks. A logical block is ``blocks_per_kv_block`` of them, side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvconnect.cache.retention import Retention, parse
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, LayerSpec, MLASpec, StateSpec, div_exact
from kvconnect.errors import LayoutError

if TYPE_CHECKING:
    import torch

AXES = ("plane", "block", "head", "token", "content")
_SPLIT_AXES = ("plane", "head")

Scales = tuple[float, float]
"""The scales of K and of V. A value in a quantised cache stands for ``value * scale``."""
UNSCALED: Scales = (1.0, 1.0)


@dataclass(frozen=True)
class CacheTensor:
    """The cache tensor of one layer, with names for its dimensions.

    ``axes`` names every dimension of ``tensor`` in order: ``plane`` (K and V apart), ``block`` (kernel
    blocks), ``head``, ``token``, and ``content`` (the values of one head and token, K and V together
    where they are concatenated; or a whole opaque page).
    """

    tensor: torch.Tensor
    axes: str = "block content"


SCALE_RANGE = "finite numbers above 0 that a float32 keeps"


def are_scales(scales: Scales) -> bool:
    """Whether both scales are within ``SCALE_RANGE``."""
    return all(math.isfinite(scale) and 2.0**-126 <= scale < 2.0**127 for scale in scales)


class PageAxes(msgspec.Struct, frozen=True, array_like=True):
    """The structure of a page: counts of its axes, and their strides in bytes.

    The page is dense: its rows of ``row_bytes`` fill it without gaps. An opaque page is one row.
    """

    planes: int
    heads: int
    tokens: int
    row_bytes: int
    plane_stride: int
    head_stride: int
    token_stride: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.planes * self.heads * self.tokens * self.row_bytes


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One contiguous stretch of equal pages. Sizes and strides are in bytes; blocks are kernel blocks.

    ``heads`` is the interval of the model's heads that a page holds (of units, in a section of a state), or
    None where a page cannot be divided (latent rows, whole states). ``first_plane`` is the number of the
    page's first plane; only a region split by plane has one above 0. ``scales`` are the scales of the layer's
    quantised values. The first ``key_bytes`` of each row belong to K where K and V share rows; None where
    a row holds only one of them.
    """

    layer: str
    group: int
    first_plane: int
    heads: HeadInterval | None
    dtype: str
    address: int
    num_blocks: int
    block_stride: int
    page_bytes: int
    axes: PageAxes
    scales: Scales = UNSCALED
    key_bytes: int | None = None

    @property
    def length_bytes(self) -> int:
        """Bytes from the first byte of the first page to the last byte of the last one."""
        return (self.num_blocks - 1) * self.block_stride + self.page_bytes

    @property
    def end(self) -> int:
        """The address of the first byte after the last page."""
        return self.address + self.length_bytes

    def logical_pages(self, blocks_per_kv_block: int) -> tuple[int, int, int]:
        """Address, stride and size of the logical pages: kernel pages side by side."""
        stride = self.block_stride * blocks_per_kv_block
        return self.address, stride, stride - self.block_stride + self.page_bytes


class GroupGeometry(msgspec.Struct, frozen=True, array_like=True):
    """The block sizes of a cache group, by which two sides match its blocks by token.

    ``block_tokens`` are the tokens of a kernel block, ``blocks_per_kv_block`` the kernel blocks of a
    logical block. ``retention`` is ``Retention.text`` of the group's layers.
    """

    group: int
    block_tokens: int
    blocks_per_kv_block: int
    retention: str

    @property
    def rule(self) -> Retention:
        """Which tokens the group's layers see."""
        return parse(self.retention)

    @property
    def is_state(self) -> bool:
        """True if the group has one block per request, however long the request is."""
        return not self.rule.by_position


class RegionTable(msgspec.Struct, frozen=True, array_like=True):
    """All regions of one worker, as peers get them. ``build`` checks their bounds and overlaps."""

    regions: tuple[Region, ...]
    groups: tuple[GroupGeometry, ...]

    @classmethod
    def build(
        cls,
        config: KVCacheConfig,
        kernel_block_sizes: Mapping[int, int],
        tensors: Mapping[str, CacheTensor],
        heads: Mapping[str, HeadInterval] | None = None,
        scales: Mapping[str, Scales] | None = None,
    ) -> RegionTable:
        """Describe the cache of this worker.

        ``kernel_block_sizes`` are tokens by group index. ``tensors`` may lack layers of other ranks.
        ``heads`` are the model's heads that a layer's tensor holds; by default its head axis counts from
        head 0. ``scales`` are the scales of K and V by layer, 1 by default; they are ignored for layers
        whose values are wider than a byte. Raises ``LayoutError``: a tensor does not match its spec, or
        its layout cannot be expressed as regions.
        """
        regions: list[Region] = []
        for layer in scales or {}:
            config.group_of(layer)
        for layer, cache in tensors.items():
            group = config.group_of(layer)
            spec, num_blocks = config.groups[group].spec_of(layer), config.groups[group].num_blocks
            ratio = div_exact(spec.block_size, kernel_block_sizes[group])
            view = _TensorView(layer, cache)
            made = view.regions(
                group,
                (num_blocks or config.num_blocks) * ratio,
                spec,
                (heads or {}).get(layer),
                view.scales(spec, (scales or {}).get(layer, UNSCALED)),
            )
            _check_page(layer, spec, ratio, made)
            view.check_inside_storage(made)
            regions.extend(made)
        if not regions:
            raise LayoutError("no cache tensor was given")
        geometries = tuple(
            GroupGeometry(
                group=index,
                block_tokens=kernel_block_sizes[index],
                blocks_per_kv_block=div_exact(group.block_size, kernel_block_sizes[index]),
                retention=group.retention.text,
            )
            for index, group in enumerate(config.groups)
            if index in kernel_block_sizes
        )
        table = cls(tuple(regions), geometries)
        _check_apart(table)
        return table

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order of ``tensors``."""
        return tuple(dict.fromkeys(region.layer for region in self.regions))

    def geometry(self) -> dict[int, GroupGeometry]:
        """The block geometry by group index."""
        return {geometry.group: geometry for geometry in self.groups}


class _TensorView:
    """One cache tensor with named dimensions, and its division into regions."""

    def __init__(self, layer: str, cache: CacheTensor) -> None:
        tensor, names = cache.tensor, cache.axes.split()
        if len(names) != tensor.dim() or len(set(names)) != len(names) or set(names) - set(AXES):
            raise LayoutError(
                f"layer {layer!r}: axes {cache.axes!r} do not name the {tensor.dim()} dimensions of shape "
                f"{tuple(tensor.shape)}; accepted names, each once: {', '.join(AXES)}"
            )
        if "block" not in names or "content" not in names:
            raise LayoutError(f"layer {layer!r}: axes {cache.axes!r} must name a block and a content axis")
        item = tensor.element_size()
        self.layer = layer
        self.tensor = tensor
        self.size = {name: tensor.shape[dim] for dim, name in enumerate(names)}
        self.stride = {name: tensor.stride(dim) * item for dim, name in enumerate(names)}
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        if self.size["content"] > 1 and self.stride["content"] != item:
            raise LayoutError(
                f"layer {layer!r}: the content axis has a stride of {self.stride['content']} bytes, "
                f"it must be {item}"
            )
        self.row_bytes = self.size["content"] * item

    def scales(self, spec: LayerSpec, given: Scales) -> Scales:
        """The scales of this tensor's values. Raises ``LayoutError``: they are out of range or ambiguous."""
        if not are_scales(given):
            raise LayoutError(f"layer {self.layer!r}: scales of K and V are {given}; accepted: {SCALE_RANGE}")
        if self.tensor.element_size() > 1:
            return UNSCALED
        apart = self.size.get("plane") == 2 or self.key_bytes(spec) is not None
        if given[0] != given[1] and not apart:
            raise LayoutError(
                f"layer {self.layer!r}: scales of K and V are {given}, but its rows do not say where K ends; "
                "accepted: two equal ones"
            )
        return given

    def key_bytes(self, spec: LayerSpec) -> int | None:
        """Bytes of K in a row, if a row holds K and then V of one head and token; else None."""
        if not isinstance(spec, AttentionSpec) or spec.head_size_v == 0:
            return None
        key, item = spec.head_size, spec.dtype.itemsize
        value = key if spec.head_size_v is None else spec.head_size_v
        return key * item if (key + value) * item == self.row_bytes else None

    def regions(
        self, group: int, num_blocks: int, spec: LayerSpec, heads: HeadInterval | None, scales: Scales
    ) -> list[Region]:
        """One region, or one per plane or head that lies outside the page."""
        if self.size["block"] != num_blocks:
            raise LayoutError(
                f"layer {self.layer!r}: the block axis has {self.size['block']} blocks, the cache "
                f"configuration gives {num_blocks} kernel blocks"
            )
        inner, outer = self._dense_suffix()
        divisible = "head" in self.size and not isinstance(spec, MLASpec)
        # A state can be divided only where its units are declared in ``heads``.
        divisible = divisible and (heads is not None or not isinstance(spec, StateSpec))
        interval = heads or HeadInterval(0, self.size.get("head", 0))
        if divisible and len(interval) != self.size["head"]:
            raise LayoutError(
                f"layer {self.layer!r}: the head axis has {self.size['head']} heads, "
                f"heads {interval.start}..{interval.stop - 1} were declared"
            )
        axes = self._page_axes(inner)
        made = []
        for position in itertools.product(*(range(self.size[name]) for name in outer)):
            at = dict(zip(outer, position, strict=True))
            first_head = interval.start + at.get("head", 0)
            made.append(
                Region(
                    layer=self.layer,
                    group=group,
                    first_plane=at.get("plane", 0),
                    heads=HeadInterval(first_head, first_head + axes.heads) if divisible else None,
                    dtype=self.dtype,
                    address=self.tensor.data_ptr() + sum(at[name] * self.stride[name] for name in outer),
                    num_blocks=num_blocks,
                    block_stride=self._block_stride(axes.page_bytes),
                    page_bytes=axes.page_bytes,
                    axes=axes,
                    scales=scales,
                    key_bytes=self.key_bytes(spec),
                )
            )
        return made

    def _dense_suffix(self) -> tuple[list[str], list[str]]:
        """The axes that fill a page without gaps, innermost first, and the axes outside the page."""
        names = [name for name in self.size if name not in ("block", "content") and self.size[name] > 1]
        names.sort(key=lambda name: self.stride[name])
        limit = self.stride["block"] if self.size["block"] > 1 else None
        inner: list[str] = []
        extent = self.row_bytes
        for name in names:
            grown = extent * self.size[name]
            if self.stride[name] != extent or (limit is not None and grown > limit):
                break
            inner.append(name)
            extent = grown
        outer = names[len(inner) :]
        for name in outer:
            if name not in _SPLIT_AXES:
                raise LayoutError(
                    f"layer {self.layer!r}: the {name} axis has a stride of {self.stride[name]} bytes where "
                    f"a page without gaps has {extent}; only plane and head may lie outside the page"
                )
        return inner, outer

    def _page_axes(self, inner: Sequence[str]) -> PageAxes:
        names = ("plane", "head", "token")
        planes, heads, tokens = (self.size[name] if name in inner else 1 for name in names)
        strides = (self.stride[name] if name in inner else self.row_bytes for name in names)
        return PageAxes(planes, heads, tokens, self.row_bytes, *strides)

    def _block_stride(self, page_bytes: int) -> int:
        if self.size["block"] == 1:
            return page_bytes
        if self.stride["block"] < page_bytes:
            raise LayoutError(
                f"layer {self.layer!r}: blocks are {self.stride['block']} bytes apart, but a page has "
                f"{page_bytes}"
            )
        return self.stride["block"]

    def check_inside_storage(self, made: Sequence[Region]) -> None:
        """Raises ``LayoutError``: a page is not inside the tensor's storage."""
        storage = self.tensor.untyped_storage()
        low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for region in made:
            if region.address < low or region.end > high:
                raise LayoutError(
                    f"layer {self.layer!r}: pages from {region.address:#x} to {region.end:#x} leave their "
                    f"storage, which is {low:#x} to {high:#x}"
                )


def _check_page(layer: str, spec: LayerSpec, ratio: int, made: Sequence[Region]) -> None:
    """Raises ``LayoutError``: page sizes contradict the spec, or kernel blocks have gaps between them."""
    found = sum(region.page_bytes for region in made) * ratio
    if found != spec.content_bytes:
        raise LayoutError(
            f"layer {layer!r}: {ratio} pages of its tensor hold {found} bytes, its spec says that a block of "
            f"{spec.block_size} tokens has {spec.content_bytes}"
        )
    if ratio > 1 and any(region.block_stride != region.page_bytes for region in made):
        # With gaps between kernel blocks, two sides could disagree on the content of the gaps.
        raise LayoutError(
            f"layer {layer!r}: a block of {spec.block_size} tokens cannot be split into {ratio} kernel "
            f"blocks, because its pages are {made[0].block_stride} bytes apart and hold {made[0].page_bytes}"
        )


def _check_apart(table: RegionTable) -> None:
    """Raises ``LayoutError`` that names both layers: two pages share bytes, and may not.

    Pages of two groups may, under the same logical block id, since a block id belongs to one group at a time.
    """
    ratios = {geometry.group: geometry.blocks_per_kv_block for geometry in table.groups}
    cluster: list[Region] = []
    end = 0
    for region in sorted(table.regions, key=lambda region: region.address):
        if region.address >= end:
            _check_cluster(cluster, ratios)
            cluster = []
        cluster.append(region)
        end = max(end, region.end)
    _check_cluster(cluster, ratios)


def _check_cluster(cluster: Sequence[Region], ratios: Mapping[int, int]) -> None:
    """Compare every page of regions that interleave, such as layers packed inside a block."""
    if len(cluster) < 2:
        return
    starts = np.concatenate([one.address + np.arange(one.num_blocks) * one.block_stride for one in cluster])
    counts = np.array([one.num_blocks for one in cluster])
    pages = np.array([(one.page_bytes, one.group, ratios[one.group]) for one in cluster])
    order = np.argsort(starts, kind="stable")
    starts, owner = starts[order], np.repeat(np.arange(len(cluster)), counts)[order]
    ends, number = starts + pages[owner, 0], order - (counts.cumsum() - counts)[owner]
    for step in range(1, len(starts)):
        first = np.flatnonzero(starts[step:] < ends[:-step])
        if not len(first):
            return
        second = first + step
        ours, theirs = pages[owner[first]], pages[owner[second]]
        is_other_block = number[first] // ours[:, 2] != number[second] // theirs[:, 2]
        clash = (ours[:, 1] == theirs[:, 1]) | is_other_block
        if clash.any():
            at = int(first[clash][0])
            one, other = cluster[int(owner[at])], cluster[int(owner[at + step])]
            raise LayoutError(
                f"pages of layers {one.layer!r} and {other.layer!r}, of cache groups {one.group} and "
                f"{other.group}, overlap at address {int(starts[at + step]):#x}; accepted: no overlap within "
                "a group, and none of two groups under different block ids"
            )

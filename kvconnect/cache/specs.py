"""Specs: the content of a logical block in a layer's cache, and the groups of layers that share block ids.

``KVCacheConfig.num_blocks`` is the only source of the block count. A tensor's shape may state another number:
with padded pages, with kernel blocks, or where heads come before blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvconnect.cache.retention import FULL, Retention, State
from kvconnect.errors import LayoutError, listed

if TYPE_CHECKING:
    import torch


def div_exact(dividend: int, divisor: int) -> int:
    """``dividend / divisor``. Raises ``ValueError``: there is a remainder, which is a bug of the caller."""
    quotient, remainder = divmod(dividend, divisor)
    if remainder:
        raise ValueError(f"{dividend} is not a multiple of {divisor}")
    return quotient


def div_ceil(dividend: int, divisor: int) -> int:
    """``dividend / divisor`` rounded up."""
    return -(-dividend // divisor)


def _positive(owner: str, **fields: int) -> None:
    for name, value in fields.items():
        if value < 1:
            raise LayoutError(f"{owner}.{name} is {value}, it must be at least 1")


class _PagedSpec:
    """The base of all specs of layers that keep a cache. Pages may be padded to ``page_size_padded`` bytes.
    A block has ``block_size`` tokens and may store another number of rows, ``stored_block_size``."""

    block_size: int
    page_size_padded: int | None
    stored_block_size: int | None

    def _check(self, **counts: int) -> None:
        owner = type(self).__name__
        _positive(owner, block_size=self.block_size, stored_block_size=self.rows_per_block, **counts)
        if self.page_size_bytes < self.content_bytes:
            raise LayoutError(
                f"{owner}.page_size_padded is {self.page_size_padded}, but a page holds {self.content_bytes} "
                "bytes"
            )

    @property
    def content_bytes(self) -> int:
        """Bytes of a page, without padding."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, with padding."""
        return self.content_bytes if self.page_size_padded is None else self.page_size_padded

    @property
    def rows_per_block(self) -> int:
        """Rows that a block stores, per head where rows have heads."""
        return self.block_size if self.stored_block_size is None else self.stored_block_size


@dataclass(frozen=True)
class AttentionSpec(_PagedSpec):
    """Keys and values by head, of the tokens that ``retention`` keeps.

    ``num_kv_heads`` counts the heads of this rank, ``head_size`` and ``head_size_v``, by default the same,
    values per head. A backend with its own order of values in a block may need another ``stored_block_size``.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None
    page_size_padded: int | None = None
    stored_block_size: int | None = None
    retention: Retention = FULL

    def __post_init__(self) -> None:
        self._check(num_kv_heads=self.num_kv_heads, head_size=self.head_size)

    @property
    def content_bytes(self) -> int:
        width = self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)
        return self.rows_per_block * self.num_kv_heads * width * self.dtype.itemsize


@dataclass(frozen=True)
class MLASpec(_PagedSpec):
    """One latent row per stored token, shared by all heads.

    Compressed and indexer caches keep fewer rows (``stored_block_size``) than a block has tokens.
    """

    block_size: int
    head_size: int
    dtype: torch.dtype
    stored_block_size: int | None = None
    page_size_padded: int | None = None
    retention: Retention = FULL

    def __post_init__(self) -> None:
        self._check(head_size=self.head_size)

    @property
    def content_bytes(self) -> int:
        return self.rows_per_block * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class StateSpec(_PagedSpec):
    """The state of a recurrent layer (Mamba, GDN): opaque bytes, one page and one row per request.

    ``shapes`` and ``dtypes`` describe the states, which lie one after the other in the page. ``block_size``
    is the number of tokens that the scheduler counts for the block; the page does not depend on it, and
    is never split.
    """

    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None
    stored_block_size = 1

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise LayoutError(
                f"StateSpec has {len(self.shapes)} shapes and {len(self.dtypes)} dtypes, "
                "it needs the same number of both and at least one"
            )
        self._check()

    @property
    def content_bytes(self) -> int:
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def retention(self) -> Retention:
        """Which tokens the layer sees."""
        return State()


@dataclass(frozen=True)
class EncoderOnlySpec:
    """A layer that attends within one forward pass and keeps no cache."""

    block_size: int


LayerSpec = AttentionSpec | MLASpec | StateSpec


GroupSpec = LayerSpec | EncoderOnlySpec


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one list of block ids per request.

    ``spec``: that of every layer, or of the first where layers have their ``own``, by name, which differ in
    page size. ``num_blocks``: the logical blocks of the group's own pool; None for the pool that all groups
    share.
    """

    layer_names: tuple[str, ...]
    spec: GroupSpec
    num_blocks: int | None = None
    own: Mapping[str, LayerSpec] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, specs: Mapping[str, LayerSpec], num_blocks: int | None = None) -> KVCacheGroup:
        """A group of these layers, by name, which may be alike or not."""
        return cls(tuple(specs), next(iter(specs.values())), num_blocks, specs)

    def __post_init__(self) -> None:
        rules = {f"{spec.retention.text} in blocks of {spec.block_size}" for _, spec in self.layer_specs()}
        if len(rules) > 1:
            raise LayoutError(
                f"a group's layers {listed(self.layer_names)} share blocks and see different tokens: "
                f"{', '.join(sorted(rules))}"
            )

    @functools.cached_property
    def retention(self) -> Retention:
        """Which tokens the group's layers see."""
        return next((spec.retention for _, spec in self.layer_specs()), FULL)

    @functools.cached_property
    def block_size(self) -> int:
        """Tokens per logical block."""
        return self.spec.block_size

    @functools.cached_property
    def is_state(self) -> bool:
        """True if the layers of the group keep recurrent state."""
        return not self.retention.by_position

    @functools.cached_property
    def has_cache(self) -> bool:
        """False for a group of encoder-only layers."""
        return not isinstance(self.spec, EncoderOnlySpec)

    def num_positions(self, num_tokens: int) -> int:
        """The length of the block list of a request with ``num_tokens`` tokens."""
        return div_ceil(num_tokens, self.block_size) if self.retention.by_position else 1

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that a request of ``num_tokens`` holds at once; see ``Retention.most_blocks``."""
        if not self.retention.by_position:
            return 1
        if self.retention.sees_all:
            return div_ceil(num_tokens, self.block_size)
        return self.retention.most_blocks(num_tokens, self.block_size, step_tokens)

    def spec_of(self, layer_name: str) -> LayerSpec:
        """The spec of one layer. Raises ``LayoutError``: it is not in the group, or keeps no cache."""
        if layer_name not in self.layer_names or isinstance(self.spec, EncoderOnlySpec):
            raise LayoutError(f"no cached layer {layer_name!r} in the group of {listed(self.layer_names)}")
        return self.own.get(layer_name, self.spec)

    def layer_specs(self) -> Iterator[tuple[str, LayerSpec]]:
        """Every cached layer with its own spec."""
        if self.has_cache:
            for name in self.layer_names:
                yield name, self.spec_of(name)


@dataclass(frozen=True)
class KVCacheConfig:
    """The whole cache of one worker: the number of logical blocks, and the groups of layers that use them.

    Block ids index one pool that all groups share, but those with a pool of their own. Block 0 of a pool is
    the null block, which marks positions whose tokens are not kept.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    _group_of: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _positive("KVCacheConfig", num_blocks=self.num_blocks)
        owner: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            for name in group.layer_names:
                if name in owner:
                    raise LayoutError(f"layer {name!r} is in cache groups {owner[name]} and {index}")
                owner[name] = index
        object.__setattr__(self, "_group_of", owner)

    def group_of(self, layer_name: str) -> int:
        """The index of a layer's group. Raises ``LayoutError``: no group has the layer."""
        if layer_name not in self._group_of:
            raise LayoutError(f"no cache group has layer {layer_name!r}; known: {listed(self._group_of)}")
        return self._group_of[layer_name]

"""The attention set-up of a model runner, in the only order that keeps all block sizes consistent.

First the backends of a cache group are collected, then one kernel block size is chosen that all of them
accept, then their metadata builders are made with this size. The runner makes block tables and the cache
afterwards, from the returned sizes. A serving stack that makes builders or the cache first has to guess the
kernel size, and a connector then sees another number of blocks than the kernels.

The scheduler's *logical* block may be larger than the *kernel* block. Logical block ``b`` consists of kernel
blocks ``b * r .. b * r + r - 1`` with ``r = logical // kernel``. A kernel size is refused if the bytes of a
page do not split that way.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvconnect.cache.specs import KVCacheConfig, LayerSpec, StateSpec
from kvconnect.errors import ConfigError, LayoutError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MultipleOf:
    """Any block size that is a multiple of ``base`` tokens."""

    base: int

    def __str__(self) -> str:
        return f"multiples of {self.base}"


class GraphSupport(enum.IntEnum):
    """The batches for which a CUDA graph can capture a backend's work, from fewest to most."""

    NEVER = 0
    UNIFORM_DECODE = 1
    """Batches in which every request computes one token."""
    UNIFORM_BATCH = 2
    """Batches in which every request computes the same number of tokens."""
    ALWAYS = 3


class AttentionBackend(Protocol):
    """An attention backend as a model runner needs it: its name in messages, and what its kernels accept.

    Block sizes are in tokens; ``graph_support`` are the batches for which a CUDA graph can capture it.
    """

    @property
    def name(self) -> str: ...

    @property
    def kernel_block_sizes(self) -> Sequence[int | MultipleOf]: ...

    @property
    def graph_support(self) -> GraphSupport: ...

    def make_metadata_builder(self, kernel_block_size: int) -> Any: ...


@dataclass(frozen=True)
class AttentionGroup:
    """Layers of one cache group that share a backend, and thus a metadata builder. Sizes are in tokens."""

    cache_group: int
    backend: AttentionBackend
    layer_names: tuple[str, ...]
    kernel_block_size: int
    metadata_builder: Any


@dataclass(frozen=True)
class AttentionSetup:
    """The result of ``init_attention``, from which a runner makes block tables, caches and CUDA graphs.

    ``kernel_block_sizes`` are tokens by cache group index: of state groups their own block size, of
    encoder-only groups, which keep no cache, no entry. ``graph_support`` is the least of all backends.
    """

    groups: tuple[AttentionGroup, ...]
    kernel_block_sizes: dict[int, int]
    graph_support: GraphSupport


def init_attention(config: KVCacheConfig, backends: Mapping[str, AttentionBackend]) -> AttentionSetup:
    """Choose kernel block sizes and make metadata builders, for every cache group of a config.

    ``backends`` maps the layer names of the main model and a draft model to their backends. State layers
    need no backend; if a state layer has one, it counts for graph support.

    Raises:
        LayoutError: an attention layer has no backend, a group's backends have no common kernel block
            size, or a backend is given for a layer that no group has.
    """
    for layer in backends:
        config.group_of(layer)
    # By cache group and identity: a backend need not be hashable.
    members: list[dict[int, tuple[AttentionBackend, list[str]]]] = [{} for _ in config.groups]
    for index, group in enumerate(config.groups):
        for layer, spec in group.layer_specs():
            if layer in backends:
                members[index].setdefault(id(backends[layer]), (backends[layer], []))[1].append(layer)
            elif group.has_cache and not isinstance(spec, StateSpec):
                raise LayoutError(f"layer {layer!r} of cache group {index} has no attention backend")
    of_groups = [[backend for backend, _ in found.values()] for found in members]
    sizes = prepare_kernel_block_sizes(config, of_groups)
    groups = tuple(
        AttentionGroup(index, backend, tuple(layers), size, backend.make_metadata_builder(size))
        for index, size in sizes.items()
        for backend, layers in members[index].values()
    )
    support = min((group.backend.graph_support for group in groups), default=GraphSupport.ALWAYS)
    return AttentionSetup(groups, sizes, support)


def prepare_kernel_block_sizes(
    config: KVCacheConfig, backends: Sequence[Sequence[AttentionBackend]]
) -> dict[int, int]:
    """The kernel block size in tokens of every group that has a cache, by group index.

    For stacks that make their metadata builders themselves: ``backends[i]`` are the attention backends of
    group ``i``, with those of a draft model. State groups keep their block size.

    Raises ``LayoutError``: a group has no backend or no common size, or the groups are not as many.
    """
    if len(backends) != len(config.groups):
        raise LayoutError(f"{len(backends)} lists of backends for {len(config.groups)} cache groups")
    sizes = {}
    for index, group in enumerate(config.groups):
        specs = [spec for _, spec in group.layer_specs()]
        if any(isinstance(spec, StateSpec) for spec in specs):
            sizes[index] = group.block_size
        elif group.has_cache:
            if not backends[index]:
                raise LayoutError(f"the cache group of {group.layer_names[0]!r} has no attention backend")
            sizes[index] = select_common_block_size(group.block_size, backends[index], specs)
    return sizes


def _takes(backend: AttentionBackend, size: int) -> bool:
    return any(
        size % accepted.base == 0 if isinstance(accepted, MultipleOf) else size == accepted
        for accepted in backend.kernel_block_sizes
    )


def _describe(backend: AttentionBackend) -> str:
    exact = sorted(size for size in backend.kernel_block_sizes if isinstance(size, int))
    rest = [str(size) for size in backend.kernel_block_sizes if isinstance(size, MultipleOf)]
    return f"{backend.name} takes {', '.join([*map(str, exact), *rest]) or 'nothing'}"


def select_common_block_size(
    block_size: int, backends: Sequence[AttentionBackend], specs: Sequence[LayerSpec] = ()
) -> int:
    """The largest divisor of ``block_size`` that every backend accepts and every spec permits.

    Sizes are in tokens. A spec permits a split only if its page splits into equal parts of whole rows; a
    padded page permits none.

    Raises ``LayoutError``: there is no such size; the text lists the sizes that each backend accepts.
    """
    divisors = [size for size in range(block_size, 0, -1) if block_size % size == 0]
    common = [size for size in divisors if all(_takes(backend, size) for backend in backends)]
    for size in common:
        if all(split_refusal(spec, size) is None for spec in specs):
            return size
    taken = "; ".join(_describe(backend) for backend in backends)
    if not common:
        raise LayoutError(
            f"no kernel block size divides the logical block_size {block_size} and suits every "
            f"attention backend: {taken}"
        )
    reasons = {reason for size in common for spec in specs if (reason := split_refusal(spec, size))}
    raise LayoutError(
        f"the logical block_size {block_size} cannot be split to {' or '.join(map(str, common))} tokens, "
        f"which is what the attention backends have in common ({taken}): {'; '.join(sorted(reasons))}"
    )


def split_refusal(spec: LayerSpec, kernel_block_size: int) -> str | None:
    """Why a page of ``spec`` does not split into pages of ``kernel_block_size`` tokens; None if it does."""
    if kernel_block_size == spec.block_size:
        return None
    if isinstance(spec, StateSpec):
        return "a state page is never split"
    if spec.page_size_bytes != spec.content_bytes:
        return (
            f"a page of {spec.content_bytes} bytes padded to {spec.page_size_bytes} "
            "does not split into equal pages"
        )
    if spec.rows_per_block * kernel_block_size % spec.block_size:
        return (
            f"{spec.rows_per_block} stored rows per {spec.block_size} tokens do not split into "
            f"whole rows per {kernel_block_size} tokens"
        )
    return None


def sync_block_size(configured: int, kernel: int) -> int:
    """The block size in tokens that a worker must use: the kernel's. Logs if it differs from ``configured``.

    To be called once, when the worker is created, so that all later parts use the same size.

    Raises ``ConfigError``: the kernel's block is larger than the configured one, or does not divide it.
    """
    if kernel > configured:
        raise ConfigError(
            f"block_size is {configured}, but the attention kernels need blocks of {kernel} tokens; "
            f"set block_size to a multiple of {kernel}"
        )
    if configured % kernel:
        raise ConfigError(
            f"block_size is {configured}, which is not a multiple of the attention kernels' block of "
            f"{kernel} tokens"
        )
    if kernel != configured:
        text = "block_size is %d tokens: using kernel blocks of %d tokens, %d to a logical block"
        logger.info(text, configured, kernel, configured // kernel)
    return kernel

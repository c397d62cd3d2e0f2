"""Chooses the kernel block size of each cache group.

The scheduler's *logical* block may be larger than the *kernel* block. Logical block ``b`` consists of kernel
blocks ``b * r .. b * r + r - 1`` with ``r = logical // kernel``. This module refuses a kernel size if the
bytes of a page do not split that way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvconnect.cache.specs import KVCacheConfig, LayerSpec, StateSpec
from kvconnect.errors import ConfigError, LayoutError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MultipleOf:
    """Any block size that is a multiple of ``base`` tokens."""

    base: int

    def __str__(self) -> str:
        return f"multiples of {self.base}"


class AttentionBackend(Protocol):
    """The interface of an attention backend that the choice of kernel block sizes needs."""

    @property
    def name(self) -> str:
        """The name of the backend in messages."""
        ...

    @property
    def kernel_block_sizes(self) -> Sequence[int | MultipleOf]:
        """The block sizes, in tokens, that the backend's kernels accept."""
        ...


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


def prepare_kernel_block_sizes(
    config: KVCacheConfig, backends: Sequence[Sequence[AttentionBackend]]
) -> dict[int, int]:
    """The kernel block size in tokens of every group that has a cache, by group index.

    ``backends[i]`` are the attention backends of group ``i``, with those of a draft model.
    State groups keep their block size. Encoder-only groups have no entry.

    Raises ``LayoutError``: a group has no common size, or ``backends`` does not match the groups.
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

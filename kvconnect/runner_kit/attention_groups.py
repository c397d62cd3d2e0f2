"""A runner's attention set-up, in the one order in which nothing can disagree.

Backends are known per cache group first; then one kernel block size per group that all of them take;
then metadata builders are made with that size. Block tables, with both sizes, and the cache come
after, from what is returned here. A serving stack that makes its builders or its cache first has to
guess the kernel size, and a connector then sees another number of blocks than the kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvconnect.cache.specs import KVCacheConfig, StateSpec
from kvconnect.errors import LayoutError
from kvconnect.runner_kit.kernel_blocks import AttentionBackend, prepare_kernel_block_sizes


class GraphSupport(enum.IntEnum):
    """How much of a backend's work a CUDA graph can hold, from least to most."""

    NEVER = 0
    UNIFORM_DECODE = 1
    """Batches in which every request computes one token."""
    UNIFORM_BATCH = 2
    """Batches in which every request computes the same number of tokens."""
    ALWAYS = 3


class RunnerBackend(AttentionBackend, Protocol):
    """An attention backend as a runner uses it."""

    @property
    def graph_support(self) -> GraphSupport:
        """What of it a CUDA graph can hold."""
        ...

    def make_metadata_builder(self, kernel_block_size: int) -> Any:
        """A builder of this backend's metadata for caches with kernel blocks of that many tokens."""
        ...


@dataclass(frozen=True)
class AttentionGroup:
    """Layers of one cache group that share a backend, and so a metadata builder."""

    cache_group: int
    backend: RunnerBackend
    layer_names: tuple[str, ...]
    kernel_block_size: int
    metadata_builder: Any


@dataclass(frozen=True)
class AttentionSetup:
    """What block tables, caches and graphs are made from.

    ``kernel_block_sizes`` are tokens by cache group index, state groups included. ``graph_support``
    is the weakest of all backends.
    """

    groups: tuple[AttentionGroup, ...]
    kernel_block_sizes: dict[int, int]
    graph_support: GraphSupport


def init_attention(config: KVCacheConfig, backends: Mapping[str, RunnerBackend]) -> AttentionSetup:
    """Choose kernel block sizes and make metadata builders, for every cache group of a config.

    ``backends`` maps layer names to their backends: the main model's and a draft model's alike. State
    layers need none; where one has one, it counts for graph support.

    Raises:
        LayoutError: an attention layer has no backend, a group's backends have no common kernel block
            size, or a backend is given for a layer that no group has.
    """
    for layer in backends:
        config.group_of(layer)
    members = [_layers_by_backend(config, index, backends) for index in range(len(config.groups))]
    sizes = prepare_kernel_block_sizes(
        config, [[backend for backend, _ in found.values()] for found in members]
    )
    groups = tuple(
        AttentionGroup(
            index, backend, tuple(layers), sizes[index], backend.make_metadata_builder(sizes[index])
        )
        for index, found in enumerate(members)
        if index in sizes
        for backend, layers in found.values()
    )
    support = min((group.backend.graph_support for group in groups), default=GraphSupport.ALWAYS)
    return AttentionSetup(groups, sizes, support)


def _layers_by_backend(
    config: KVCacheConfig, index: int, backends: Mapping[str, RunnerBackend]
) -> dict[int, tuple[RunnerBackend, list[str]]]:
    """The group's distinct backends, in order of their first layer, each with its layers."""
    found: dict[int, tuple[RunnerBackend, list[str]]] = {}
    for layer, spec in config.groups[index].layer_specs():
        backend = backends.get(layer)
        if backend is None:
            if isinstance(spec, StateSpec):
                continue
            raise LayoutError(f"layer {layer!r} of cache group {index} has no attention backend")
        found.setdefault(id(backend), (backend, []))[1].append(layer)
    return found

"""The attention set-up of a model runner, in the only order that keeps all block sizes consistent.

First the backends of each cache group are collected, then one kernel block size per group is chosen that all
of them accept, then metadata builders are made with this size. The runner makes block tables and the cache
afterwards, from the returned sizes. A serving stack that makes builders or the cache first has to guess the
kernel size, and a connector then sees another number of blocks than the kernels.
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
    """The batches for which a CUDA graph can capture a backend's work, from fewest to most."""

    NEVER = 0
    UNIFORM_DECODE = 1
    """Batches in which every request computes one token."""
    UNIFORM_BATCH = 2
    """Batches in which every request computes the same number of tokens."""
    ALWAYS = 3


class RunnerBackend(AttentionBackend, Protocol):
    """The interface of an attention backend that a model runner needs."""

    @property
    def graph_support(self) -> GraphSupport:
        """The batches for which a CUDA graph can capture the backend."""
        ...

    def make_metadata_builder(self, kernel_block_size: int) -> Any:
        """A metadata builder for caches with kernel blocks of ``kernel_block_size`` tokens."""
        ...


@dataclass(frozen=True)
class AttentionGroup:
    """Layers of one cache group that share a backend, and thus a metadata builder. Sizes are in tokens."""

    cache_group: int
    backend: RunnerBackend
    layer_names: tuple[str, ...]
    kernel_block_size: int
    metadata_builder: Any


@dataclass(frozen=True)
class AttentionSetup:
    """The result of ``init_attention``, from which a runner makes block tables, caches and CUDA graphs.

    ``kernel_block_sizes`` are tokens by cache group index, with state groups. ``graph_support`` is the
    least of all backends.
    """

    groups: tuple[AttentionGroup, ...]
    kernel_block_sizes: dict[int, int]
    graph_support: GraphSupport


def init_attention(config: KVCacheConfig, backends: Mapping[str, RunnerBackend]) -> AttentionSetup:
    """Choose kernel block sizes and make metadata builders, for every cache group of a config.

    ``backends`` maps the layer names of the main model and a draft model to their backends. State layers
    need no backend; if a state layer has one, it counts for graph support.

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
    """A group's distinct backends by ``id``, each with its layers, in the order of their first layers."""
    found: dict[int, tuple[RunnerBackend, list[str]]] = {}
    for layer, spec in config.groups[index].layer_specs():
        backend = backends.get(layer)
        if backend is None:
            if isinstance(spec, StateSpec):
                continue
            raise LayoutError(f"layer {layer!r} of cache group {index} has no attention backend")
        found.setdefault(id(backend), (backend, []))[1].append(layer)
    return found

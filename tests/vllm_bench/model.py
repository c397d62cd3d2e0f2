"""The kinds of caches: vLLM's specs for its scheduler, tensors for the connector, and what is seen of them.

All layers of a model lie in one allocation, in which cache groups overlay each other as vLLM lays them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1 import kv_cache_interface as vllm_specs

from tests.vllm_bench.reference import Sight, Words

WORD_BYTES = 8
HEAD = 2
"""Elements of K, and of V, of one head and token: together one word."""
DTYPE = torch.float16


@dataclass(frozen=True)
class Group:
    """One cache group: ``kind`` is full, latent, window, latent_window, chunked, or state."""

    kind: str
    block_size: int = 16
    num_layers: int = 1
    sees: int = 0

    @property
    def num_heads(self) -> int:
        """Words of a token in one layer; of a state, words."""
        return 1 if self.kind.startswith("latent") else 4 if self.kind == "state" else 2

    @property
    def page_bytes(self) -> int:
        """What one layer keeps in a block."""
        rows = 1 if self.kind == "state" else self.block_size
        return rows * self.num_heads * WORD_BYTES

    def sight(self, first_layer: int) -> Sight:
        """For the reference."""
        return Sight(
            self.num_layers,
            self.num_heads,
            first_layer,
            window=self.sees if self.kind.endswith("window") else 0,
            chunk=self.sees if self.kind == "chunked" else 0,
            is_state=self.kind == "state",
        )


@dataclass(frozen=True)
class Model:
    """Cache groups, and how vLLM treats their states."""

    name: str
    groups: tuple[Group, ...]
    mamba_mode: str = "none"

    @property
    def sights(self) -> tuple[Sight, ...]:
        """For the reference."""
        made, first = [], 0
        for group in self.groups:
            made.append(group.sight(first))
            first += group.num_layers
        return tuple(made)

    @property
    def has_states(self) -> bool:
        """A recurrent state is among the groups."""
        return any(group.kind == "state" for group in self.groups)

    @property
    def caches_prefixes(self) -> bool:
        """vLLM has no prefix cache where states are not kept by position."""
        return not self.has_states or self.mamba_mode == "align"

    def layers(self, index: int) -> list[str]:
        """Names of the layers of a group."""
        first = sum(group.num_layers for group in self.groups[:index])
        return [f"model.layers.{first + layer}.attn" for layer in range(self.groups[index].num_layers)]

    def config(self, num_blocks: int, num_drafts: int) -> vllm_specs.KVCacheConfig:
        """As vLLM's engine core would make it."""
        page_bytes = max(group.page_bytes for group in self.groups)
        groups = [
            vllm_specs.KVCacheGroupSpec(self.layers(index), self._spec(group, page_bytes, num_drafts))
            for index, group in enumerate(self.groups)
        ]
        return vllm_specs.KVCacheConfig(num_blocks, [], groups)

    def _spec(self, group: Group, page_bytes: int, num_drafts: int) -> vllm_specs.KVCacheSpec:
        if group.kind == "state":
            return vllm_specs.MambaSpec(
                block_size=group.block_size,
                shapes=((group.num_heads,),),
                dtypes=(torch.int64,),
                page_size_padded=page_bytes,
                mamba_cache_mode=self.mamba_mode,
                num_speculative_blocks=num_drafts,
            )
        sizes = {"block_size": group.block_size, "num_kv_heads": group.num_heads, "dtype": DTYPE}
        if group.kind == "full":
            return vllm_specs.FullAttentionSpec(**sizes, head_size=HEAD)
        if group.kind == "latent":
            return vllm_specs.MLAAttentionSpec(**sizes, head_size=2 * HEAD)
        if group.kind == "window":
            return vllm_specs.SlidingWindowSpec(
                **sizes, head_size=HEAD, sliding_window=group.sees, dcp_sharded=False
            )
        if group.kind == "latent_window":
            return vllm_specs.SlidingWindowMLASpec(
                **sizes, head_size=2 * HEAD, sliding_window=group.sees, dcp_sharded=False
            )
        return vllm_specs.ChunkedLocalAttentionSpec(**sizes, head_size=HEAD, attention_chunk_size=group.sees)


class Caches:
    """The memory of one worker: for the connector tensors, for the model words by block, token and head."""

    def __init__(self, model: Model, num_blocks: int, layout: str) -> None:
        self.model = model
        most_layers = max(group.num_layers for group in model.groups)
        page_bytes = max(group.page_bytes for group in model.groups)
        is_block_first = layout.startswith("B")
        self._buffer = np.zeros(num_blocks * most_layers * page_bytes, dtype=np.uint8)
        memory = torch.from_numpy(self._buffer)
        self.tensors: dict[str, torch.Tensor] = {}
        self.words: list[list[Words]] = []
        for index, group in enumerate(model.groups):
            views = []
            for layer, name in enumerate(model.layers(index)):
                offset = layer * page_bytes * (1 if is_block_first else num_blocks)
                stride = page_bytes * (most_layers if is_block_first else 1)
                tokens = 1 if group.kind == "state" else group.block_size
                by_head = layout.endswith("HNC") and group.kind != "state"
                steps = (
                    (WORD_BYTES * tokens, WORD_BYTES)
                    if by_head
                    else (WORD_BYTES, WORD_BYTES * group.num_heads)
                )
                views.append(
                    np.ndarray(
                        (num_blocks, tokens, group.num_heads), np.uint64, self._buffer.data, offset,
                        (stride, steps[1], steps[0]),
                    )
                )  # fmt: skip
                self.tensors[name] = _tensor(memory, group, num_blocks, offset, stride, steps)
            self.words.append(views)


def _tensor(memory, group: Group, num_blocks: int, offset: int, stride: int, steps) -> torch.Tensor:
    if group.kind == "state":
        size = group.num_heads * WORD_BYTES
        return memory.view(torch.int8).as_strided((num_blocks, 1, 1, size), (stride, size, size, 1), offset)
    item = DTYPE.itemsize
    return memory.view(DTYPE).as_strided(
        (num_blocks, group.num_heads, group.block_size, WORD_BYTES // item),
        (stride // item, steps[0] // item, steps[1] // item, 1),
        offset // item,
    )


_WHOLE = 512
"""Tokens of a state's only block, where vLLM keeps none by position."""
_WINDOW = Group("window", num_layers=2, sees=40)
MODELS = {
    model.name: model
    for model in (
        Model("full", (Group("full", num_layers=2),)),
        Model("latent", (Group("latent", num_layers=2),)),
        Model("window", (_WINDOW,)),
        Model("window+full", (Group("full", num_layers=2), _WINDOW)),
        Model("windows", (Group("full"), Group("window", sees=17), Group("window", sees=33))),
        Model("chunked+full", (Group("full"), Group("chunked", sees=48))),
        Model("latent+latent_window", (Group("latent"), Group("latent_window", sees=24))),
        Model("state+full", (Group("full", num_layers=2), Group("state", _WHOLE)), "none"),
        Model("aligned+full", (Group("full", 16), Group("state", 16)), "align"),
        Model(
            "state+window+full",
            (Group("full"), Group("window", sees=32), Group("state", _WHOLE)),
            "none",
        ),
    )
}

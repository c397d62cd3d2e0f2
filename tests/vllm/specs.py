"""vLLM's cache configuration as far as a connector reads it: specs are known by their class names."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

BLOCK = 8


def spec(kind: str, block_size: int = BLOCK, **fields: Any) -> Any:
    """What a layer keeps, by the name of vLLM's class of it."""
    return type(kind, (SimpleNamespace,), {})(block_size=block_size, **fields)


FULL, LATENT = spec("FullAttentionSpec"), spec("MLAAttentionSpec")
WINDOW, LATENT_WINDOW = (spec(f"SlidingWindow{kind}Spec", sliding_window=2 * BLOCK) for kind in ("", "MLA"))
CHUNKED = spec("ChunkedLocalAttentionSpec", attention_chunk_size=2 * BLOCK)
STATE = spec("MambaSpec", 4096, shapes=((2, 3), (4,)))


def cache_config(num_blocks: int, groups: Mapping[Any, Any], **more: Any) -> Any:
    """A cache of these groups: of a layer's name, or names, and their spec. All are moved, if not told."""
    made = [
        SimpleNamespace(layer_names=[names] if isinstance(names, str) else list(names), kv_cache_spec=spec)
        for names, spec in groups.items()
    ]
    moved = {"transfer_group_ids": tuple(range(len(made)))}
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=made, **{**moved, **more})

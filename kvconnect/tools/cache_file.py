"""A node's ranks by a small JSON file about their cache, or by a model's own ``config.json`` of Hugging Face.

The file is an object with these keys; the first two are required.

- ``layers``: a list of kinds of layers, each with its own block ids (see ``LayerKind``).
- ``block_size``: tokens of a logical block; a kind of layers may have its own.
- ``kernel_block_size``: tokens of an attention kernel's block; default ``block_size``.
- ``tp_size``: tensor-parallel ranks; default 1.
- ``kv_connector_extra_config``: as in ``kv_transfer_config``; ``engine``, ``slot_bytes`` and
  ``convert_dtype`` matter here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import torch

from kvconnect.cache.identity import Identity
from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.retention import FULL, Window
from kvconnect.cache.shard import HeadInterval, shard_heads
from kvconnect.cache.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LayerSpec,
    MLASpec,
    StateSpec,
    div_exact,
)
from kvconnect.config import ExtraConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.peer.messages import CacheMeaning, Introduction
from kvconnect.reading import read_file, read_struct
from kvconnect.runner_kit.kernel_blocks import sync_block_size

CUDA_SLOT_BYTES = 128 << 20
"""Assumed slot size on a GPU: a 512th of the memory of a GPU with 64 GiB."""
_USUAL_BLOCK_SIZE = 16
_NUM_BLOCKS = 2
"""Blocks of the tables: what is sent of a request does not depend on their number."""
_AXES = {"nhd": "block token head content", "hnd": "block head token content"}

_LAYER_TYPES = {"full_attention": "gqa", "sliding_attention": "sliding"}
"""By value of ``layer_types``. Recurrent and chunked layers are missing: each model states their size in its
own way."""

Count = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=256)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Dtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"]


class LayerKind(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are alike and share block ids. ``kind`` decides the further keys.

    ``name`` matches these layers with the other node's; default: the kind. ``block_size``: 0 for the cache's.
    """

    kind: str
    num_layers: Layers
    name: str = ""
    block_size: Count = 0


class TokenLayers(LayerKind, frozen=True, kw_only=True):
    """Layers that keep a row per token. ``mla``: one latent row of ``head_size`` values.

    ``kernel_block_size``: 0 for the cache's, or for their own ``block_size`` if they have one.
    """

    head_size: Count
    dtype: Dtype = "bfloat16"
    kernel_block_size: Count = 0


class HeadLayers(TokenLayers, frozen=True, kw_only=True):
    """Layers that keep K and V by head; ``gqa``: of all tokens. ``num_kv_heads`` counts those of all ranks.

    ``layout``: within a block, ``nhd`` has tokens outside heads, ``hnd`` heads outside tokens.
    """

    num_kv_heads: Count
    layout: Literal["nhd", "hnd"] = "nhd"


class SlidingLayers(HeadLayers, frozen=True, kw_only=True):
    """``sliding``: K and V by head of the last ``sliding_window`` tokens."""

    sliding_window: Count


class StateLayers(LayerKind, frozen=True, kw_only=True):
    """``state``: a page per request, of ``state_bytes`` for one layer on one rank."""

    state_bytes: Bytes


_KINDS: dict[str, type[LayerKind]] = {
    "gqa": HeadLayers,
    "mla": TokenLayers,
    "sliding": SlidingLayers,
    "state": StateLayers,
}


class CacheFile(msgspec.Struct, frozen=True, kw_only=True):
    """A node's cache, checked. Every kind of layers has a name and block sizes."""

    layers: tuple[LayerKind, ...]
    tp_size: int
    extra: ExtraConfig

    @property
    def meaning(self) -> CacheMeaning:
        """The meaning of the cache for peers, with what the file states of the identity of its KV."""
        dtypes = {kind.name: kind.dtype for kind in self.layers if isinstance(kind, TokenLayers)}
        convertible = "any of 16 and 8 bits, by convert_dtype"
        stated: dict[str, Any] = {
            "attention": self._stated("kind", "num_layers", "num_kv_heads", "sliding_window"),
            "cache dtype": convertible if self.extra.convert_dtype else dtypes,
            "block size": self._stated("block_size", "kernel_block_size"),
            "layout": self._stated("dtype", "layout"),
            "parallelism": {"tensor": self.tp_size},
        }
        # A cache file does not state how a state is divided over ranks.
        if any(isinstance(kind, StateLayers) for kind in self.layers):
            stated["ranks"] = self.tp_size
        # The finest division of heads over ranks; None where every rank keeps the same bytes.
        heads = (kind.num_kv_heads for kind in self.layers if isinstance(kind, HeadLayers))
        return CacheMeaning(Identity.of(stated), max(heads, default=None), self.tp_size)

    def _stated(self, *keys: str) -> dict[str, str]:
        return {
            kind.name: ", ".join(f"{key} {value}" for key in keys if (value := getattr(kind, key, "")))
            for kind in self.layers
        }

    def ranks(self, engine: str) -> dict[int, Introduction]:
        """The ranks of the node as they would introduce themselves to peers, with this ``engine``.

        Raises ``ConfigError``: the cache cannot be expressed.
        """
        slot_bytes = self.extra.slot_bytes or CUDA_SLOT_BYTES
        return {
            rank: Introduction("", "", rank, self.meaning, engine, b"", self.table(rank), slot_bytes)
            for rank in range(self.tp_size)
        }

    def table(self, rank: int) -> RegionTable:
        """The region table of one rank. Raises as ``ranks``."""
        groups, kernels = [], {}
        tensors: dict[str, CacheTensor] = {}
        heads: dict[str, HeadInterval] = {}
        for index, kind in enumerate(self.layers):
            # Equal names on both sides, so that layers match.
            names = tuple(f"{kind.name}.{number}" for number in range(kind.num_layers))
            if isinstance(kind, HeadLayers):
                heads |= dict.fromkeys(names, shard_heads(kind.num_kv_heads, rank, self.tp_size))
            spec, shape, axes, dtype = _tensor_of(kind, len(heads.get(names[0], ())))
            groups.append(KVCacheGroup(names, spec))
            kernels[index] = kind.kernel_block_size if isinstance(kind, TokenLayers) else kind.block_size
            try:
                # Neither written nor read: no page of it is ever backed by memory.
                tensors |= {name: CacheTensor(torch.empty(shape, dtype=dtype), axes) for name in names}
            except RuntimeError as error:
                text = str(error).partition("\n")[0]
                raise ConfigError(f"layers {kind.name!r} have blocks of impossible sizes: {text}") from error
        config = KVCacheConfig(_NUM_BLOCKS, tuple(groups))
        return RegionTable.build(config, kernels, tensors, heads)


def _tensor_of(kind: LayerKind, heads: int) -> tuple[LayerSpec, Sequence[int], str, torch.dtype]:
    """Spec of one layer, and its tensor: shape, axis names and dtype."""
    if isinstance(kind, StateLayers):
        spec: LayerSpec = StateSpec(kind.block_size, ((kind.state_bytes,),), (torch.uint8,))
        return spec, (_NUM_BLOCKS, kind.state_bytes), "block content", torch.uint8
    assert isinstance(kind, TokenLayers)
    dtype, kernel = getattr(torch, kind.dtype), kind.kernel_block_size
    blocks = _NUM_BLOCKS * div_exact(kind.block_size, kernel)
    if not isinstance(kind, HeadLayers):
        spec = MLASpec(kind.block_size, kind.head_size, dtype)
        return spec, (blocks, kernel, kind.head_size), "block token content", dtype
    axes = _AXES[kind.layout]
    # A head's K and V of one token side by side.
    extent = {"block": blocks, "token": kernel, "head": heads, "content": 2 * kind.head_size}
    rule = Window(kind.sliding_window) if isinstance(kind, SlidingLayers) else FULL
    spec = AttentionSpec(kind.block_size, heads, kind.head_size, dtype, retention=rule)
    return spec, [extent[axis] for axis in axes.split()], axes, dtype


class _Outer(msgspec.Struct, frozen=True, kw_only=True):
    layers: list[Any]
    block_size: Count
    kernel_block_size: Count = 0
    tp_size: Ranks = 1
    kv_connector_extra_config: dict[str, Any] = {}


def parse_cache(given: Mapping[str, Any]) -> CacheFile:
    """Check a configuration. Raises ``ConfigError`` with the key, the value and the accepted values."""
    outer = read_struct(given, _Outer, "cache")
    if not outer.layers:
        raise ConfigError("layers is empty; accepted: at least one kind of layers")
    layers = [_layer_kind(kind, f"layers[{index}]", outer) for index, kind in enumerate(outer.layers)]
    names = [kind.name for kind in layers]
    for index, name in enumerate(names):
        if (first := names.index(name)) < index:
            raise ConfigError(f"layers[{index}].name is {name!r}, which layers[{first}] has too")
    transfer = parse_kv_transfer_config(
        {"kv_role": "kv_both", "kv_connector_extra_config": outer.kv_connector_extra_config}
    )
    return CacheFile(layers=tuple(layers), tp_size=outer.tp_size, extra=transfer.extra)


def _layer_kind(given: Any, where: str, outer: _Outer) -> LayerKind:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}; accepted: an object that describes layers")
    if given.get("kind") not in _KINDS:
        raise ConfigError(f"{where}.kind is {given.get('kind')!r}; accepted: {', '.join(_KINDS)}")
    kind = read_struct(given, _KINDS[given["kind"]], where)
    block_size, name = kind.block_size or outer.block_size, kind.name or kind.kind
    if not isinstance(kind, TokenLayers):
        return msgspec.structs.replace(kind, name=name, block_size=block_size)
    # A kind with its own block size does not inherit the cache's kernel block size.
    inherited = 0 if kind.block_size else outer.kernel_block_size
    kernel = kind.kernel_block_size or inherited or block_size
    try:
        sync_block_size(block_size, kernel)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return msgspec.structs.replace(kind, name=name, block_size=block_size, kernel_block_size=kernel)


def read_cache(path: Path, sizes: Mapping[str, int]) -> CacheFile:
    """The cache of a file, or of a model's folder; ``sizes`` replace ``tp_size`` and ``block_size``.

    Raises ``ConfigError``.
    """

    def parse(given: Mapping[str, Any]) -> CacheFile:
        is_model = "layers" not in given and ("model_type" in given or "architectures" in given)
        return parse_cache({**(cache_of(given) if is_model else given), **sizes})

    return read_file(path / "config.json" if path.is_dir() else path, parse)


def cache_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """A model's cache as keys of a cache file. Raises ``ConfigError`` if the model does not define it."""
    text = given.get("text_config") or given
    num_layers = _number(text, "num_hidden_layers")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or given.get("torch_dtype") or "bfloat16")
    common: dict[str, Any] = {"dtype": dtype if dtype in get_args(Dtype) else "bfloat16"}
    if text.get("kv_lora_rank"):
        width = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        layers = [{"kind": "mla", "num_layers": num_layers, "head_size": width, **common}]
    else:
        num_heads = _number(text, "num_attention_heads")
        common["num_kv_heads"] = text.get("num_key_value_heads") or num_heads
        common["head_size"] = text.get("head_dim") or _number(text, "hidden_size") // num_heads
        layers = [
            {"kind": kind, "num_layers": count, **common, **_window(kind, text)}
            for kind, count in _counts(text, num_layers).items()
        ]
    return {"layers": layers, "block_size": _USUAL_BLOCK_SIZE}


def _counts(text: Mapping[str, Any], num_layers: int) -> Mapping[str, int]:
    """The number of layers of each kind."""
    types = text.get("layer_types")
    if types is None:
        slides = text.get("sliding_window") and text.get("use_sliding_window", True)
        return {"sliding" if slides else "gqa": num_layers}
    unknown = sorted(set(types) - _LAYER_TYPES.keys())
    if unknown:
        raise ConfigError(
            f"layer_types has {', '.join(map(repr, unknown))}, accepted: {', '.join(_LAYER_TYPES)}; write "
            "a file of the cache instead, see deploy/examples"
        )
    return Counter(_LAYER_TYPES[kind] for kind in types)


def _window(kind: str, text: Mapping[str, Any]) -> dict[str, int]:
    return {"sliding_window": _number(text, "sliding_window")} if kind == "sliding" else {}


def _number(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r}; accepted: a number that the model states, at least 1")
    return value

"""The configuration of a worker's cache as a small JSON file, for ``kvconnect explain``.

An object with these keys; the first two are needed.

- ``layers``: a list of kinds of layers, each with block ids of its own (see ``LayerKind``).
- ``block_size``: tokens of a logical block; a kind of layers may have its own.
- ``kernel_block_size``: tokens of an attention kernel's block; left out, as ``block_size``.
- ``tp_size``: tensor-parallel ranks; 1 if left out.
- ``device``: ``cuda`` or ``cpu``; ``cuda`` if left out. It decides the default size of slots.
- ``kv_connector_extra_config``: as in ``kv_transfer_config``; ``engine``, ``path``, ``slot_bytes``,
  ``num_slots`` and ``convert_dtype`` matter here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvconnect.config import ExtraConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.plan.cost import EngineRates, LinkCost
from kvconnect.reading import read_struct
from kvconnect.runner_kit.kernel_blocks import sync_block_size

Count = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=256)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Dtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"]

_MOST_FILE_BYTES = 1 << 20


class LayerKind(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are alike and share block ids.

    Attributes:
        kind: which kind they are; decides the keys below.
        num_layers: how many layers.
        name: what they are called in the output and how the other side's are found; left out, the kind.
        block_size: tokens of a logical block, where these layers have their own.
    """

    kind: str
    num_layers: Layers
    name: str = ""
    block_size: Count = 0

    @property
    def label(self) -> str:
        """What the layers are called."""
        return self.name or self.kind


class TokenLayers(LayerKind, frozen=True, kw_only=True):
    """Layers that keep a row per token: ``mla`` one latent row.

    Attributes:
        head_size: values of a head's K, and as many of its V; of ``mla``, values of a latent row.
        dtype: type of a value.
        kernel_block_size: tokens of a kernel's block, where these layers have their own.
    """

    head_size: Count
    dtype: Dtype = "bfloat16"
    kernel_block_size: Count = 0


class HeadLayers(TokenLayers, frozen=True, kw_only=True):
    """Layers that keep K and V by head: ``gqa`` of all tokens.

    Attributes:
        num_kv_heads: KV heads over all ranks.
        layout: ``nhd`` has tokens outside heads, ``hnd`` heads outside tokens within a block,
            ``heads_first`` heads outside of blocks.
        kv: ``together`` has a head's K and V of one token side by side, ``per_block`` all K of a block before
            its V, ``apart`` all K of a layer before its V.
    """

    num_kv_heads: Count
    layout: Literal["nhd", "hnd", "heads_first"] = "nhd"
    kv: Literal["together", "per_block", "apart"] = "together"


class SlidingLayers(HeadLayers, frozen=True, kw_only=True):
    """``sliding``: of the last ``sliding_window`` tokens."""

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
    """A worker's cache, checked. Block sizes are set for every kind of layers."""

    layers: tuple[LayerKind, ...]
    tp_size: int
    device: str
    extra: ExtraConfig

    @property
    def num_heads(self) -> int | None:
        """The finest division of heads over ranks; None where every rank keeps the same bytes."""
        return max((kind.num_kv_heads for kind in self.layers if isinstance(kind, HeadLayers)), default=None)

    @property
    def has_state(self) -> bool:
        """Some layers keep recurrent state, and no file says how that is divided over ranks."""
        return any(isinstance(kind, StateLayers) for kind in self.layers)


class _Outer(msgspec.Struct, frozen=True, kw_only=True):
    layers: list[Any]
    block_size: Count
    kernel_block_size: Count = 0
    tp_size: Ranks = 1
    device: Literal["cuda", "cpu"] = "cuda"
    kv_connector_extra_config: dict[str, Any] = {}


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a link, as ``--rates`` reads it.

    The first three are those of the engine: what a batch costs by itself, with each copy, with each byte.
    """

    seconds_per_batch: Seconds
    seconds_per_copy: Seconds
    bytes_per_s: Rate
    pack_bytes_per_s: Rate | None = None
    unpack_bytes_per_s: Rate | None = None
    round_trip_s: Seconds | None = None

    def link_cost(self) -> LinkCost:
        """The cost of both paths."""
        engine = EngineRates(self.seconds_per_batch, self.seconds_per_copy, self.bytes_per_s)
        return LinkCost(engine, self.pack_bytes_per_s, self.unpack_bytes_per_s, self.round_trip_s)


def read_cache_file(path: Path) -> CacheFile:
    """Read and check a configuration.

    Raises:
        ConfigError: it cannot be read or used; the text names the file, the key, the value and what is
            accepted.
    """
    try:
        return parse_cache(_read_object(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_rates(path: Path) -> Rates:
    """Read what was measured of a link.

    Raises:
        ConfigError: it cannot be read or used, as for ``read_cache_file``.
    """
    try:
        return read_struct(_read_object(path), Rates, "rates")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_cache(given: Mapping[str, Any]) -> CacheFile:
    """Check a configuration that was read.

    Raises:
        ConfigError: it cannot be used; the text names the key, the value and what is accepted.
    """
    outer = read_struct(given, _Outer, "cache")
    if not outer.layers:
        raise ConfigError("layers is empty; accepted: at least one kind of layers")
    layers = [_layer_kind(kind, f"layers[{index}]", outer) for index, kind in enumerate(outer.layers)]
    labels = [kind.label for kind in layers]
    for index, label in enumerate(labels):
        if (first := labels.index(label)) < index:
            raise ConfigError(f"layers[{index}].name is {label!r}, which layers[{first}] has too")
    transfer = parse_kv_transfer_config(
        {"kv_role": "kv_both", "kv_connector_extra_config": outer.kv_connector_extra_config}
    )
    return CacheFile(layers=tuple(layers), tp_size=outer.tp_size, device=outer.device, extra=transfer.extra)


def _layer_kind(given: Any, where: str, outer: _Outer) -> LayerKind:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}; accepted: an object that describes layers")
    if given.get("kind") not in _KINDS:
        raise ConfigError(f"{where}.kind is {given.get('kind')!r}; accepted: {', '.join(_KINDS)}")
    kind = read_struct(given, _KINDS[given["kind"]], where)
    block_size = kind.block_size or outer.block_size
    if not isinstance(kind, TokenLayers):
        return msgspec.structs.replace(kind, block_size=block_size)
    # A kind with a block size of its own has its own kernels too.
    inherited = 0 if kind.block_size else outer.kernel_block_size
    kernel = kind.kernel_block_size or inherited or block_size
    try:
        sync_block_size(block_size, kernel)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return msgspec.structs.replace(kind, block_size=block_size, kernel_block_size=kernel)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror or error}") from error
    if len(text) > _MOST_FILE_BYTES:
        raise ConfigError(f"it has more than {_MOST_FILE_BYTES} bytes")
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"it is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ConfigError(f"it holds {type(decoded).__name__}; accepted: a JSON object")
    return decoded

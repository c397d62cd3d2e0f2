"""The configuration of a worker's cache as a small JSON file, for ``kvconnect explain``.

An object with these keys; the first two are needed.

- ``layers``: a list of kinds of layers, each with block ids of its own (see ``LayerKind``).
- ``block_size``: tokens of a logical block; a kind of layers may have its own.
- ``kernel_block_size``: tokens of an attention kernel's block; left out, as ``block_size``.
- ``tp_size``: tensor-parallel ranks; 1 if left out.
- ``device``: ``cuda`` or ``cpu``; ``cuda`` if left out. It says how large slots are by themselves.
- ``kv_connector_extra_config``: as in ``kv_transfer_config``; ``engine``, ``path``, ``slot_bytes``,
  ``num_slots`` and ``convert_dtype`` matter here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvconnect.config import ExtraConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.plan.cost import EngineRates, LinkCost
from kvconnect.runner_kit.kernel_blocks import sync_block_size

Count = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=256)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]

_MOST_FILE_BYTES = 1 << 20
_SHARED = frozenset({"kind", "name", "num_layers", "block_size"})
_ATTENTION = frozenset({"dtype", "layout", "kernel_block_size"})
_FIELDS = {
    "gqa": _SHARED | _ATTENTION | {"num_kv_heads", "head_size", "kv"},
    "sliding": _SHARED | _ATTENTION | {"num_kv_heads", "head_size", "kv", "sliding_window"},
    "mla": _SHARED | (_ATTENTION - {"layout"}) | {"head_size"},
    "state": _SHARED | {"state_bytes"},
}
_NEEDED = {
    "gqa": ("num_kv_heads", "head_size"),
    "sliding": ("num_kv_heads", "head_size", "sliding_window"),
    "mla": ("head_size",),
    "state": ("state_bytes",),
}


class LayerKind(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are alike and share block ids.

    Attributes:
        kind: ``gqa`` keeps K and V of all tokens by head, ``sliding`` those of the last
            ``sliding_window`` tokens, ``mla`` one latent row per token, ``state`` a page per request.
        num_layers: how many layers.
        name: what they are called in the output and how the other side's are found; left out, the kind.
        num_kv_heads: KV heads over all ranks.
        head_size: values of a head's K, and as many of its V; of ``mla``, values of a latent row.
        dtype: type of a value.
        layout: ``nhd`` has tokens outside heads, ``hnd`` heads outside tokens within a block,
            ``heads_first`` heads outside of blocks.
        kv: ``together`` has a head's K and V of one token side by side, ``per_block`` all K of a block before
            its V, ``apart`` all K of a layer before its V.
        sliding_window: tokens that a sliding layer sees.
        state_bytes: bytes of one layer's state on one rank.
        block_size: tokens of a logical block, where these layers have their own.
        kernel_block_size: tokens of a kernel's block, where these layers have their own.
    """

    kind: Literal["gqa", "sliding", "mla", "state"]
    num_layers: Layers
    name: str = ""
    num_kv_heads: Count | None = None
    head_size: Count | None = None
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"] = "bfloat16"
    layout: Literal["nhd", "hnd", "heads_first"] = "nhd"
    kv: Literal["together", "per_block", "apart"] = "together"
    sliding_window: Count | None = None
    state_bytes: Bytes | None = None
    block_size: Count | None = None
    kernel_block_size: Count | None = None

    @property
    def label(self) -> str:
        """What the layers are called."""
        return self.name or self.kind


class CacheFile(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's cache, checked. Block sizes are set for every kind of layers."""

    layers: tuple[LayerKind, ...]
    tp_size: int
    device: str
    extra: ExtraConfig

    @property
    def num_heads(self) -> int | None:
        """The finest division of heads over ranks; None where every rank keeps the same bytes."""
        return max((kind.num_kv_heads for kind in self.layers if kind.num_kv_heads is not None), default=None)

    @property
    def has_state(self) -> bool:
        """Some layers keep recurrent state, which is divided over ranks in ways that nobody says."""
        return any(kind.kind == "state" for kind in self.layers)


class _Outer(msgspec.Struct, frozen=True, kw_only=True):
    layers: list[Any]
    block_size: Count
    kernel_block_size: Count | None = None
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
        rates: Rates = _convert(_read_object(path), Rates, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return rates


def parse_cache(given: Mapping[str, Any]) -> CacheFile:
    """Check a configuration that was read.

    Raises:
        ConfigError: it cannot be used; the text names the key, the value and what is accepted.
    """
    outer: _Outer = _convert(given, _Outer, "")
    if not outer.layers:
        raise ConfigError("layers is empty; accepted: at least one kind of layers")
    layers = []
    for index, kind in enumerate(outer.layers):
        layers.append(_layer_kind(kind, f"layers[{index}]", outer))
    labels = [kind.label for kind in layers]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise ConfigError(
                f"layers[{index}].name is {label!r}, which layers[{labels.index(label)}] has too"
            )
    transfer = parse_kv_transfer_config(
        {"kv_role": "kv_both", "kv_connector_extra_config": outer.kv_connector_extra_config}
    )
    return CacheFile(layers=tuple(layers), tp_size=outer.tp_size, device=outer.device, extra=transfer.extra)


def _layer_kind(given: Any, where: str, outer: _Outer) -> LayerKind:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}; accepted: an object that describes layers")
    kind: LayerKind = _convert(given, LayerKind, where)
    for key in given:
        if key not in _FIELDS[kind.kind]:
            raise ConfigError(
                f"{where}.{key} is {given[key]!r}, which layers of kind {kind.kind!r} do not have; accepted: "
                f"{', '.join(sorted(_FIELDS[kind.kind]))}"
            )
    for key in _NEEDED[kind.kind]:
        if getattr(kind, key) is None:
            raise ConfigError(f"{where}.{key} is missing; layers of kind {kind.kind!r} need it")
    block_size = kind.block_size or outer.block_size
    kernel = block_size
    if kind.kind != "state":
        # A kind with a block size of its own has its own kernels too.
        inherited = None if kind.block_size else outer.kernel_block_size
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


def _convert(given: Mapping[str, Any], kind: type[Any], where: str) -> Any:
    """Field by field, so that an error can name the key, the value and what is accepted."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    prefix = f"{where}." if where else ""
    values = {}
    for key, value in given.items():
        if key not in fields:
            near = difflib.get_close_matches(key, list(fields), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{prefix}{key} is no key (its value is {value!r}); {hint}accepted: {', '.join(fields)}"
            )
        try:
            values[key] = msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{prefix}{key} is {value!r}; {_accepted(fields[key].type, error)}") from error
    for key, field in fields.items():
        if field.required and key not in values:
            raise ConfigError(f"{prefix}{key} is missing; {_accepted(field.type, None)}")
    return kind(**values)


def _accepted(kind: Any, error: msgspec.ValidationError | None) -> str:
    described = msgspec.inspect.type_info(kind)
    options = getattr(described, "types", (described,))
    for option in options:
        if isinstance(option, msgspec.inspect.LiteralType):
            return f"accepted: {', '.join(str(value) for value in option.values)}"
        if isinstance(option, msgspec.inspect.IntType):
            return f"accepted: whole numbers from {option.ge} to {option.le}"
        if isinstance(option, msgspec.inspect.FloatType):
            return f"accepted: numbers above {option.gt} and up to {option.le:g}"
    return str(error) if error else "it has no default"

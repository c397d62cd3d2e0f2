"""What the bytes of a kept block depend on besides its tokens, as one digest.

Everything that the bytes depend on beside the tokens that a content's hash covers is a fact: model, weights,
layout, shard, how hashes are made. Memory that outlives a process or is shared keeps the digest of all facts
with every block, so that a block is only found where each of them is the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from kvconnect.cache.region_table import Region, RegionTable
from kvconnect.cache.retention import Retention
from kvconnect.cache.specs import KVCacheConfig, LayerSpec, StateSpec
from kvconnect.config import OffloadConfig
from kvconnect.errors import LocalError

# Of the rows themselves: how the pages of a block follow one another. Another number for another order.
FORMAT_VERSION = 1


class Namespace(msgspec.Struct, frozen=True):
    """All facts as text, and their digest of 32 bytes; ``label`` is for people, and no fact."""

    text: str
    digest: bytes
    label: str = ""

    @classmethod
    def of(cls, facts: Mapping[str, Any], label: str = "") -> Namespace:
        """The namespace of facts, in any order. Raises ``LocalError``: JSON cannot express one of them."""
        stated = {"format": FORMAT_VERSION, "facts": _plain(facts, "facts")}
        text = json.dumps(stated, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return cls(text, hashlib.sha256(text.encode()).digest(), label)

    @property
    def name(self) -> str:
        """The digest in a form for folders and keys: 32 characters, digits and a to f."""
        return self.digest.hex()[:32]


def salted(hashing: str, offload: OffloadConfig | None) -> str:
    """How names of KV are made, as peers compare it: nothing that is kept under another salt is found."""
    if offload is None or not offload.salt:
        return hashing
    return f"{hashing}, salt {hashlib.sha256(offload.salt.encode()).hexdigest()[:16]}"


def _plain(value: Any, where: str) -> Any:
    """The value as JSON's own types; equal only for equal values."""
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise LocalError(f"{where} is {value!r}, which is not text") from error
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise LocalError(f"{where} has the key {key!r}; accepted: text")
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise LocalError(
        f"{where} is {value!r}; accepted: text, finite numbers, true, false, none, and lists and mappings "
        "of them"
    )


def cache_facts(config: KVCacheConfig) -> list[Any]:
    """What the bytes of blocks depend on in the specs of the cache: by group, the spec of each layer."""
    return [{name: _spec_facts(spec) for name, spec in group.layer_specs()} for group in config.groups]


def _spec_facts(spec: LayerSpec) -> dict[str, Any]:
    """A spec's fields, but for padding, which no row holds, and how many tokens a state's block may cover."""
    facts: dict[str, Any] = {"kind": type(spec).__name__}
    left_out = {"page_size_padded"} | ({"block_size"} if isinstance(spec, StateSpec) else set())
    for name in type(spec).__dataclass_fields__:
        if name in left_out:
            continue
        value = getattr(spec, name)
        if isinstance(value, Retention):
            value = value.text
        facts[name] = str(value) if isinstance(value, torch.dtype) else value
    if isinstance(spec, StateSpec):
        facts["dtypes"] = [str(dtype) for dtype in spec.dtypes]
    return facts


def row_facts(table: RegionTable) -> dict[str, Any]:
    """What the bytes of rows depend on in a region table: all but where pages are, and how many."""
    groups: list[dict[str, Any]] = []
    for geometry in table.groups:
        groups.append({"group": geometry.group, "retention": geometry.retention})
        if not geometry.is_state:
            groups[-1]["block_tokens"] = geometry.block_tokens
            groups[-1]["blocks_per_kv_block"] = geometry.blocks_per_kv_block
    return {"groups": groups, "regions": [_region_facts(region) for region in table.regions]}


def _region_facts(region: Region) -> dict[str, Any]:
    return {
        "layer": region.layer,
        "group": region.group,
        "first_plane": region.first_plane,
        "heads": None if region.heads is None else [region.heads.start, region.heads.stop],
        "dtype": region.dtype,
        "page_bytes": region.page_bytes,
        "axes": msgspec.to_builtins(region.axes),
        "scales": list(region.scales),
        "key_bytes": region.key_bytes,
    }

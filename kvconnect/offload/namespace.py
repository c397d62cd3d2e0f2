"""The namespace of kept KV: one digest of everything but tokens that a block's bytes depend on.

Each such dependency is a fact: model, weights, layout, shard, hash function, salt. Disk and store keep the
digest of all facts with every block, so that a process finds a block only if all its facts are equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from kvconnect.cache.region_table import Region, RegionTable
from kvconnect.cache.retention import Retention
from kvconnect.cache.specs import KVCacheConfig, LayerSpec, StateSpec
from kvconnect.config import OffloadConfig
from kvconnect.errors import LocalError

# The order of a block's pages in a row. Increase the number when that order changes.
FORMAT_VERSION = 1


class Namespace(msgspec.Struct, frozen=True):
    """All facts as JSON text, and their SHA-256 digest of 32 bytes."""

    text: str
    digest: bytes

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Namespace:
        """The namespace of facts in any order, with text as keys.

        Raises ``LocalError``: a fact is not text, a finite number, true, false, none, a list or a dictionary.
        """
        stated = {"format": FORMAT_VERSION, "facts": facts}
        try:
            text = json.dumps(
                stated, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
            )
            return cls(text, hashlib.sha256(text.encode()).digest())
        except (TypeError, ValueError) as error:
            raise LocalError(f"a fact of the namespace cannot be kept: {error}") from error

    @property
    def name(self) -> str:
        """The first 32 hexadecimal digits of the digest, as logs and folder names show it."""
        return self.digest.hex()[:32]


def salted(hashing: str, offload: OffloadConfig | None) -> str:
    """The hash function of KV names with a digest of the salt; nodes with different salts share no names."""
    if offload is None or not offload.salt:
        return hashing
    return f"{hashing}, salt {hashlib.sha256(offload.salt.encode()).hexdigest()[:16]}"


def cache_facts(config: KVCacheConfig) -> list[Any]:
    """The facts of the cache's specs: by group, the spec of each layer by name."""
    return [{name: _spec_facts(spec) for name, spec in group.layer_specs()} for group in config.groups]


def _spec_facts(spec: LayerSpec) -> dict[str, Any]:
    """A spec's fields except padding, which no row holds, and the block size of a state."""
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
    """The facts of a region table: everything except the addresses and the number of pages."""
    groups: list[dict[str, Any]] = []
    for geometry in table.groups:
        groups.append({"group": geometry.group, "retention": geometry.retention})
        if not geometry.is_state:
            groups[-1]["block_tokens"] = geometry.block_tokens
            groups[-1]["blocks_per_kv_block"] = geometry.blocks_per_kv_block
    return {"groups": groups, "regions": [_region_facts(region) for region in table.regions]}


def _region_facts(region: Region) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(region))
    return {name: facts[name] for name in facts.keys() - {"address", "num_blocks", "block_stride"}}

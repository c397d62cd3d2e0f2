"""The values in quantised caches: the fp8 format, its scales, their order.

vLLM hands out bytes. The layer and its backend are asked by name; what is not known here stays bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvconnect.cache.region_table import Scales

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BYTES = (torch.uint8, torch.float8_e4m3fn)
"""The types that a cache of fp8 e4m3 can be handed out in."""

E4M3 = ("fp8", "fp8_e4m3")
_TOKEN_ROWS = ("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "TRITON_ATTN", "TRITON_ATTN_DIFFKV")
"""Backends whose rows are the K and then the V of one head and token."""
_LATENT_ROWS = ("CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA")
"""Backends whose rows are one token's latent vector. The sparse ones keep other things in them."""
_TRANSPOSED_ROWS = ("CPU_ATTN",)
"""Backends that keep the transposed K of a whole block before its V: its rows are no token's."""
_PLAIN_INSTRUCTIONS = "vec"
"""The variant of those that orders values of 8 and of 16 bits alike."""


@dataclass(frozen=True)
class Quantised:
    """A cache of fp8 e4m3 with a scale for all K, the first ``key_width`` values of a row, and one for all V.

    ``convertible``: a 16-bit cache of the same layer has its values in the same order.
    """

    scales: Scales
    key_width: int
    convertible: bool

    @property
    def is_even(self) -> bool:
        """One scale for K and V: it does not matter where K ends."""
        return self.scales[0] == self.scales[1]


def attention_layers(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """This worker's attention layers by name; nothing in a process that holds none."""
    compilation = getattr(vllm_config, "compilation_config", None)
    layers: Mapping[str, Any] = getattr(compilation, "static_forward_context", None) or {}
    return layers


def on_nvidia(tensor: torch.Tensor) -> bool:
    """AMD's fp8 is another format on some devices, and its backends order K by its type."""
    return tensor.is_cuda and torch.version.hip is None


def is_by_block(layer: Any) -> bool:
    """The layer's cache has no row that is one token's."""
    return backend_name(layer) in _TRANSPOSED_ROWS


def read_quantised(layer: Any, tensor: torch.Tensor) -> Quantised | None:
    """What a layer states of its cache of bytes; None where it states nothing, or not enough."""
    scales = _scales(layer)
    if scales is None or tensor.dtype not in BYTES or getattr(layer, "kv_cache_dtype", None) not in E4M3:
        return None
    name, width = backend_name(layer), tensor.shape[3]
    head = getattr(layer, "head_size", None)
    if not isinstance(head, int):
        return None
    if name in _LATENT_ROWS and on_nvidia(tensor) and head == width:
        # One vector is both K and V, written with K's scale.
        return Quantised((scales[0], scales[0]), width, convertible=True)
    if head + getattr(layer, "head_size_v", head) != width:
        return None
    if name in _TOKEN_ROWS and on_nvidia(tensor):
        return Quantised(scales, head, convertible=True)
    if name in _TRANSPOSED_ROWS and tensor.device.type == "cpu":
        plain = getattr(layer, "isa", None) == _PLAIN_INSTRUCTIONS
        # To be converted its page is one row with all heads, in which the place where K ends is not known.
        return Quantised(scales, head, convertible=plain and scales[0] == scales[1])
    return None


def backend_name(layer: Any) -> str:
    """The name of a layer's attention backend; empty where it has none."""
    ask = getattr(layer, "get_attn_backend", None)
    return str(ask().get_name()) if ask is not None else ""


def _scales(layer: Any) -> Scales | None:
    """Of K and of V. None where heads have scales of their own: the host's copy is then their maximum."""
    found = []
    for name in ("_k_scale", "_v_scale"):
        tensor, value = getattr(layer, name, None), getattr(layer, f"{name}_float", None)
        if value is None or (isinstance(tensor, torch.Tensor) and tensor.numel() != 1):
            return None
        found.append(float(value))
    return found[0], found[1]

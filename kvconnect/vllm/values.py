"""The values in caches: the fp8 format, its scales, and where in a page a backend puts keys and values.

vLLM hands out bytes. The layer and its backend are recognised by name; caches of unknown ones stay bytes.
Shapes and dtypes do not show the order of values in a page: with one shape, a CPU with AMX keeps other bytes
than one without. So a backend is made to write known values, whose digest identifies the order.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvconnect.cache.identity import noted
from kvconnect.cache.region_table import Scales
from kvconnect.vllm.plugin import vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

BYTES = (torch.uint8, torch.float8_e4m3fn)
"""The dtypes in which vLLM may hand out a cache of fp8 e4m3."""

E4M3 = ("fp8", "fp8_e4m3")
_TOKEN_ROWS = ("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "TRITON_ATTN", "TRITON_ATTN_DIFFKV")
"""Backends whose rows are the K and then the V of one head and token."""
_LATENT_ROWS = ("CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA")
"""Backends whose rows are one token's latent vector. Rows of sparse backends hold other data too."""
_TRANSPOSED_ROWS = ("CPU_ATTN",)
"""Backends that keep the transposed K of a whole block before its V: no row belongs to one token."""
_PLAIN_INSTRUCTIONS = "vec"
"""The variant of ``_TRANSPOSED_ROWS`` that orders 8-bit and 16-bit values alike."""
_TOKENS = 8
"""Tokens written to a page to find its order: fewer than any kernel block has."""


@dataclass(frozen=True)
class Quantised:
    """A cache of fp8 e4m3 with one scale for K, the first ``key_width`` values of a row, and one for V.

    ``convertible``: a 16-bit cache of the same layer has its values in the same order.
    """

    scales: Scales
    key_width: int
    convertible: bool

    @property
    def is_even(self) -> bool:
        """K and V have one scale: then the place where K ends does not matter."""
        return self.scales[0] == self.scales[1]


def attention_layers(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """This worker's attention layers by name; empty in a process without layers."""
    compilation = getattr(vllm_config, "compilation_config", None)
    layers: Mapping[str, Any] = getattr(compilation, "static_forward_context", None) or {}
    return layers


def on_nvidia(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on an NVIDIA GPU. AMD's fp8 and its order of K differ on some devices."""
    return tensor.is_cuda and torch.version.hip is None


def is_by_block(layer: Any) -> bool:
    """Whether no row of the layer's cache belongs to one token."""
    return backend_name(layer) in _TRANSPOSED_ROWS


def read_quantised(layer: Any, tensor: torch.Tensor) -> Quantised | None:
    """The scales of a layer's fp8 cache; None where it is not fp8 or its layout is not known."""
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
        # Converted, its page is one row with all heads, in which the place where K ends is not known.
        return Quantised(scales, head, convertible=plain and scales[0] == scales[1])
    return None


def backend_name(layer: Any) -> str:
    """The name of a layer's attention backend; empty where it has none."""
    ask = getattr(layer, "get_attn_backend", None)
    return str(ask().get_name()) if ask is not None else ""


def _scales(layer: Any) -> Scales | None:
    """The scales of K and V. None with scales by head: then the float attribute is only their maximum."""
    found = []
    for name in ("_k_scale", "_v_scale"):
        tensor, value = getattr(layer, name, None), getattr(layer, f"{name}_float", None)
        if value is None or (isinstance(tensor, torch.Tensor) and tensor.numel() != 1):
            return None
        found.append(float(value))
    return found[0], found[1]


# The order within a page


def page_orders(
    layers: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    has_slots: Callable[[str], bool],
) -> dict[str, str]:
    """By layer, the digest of a page of known content; a note names the backend, and a page never divided.

    ``dtype`` is that of activations. ``kv_caches`` are vLLM's: blocks, heads, tokens, content. The first
    kernel block of each, which belongs to the null block, is written and restored. A layer that
    ``has_slots``, or whose rows hold several tokens, is digested in memory order; others in the order of the
    view, so that both orders of heads and tokens have one digest. A backend that cannot write a page by
    itself is identified by its name and vLLM's version.
    """
    found: dict[tuple[Any, ...], str] = {}
    orders = {}
    for name, cache in kv_caches.items():
        layer = layers.get(name)
        whole = has_slots(name) or is_by_block(layer)
        kind = (_variant(layer), whole, cache.dtype, cache.shape[1:], cache.stride()[1:] if whole else ())
        if kind not in found:
            found[kind] = _order(name, layer, cache, dtype, whole=whole)
        orders[name] = found[kind]
    return orders


def _variant(layer: Any) -> str:
    """The backend of a layer, and the attributes that choose among its layouts."""
    impl = type(getattr(layer, "impl", None)).__name__
    parts = (
        backend_name(layer) or type(layer).__name__,
        impl,
        getattr(layer, "isa", ""),
        _cache_dtype(layer),
    )
    return " ".join(filter(None, map(str, parts)))


def _cache_dtype(layer: Any) -> str:
    return str(getattr(layer, "kv_cache_dtype", ""))


def _order(name: str, layer: Any, cache: torch.Tensor, dtype: torch.dtype, *, whole: bool) -> str:
    write = _writer(layer, dtype)
    if write is not None and cache.dim() == 4 and cache.numel():
        page, before = cache[0], cache[0].clone()
        try:
            page.zero_()
            write(min(_TOKENS, cache.shape[2]))
            if digest := _digest(page, _cache_dtype(layer), whole=whole):
                pages = f", undivided pages of {cache.shape[2]} tokens" if whole else ""
                return noted(digest, _variant(layer) + pages)
        except Exception as error:
            # A layout that cannot be shown must not stop the server: it is named instead.
            logger.info("layer %s: its backend writes no page by itself: %s", name, error)
        finally:
            page.copy_(before)
    return f"not shown: {_variant(layer)} of vLLM {vllm_version()}"


def _digest(page: torch.Tensor, cache_dtype: str, *, whole: bool) -> str:
    """Of the first head's tokens, or of the page in memory order; empty where nothing was written."""
    if whole:
        by_stride = sorted(zip(page.stride(), page.shape, strict=True), reverse=True)
        content = page.as_strided([size for _, size in by_stride], [stride for stride, _ in by_stride])
    else:
        content = page[0, :_TOKENS]
    if content.is_floating_point() or (content.dtype in (torch.int8, *BYTES) and cache_dtype in E4M3):
        # The values are integers that all these dtypes can hold: converted, they are equal.
        is_wide = content.dtype not in (torch.int8, *BYTES)
        values = content.float() if is_wide else content.view(torch.float8_e4m3fn).float()
        content = torch.nan_to_num(values).round().clamp(-128, 127).to(torch.int8)
    plain = content.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(plain, digest_size=8).hexdigest() if any(plain) else ""


def _writer(layer: Any, dtype: torch.dtype) -> Callable[[int], None] | None:
    """A function that writes known K and V of so many tokens to a layer's first slots; None without one."""
    impl, held = getattr(layer, "impl", None), getattr(layer, "kv_cache", None)
    update = getattr(impl, "do_kv_cache_update", None)
    if update is None or not isinstance(held, torch.Tensor) or not held.numel():
        return None

    def known(tokens: int, heads: int, width: int, kind: str) -> torch.Tensor:
        scale = getattr(layer, f"_{kind}_scale_float", 1.0) if _cache_dtype(layer) in E4M3 else 1.0
        # A quantised cache divides by the scale: the integers remain.
        return (_integers(tokens, heads, width, kind) * scale).to(held.device, dtype)

    def write(tokens: int) -> None:
        slots = torch.arange(tokens, dtype=torch.int64, device=held.device)
        if (rank := getattr(layer, "kv_lora_rank", None)) is not None:
            latent, rope = known(tokens, 1, rank, "k")[:, 0], known(tokens, 1, layer.qk_rope_head_dim, "v")
            update(latent, rope, held, slots, layer.kv_cache_dtype, layer._k_scale)
        else:
            heads, width = layer.num_kv_heads, layer.head_size
            value = known(tokens, heads, getattr(layer, "head_size_v", width), "v")
            update(layer, known(tokens, heads, width, "k"), value, held, slots)

    return write


def _integers(tokens: int, heads: int, width: int, kind: str) -> torch.Tensor:
    """Integers from -9 to 9 without 0 or a short period; odd heads have those of even heads negated."""
    numbers = torch.arange(tokens * width, dtype=torch.int64).view(tokens, 1, width) + 7919 * (kind == "v")
    values = ((numbers * 2654435761 & 0xFFFFFFFF) >> 13) % 16 - 7
    values = torch.where(values == 0, 9, values).repeat(1, heads, 1).double()
    values[:, 1::2] *= -1
    return values

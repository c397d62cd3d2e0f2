"""Where in a page an attention backend puts keys and values: found out by having it write known ones.

Shapes and types do not show it: of one shape, a CPU with AMX keeps other bytes than one without.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvconnect.cache.identity import noted
from kvconnect.vllm.values import E4M3, backend_name, is_by_block
from kvconnect.vllm.versions import vllm_version

logger = logging.getLogger(__name__)

_TOKENS = 8
"""Written to a page: fewer than any kernel block has."""
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def page_orders(
    layers: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    has_slots: Callable[[str], bool],
) -> dict[str, str]:
    """By layer the digest of a page of known content, with the backend's name as a note.

    ``dtype`` is that of activations. ``kv_caches`` are vLLM's: blocks, heads, tokens, content. The first
    kernel block of each is written, which belongs to the null block, and gets its bytes back. A layer that
    ``has_slots``, or whose rows are no tokens, is digested as it lies in memory, others in the order of the
    view, so that heads before tokens or after are one. A backend that has no way to write a page by itself is
    named, with its release of vLLM.
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
    """The backend of a layer, and what chooses among its layouts."""
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
                return noted(digest, _variant(layer))
        except Exception as error:
            # A layout that cannot be shown so is no reason not to serve: it is named instead.
            logger.info("layer %s: its backend writes no page by itself: %s", name, error)
        finally:
            page.copy_(before)
    return f"not shown: {_variant(layer)} of vLLM {vllm_version()}"


def _digest(page: torch.Tensor, cache_dtype: str, *, whole: bool) -> str:
    """Of the first head's tokens, or of the page as it lies in memory; empty where nothing was written."""
    if whole:
        by_stride = sorted(zip(page.stride(), page.shape, strict=True), reverse=True)
        content = page.as_strided([size for _, size in by_stride], [stride for stride, _ in by_stride])
    else:
        content = page[0, :_TOKENS]
    if content.is_floating_point() or (content.dtype in _BYTES and cache_dtype in E4M3):
        # The values are integers that all of these types have: converted, their order is the same.
        is_wide = content.dtype not in _BYTES
        values = content.float() if is_wide else content.view(torch.float8_e4m3fn).float()
        content = torch.nan_to_num(values).round().clamp(-128, 127).to(torch.int8)
    plain = content.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(plain, digest_size=8).hexdigest() if any(plain) else ""


def _writer(layer: Any, dtype: torch.dtype) -> Callable[[int], None] | None:
    """What writes known keys and values of so many tokens to a layer's first slots, if anything does."""
    impl, held = getattr(layer, "impl", None), getattr(layer, "kv_cache", None)
    update = getattr(impl, "do_kv_cache_update", None)
    if update is None or not isinstance(held, torch.Tensor) or not held.numel():
        return None

    def known(tokens: int, heads: int, width: int, kind: str) -> torch.Tensor:
        scale = getattr(layer, f"_{kind}_scale_float", 1.0) if _cache_dtype(layer) in E4M3 else 1.0
        # Quantised caches divide by the scale: what they keep are the integers.
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
    """From -9 to 9 without 0, in no order that repeats; what an even head has an odd one has negated."""
    numbers = torch.arange(tokens * width, dtype=torch.int64).view(tokens, 1, width) + 7919 * (kind == "v")
    values = ((numbers * 2654435761 & 0xFFFFFFFF) >> 13) % 16 - 7
    values = torch.where(values == 0, 9, values).repeat(1, heads, 1).double()
    values[:, 1::2] *= -1
    return values

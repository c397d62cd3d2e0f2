"""The two native operators of SGLang that a dense model needs on a CPU; others raise once they are called."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    width: int,
) -> None:
    """Write the next ``end - start`` locations into ``table[row, start:end]``, row by row."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = locations[taken : taken + count].to(table.dtype)
        taken += count


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy rows within each buffer; ``strides`` are bytes of a row. All sources are read first."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        read = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), read, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in in tests/sglang/stand_ins")

    return missing

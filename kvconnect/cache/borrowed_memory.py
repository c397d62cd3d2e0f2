"""Tensors over memory that others own, and of which only the address is known."""

from __future__ import annotations

import ctypes

import torch


def memory_at(address: int, length_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The bytes from an address on, as uint8; nothing is copied. The owner must keep them allocated."""
    if torch.device(device).type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * length_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_CudaMemory(address, length_bytes), device=device)


class _CudaMemory:
    """The interface by which torch takes over an address."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (length_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }

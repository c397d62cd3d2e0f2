"""What vLLM is still to take of a GPU when it hands over its caches.

vLLM makes the worker's connector after it has measured the device and sized the cache, and asks none for a
share: slots live in what lies outside of ``gpu_memory_utilization``. Inside of it memory is free too by then,
but promised: to the activations of the largest step, and to CUDA graphs that are captured later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def promised_bytes(total_bytes: int, utilization: float, taken_bytes: int) -> int:
    """What is left of vLLM's share of a device, of which it has taken ``taken_bytes``."""
    return max(0, math.ceil(total_bytes * utilization) - taken_bytes)


def still_taken_bytes(vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> int:
    """What vLLM may yet take of the device of its caches, by its own setting; 0 beside no GPU.

    Where the cache's size was given in bytes the setting says nothing of the rest, and the caches that are
    there may have passed it.
    """
    device = next(iter(kv_caches.values())).device
    if device.type != "cuda":
        return 0
    _, total_bytes = torch.cuda.mem_get_info(device)
    return promised_bytes(
        total_bytes, vllm_config.cache_config.gpu_memory_utilization, torch.cuda.memory_reserved(device)
    )

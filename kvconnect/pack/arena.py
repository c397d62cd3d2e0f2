"""The memory of slots: one allocation, of what a serving stack has left free, registered with the engine."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import time
from typing import Any

import numpy as np
import torch

from kvconnect.cache.specs import div_ceil
from kvconnect.errors import ConfigError
from kvconnect.pack.shared_memory import SharedMemory, SharedMemoryCard

logger = logging.getLogger(__name__)

ALIGN_BYTES = 4096
# What was packed is still in the processor's cache when the engine reads it.
_AUTO_CPU_BYTES = 4 << 20
_HUGE_PAGE_BYTES = 2 << 20
_MOST_CUDA_BYTES = 256 << 20
_PART_OF_CUDA_MEMORY = 512
LEAST_SLOTS = 4
LEAST_SLOT_BYTES = 16 << 20
# So much of a GPU is left free: kernels, links of the engine, and graphs larger than they were guessed.
_MARGIN_PART = 256
_UNCACHED_BYTES = 64 << 20
_MOST_COPIES = 64
_CUDA_SHARE = 0.85
_CPU_SHARE = 0.6
"""What packing reaches of a plain copy: see `python -m benchmarks pack`."""


def auto_slot_bytes(device: torch.device | str) -> int:
    """The default size of slots: large enough that a transfer's fixed cost counts little."""
    device = torch.device(device)
    if device.type != "cuda":
        return _AUTO_CPU_BYTES
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return min(_MOST_CUDA_BYTES, total_bytes // _PART_OF_CUDA_MEMORY // ALIGN_BYTES * ALIGN_BYTES)


def spare_bytes(device: torch.device, reserved_bytes: int = 0) -> int | None:
    """What is free, less ``reserved_bytes`` that the serving stack is still to take; None: not bounded."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, free_bytes - reserved_bytes - total_bytes // _MARGIN_PART)


def fitted_slots(slot_bytes: int, count: int, arenas: int, spare: int) -> tuple[int, int]:
    """Size and number of slots, of so many arenas and one more slot of scratch, that ``spare`` bytes hold.

    First there are fewer slots, then smaller ones. The least is returned even where it does not fit.
    """
    spare -= arenas * ALIGN_BYTES
    least = min(count, LEAST_SLOTS)
    fitting = (spare // slot_bytes - 1) // arenas
    if fitting >= least:
        return slot_bytes, min(count, fitting)
    smaller = spare // (arenas * least + 1) // ALIGN_BYTES * ALIGN_BYTES
    return max(smaller, min(slot_bytes, LEAST_SLOT_BYTES)), least


class Arena:
    """Slots side by side on one device, and scratch memory after them.

    Peers of this machine can map those in CPU memory that are ``shared``, where the system has such memory;
    they find it by ``card``.

    Raises ``ConfigError``: the device has no room for them.
    """

    def __init__(
        self,
        device: torch.device | str,
        slot_bytes: int,
        count: int,
        scratch_bytes: int = 0,
        *,
        shared: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.slot_bytes, self.scratch_bytes = slot_bytes, scratch_bytes
        self.length_bytes = slot_bytes * count + scratch_bytes
        on_cpu = self.device.type == "cpu"
        align_bytes = _HUGE_PAGE_BYTES if on_cpu else ALIGN_BYTES
        allocated_bytes = self.length_bytes + align_bytes
        self.card: SharedMemoryCard | None = None
        try:
            self._storage = self._allocate(allocated_bytes, shared and on_cpu)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ConfigError(
                f"{count} slots of {slot_bytes} bytes do not fit on {self.device}; leave more of its memory "
                f"free (under vLLM: a lower gpu_memory_utilization), or set fewer slots: {error}"
            ) from error
        self.address = div_ceil(self._storage.data_ptr(), align_bytes) * align_bytes
        if on_cpu:
            _use_huge_pages(self.address, self.length_bytes)
        self.scratch_address = self.address + slot_bytes * count
        # It is written to peers as it is, and memory of this process was something else before.
        self.view(self.scratch_address, scratch_bytes).zero_()
        self.addresses = tuple(self.address + index * slot_bytes for index in range(count))

    def _allocate(self, length_bytes: int, shared: bool) -> torch.Tensor:
        if shared:
            try:
                self._shared = SharedMemory(length_bytes)
            except OSError as error:
                logger.warning("slots cannot be shared with peers of this machine: %s", error)
            else:
                self.card = self._shared.card
                return torch.frombuffer(self._shared.memory, dtype=torch.uint8, count=length_bytes)
        return torch.empty(length_bytes, dtype=torch.uint8, device=self.device)

    def view(self, address: int, length_bytes: int) -> torch.Tensor:
        start = address - self._storage.data_ptr()
        return self._storage[start : start + length_bytes]


def _use_huge_pages(address: int, length_bytes: int) -> None:
    """Have the system back this memory with large pages: a copy to another process takes half the time."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # Where the system has none, it answers with an error, and all is as it was.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), advice)


def pack_bytes_per_s(arena: Arena) -> float:
    """About how fast pages are packed here: a plain copy, and the usual part of it."""
    return copy_bytes_per_s(arena) * (_CUDA_SHARE if arena.device.type == "cuda" else _CPU_SHARE)


def copy_bytes_per_s(arena: Arena) -> float:
    """How fast a plain copy into a slot is."""
    on_cuda = arena.device.type == "cuda"
    target: Any = arena.view(arena.addresses[0], arena.slot_bytes)
    sources: Any
    if not on_cuda:
        # Pages lie in memory: what is in the processor's cache, as a slot is, is copied several times faster.
        copies = max(1, min(_MOST_COPIES, _UNCACHED_BYTES // arena.slot_bytes))
        # By numpy, as pages are packed: torch would take all cores.
        sources, target = np.ones((copies, arena.slot_bytes), dtype=np.uint8), target.numpy()
    elif len(arena.addresses) > 1:
        sources = arena.view(arena.addresses[1], arena.slot_bytes)[None]
    else:
        sources = arena.view(arena.scratch_address, min(arena.scratch_bytes, arena.slot_bytes))[None]
    seconds = math.inf
    for _ in range(3):
        # The first copy is the first use of this memory, and slow.
        start = time.perf_counter()
        for source in sources:
            target[: len(source)] = source
        if on_cuda:
            torch.cuda.synchronize(arena.device)
        seconds = min(seconds, time.perf_counter() - start)
    return int(sources.nbytes) / seconds

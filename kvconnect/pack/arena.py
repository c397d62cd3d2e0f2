"""The memory of slots: one allocation from memory that the serving stack leaves free. Knows no requests."""

from __future__ import annotations

import ctypes
import logging
import mmap

import torch

from kvconnect.cache.specs import div_ceil
from kvconnect.errors import ConfigError
from kvconnect.pack.shared_memory import SharedMemory, SharedMemoryCard

logger = logging.getLogger(__name__)

ALIGN_BYTES = 4096
# Measured: through shared memory requests of 150 MB and more take 0.65 to 0.95 of their time with 4 MiB, and
# little less with larger slots, which would take more memory.
_AUTO_CPU_BYTES = 32 << 20
_HUGE_PAGE_BYTES = 2 << 20
_MOST_CUDA_BYTES = 256 << 20
_PART_OF_CUDA_MEMORY = 512
LEAST_SLOTS = 4
LEAST_SLOT_BYTES = 16 << 20
# This part of a GPU stays free: for kernels, links of the engine, and graphs larger than estimated.
_MARGIN_PART = 256


def auto_slot_bytes(device: torch.device | str) -> int:
    """The default size of slots in bytes: large enough that the fixed cost of a transfer is small."""
    device = torch.device(device)
    if device.type != "cuda":
        return _AUTO_CPU_BYTES
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return min(_MOST_CUDA_BYTES, total_bytes // _PART_OF_CUDA_MEMORY // ALIGN_BYTES * ALIGN_BYTES)


def spare_bytes(device: torch.device, reserved_bytes: int = 0) -> int | None:
    """Free bytes of a GPU, less a margin and the serving stack's ``reserved_bytes``; None for a CPU."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, free_bytes - reserved_bytes - total_bytes // _MARGIN_PART)


def fitted_slots(
    slot_bytes: int, count: int, arenas: int, spare: int, scratch_slots: int = 1
) -> tuple[int, int]:
    """Size in bytes and number of slots per arena, such that ``spare`` bytes hold ``arenas`` arenas and
    ``scratch_slots`` more slots.

    The number is reduced first, then the size. The least of both is returned even if it does not fit.
    """
    spare -= arenas * ALIGN_BYTES
    least = min(count, LEAST_SLOTS)
    fitting = (spare // slot_bytes - scratch_slots) // arenas
    if fitting >= least:
        return slot_bytes, min(count, fitting)
    smaller = spare // (arenas * least + scratch_slots) // ALIGN_BYTES * ALIGN_BYTES
    return max(smaller, min(slot_bytes, LEAST_SLOT_BYTES)), least


class Arena:
    """``count`` slots of ``slot_bytes`` side by side on one device, followed by scratch memory.

    With ``shared``, peers of this machine can map an arena in CPU memory, if the system has shared memory.
    ``card`` names this memory to them; it is None otherwise.

    Raises ``ConfigError``: the device has not enough free memory.
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
        # Scratch memory is sent to peers unchanged, and must not leak former content of this process.
        self.view(self.scratch_address, scratch_bytes).zero_()
        self.addresses = tuple(self.address + index * slot_bytes for index in range(count))

    def _allocate(self, length_bytes: int, shared: bool) -> torch.Tensor:
        if shared:
            try:
                self._shared = SharedMemory(length_bytes)
            except OSError as error:
                text = "slots cannot be shared with peers of this machine, so the engine writes to them: %s"
                logger.warning(text, error)
            else:
                self.card = self._shared.card
                return torch.frombuffer(self._shared.memory, dtype=torch.uint8, count=length_bytes)
        return torch.empty(length_bytes, dtype=torch.uint8, device=self.device)

    def view(self, address: int, length_bytes: int) -> torch.Tensor:
        start = address - self._storage.data_ptr()
        return self._storage[start : start + length_bytes]


def _use_huge_pages(address: int, length_bytes: int) -> None:
    """Ask the system for huge pages: with them a copy to another process takes half the time."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # The result is ignored: without huge pages the memory works as well.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), advice)

"""The copier of a GPU: which memory, streams and kernels it has."""

from __future__ import annotations

import logging

import torch

from kvconnect.errors import ConfigError, EngineError
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.host_memory import CudaHostMemory
from kvconnect.offload.copies.pieces import RowParts
from kvconnect.offload.copies.ring import Ring
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.offload.copies.staged import RowKernel, StagedCopier
from kvconnect.offload.copies.streams import CudaDevice
from kvconnect.pack.arena import spare_bytes
from kvconnect.pack.launcher import Launcher

logger = logging.getLogger(__name__)

_MOST_STAGING_BYTES = 512 << 20
_LEAST_STAGING_BYTES = 16 << 20
_PART_OF_MEMORY = 256


def make_cuda_copier(
    layout: RowLayout,
    arena: RowArena,
    device: torch.device,
    *,
    staging_bytes: int,
    reserved_bytes: int,
) -> StagedCopier:
    """See ``make_copier``."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    staging_bytes = staging_bytes or _suited_bytes(device, reserved_bytes)
    try:
        memory = CudaHostMemory(device)
        storage = torch.zeros(staging_bytes, dtype=torch.uint8, device=device)
    except (EngineError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"{device} has no room for {staging_bytes} bytes of staging memory: {error}"
        ) from error
    ring_bytes = staging_bytes // 2 // 256 * 256
    parts = RowParts(layout, arena, ring_bytes // 4)
    all_lanes = [lanes for kind in parts.lanes_of for lanes in kind]
    # Each direction has its own thread, and a launcher stages for one thread only.
    packing, unpacking = (Launcher(all_lanes, device, is_placed=True) for _ in range(2))
    packing.compile(pack=True)
    unpacking.compile(pack=False)
    torch.cuda.synchronize(device)
    return StagedCopier(
        parts,
        CudaDevice(device, memory),
        RowKernel(parts, packing),
        RowKernel(parts, unpacking),
        Ring(storage.data_ptr(), ring_bytes),
        Ring(storage.data_ptr() + ring_bytes, ring_bytes),
        keep=storage,
    )


def fitted_staging(wanted_bytes: int, spare: int | None) -> int:
    """As much staging memory as ``spare`` bytes of the device hold, and what copies cannot do without."""
    return wanted_bytes if spare is None else min(wanted_bytes, max(spare, _LEAST_STAGING_BYTES))


def _suited_bytes(device: torch.device, reserved_bytes: int) -> int:
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    wanted_bytes = min(_MOST_STAGING_BYTES, total_bytes // _PART_OF_MEMORY)
    spare = spare_bytes(device, reserved_bytes)
    fitted_bytes = fitted_staging(wanted_bytes, spare)
    if fitted_bytes < wanted_bytes:
        logger.warning(
            "%d bytes of staging memory do not fit into the %d bytes that are spare on %s, beside %d that "
            "the serving stack is still to take: %d are taken",
            wanted_bytes,
            spare,
            device,
            reserved_bytes,
            fitted_bytes,
        )
    return fitted_bytes

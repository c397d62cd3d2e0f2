"""The copier of a GPU: which memory, queues and kernels it has."""

from __future__ import annotations

import logging

import torch

from kvconnect.errors import ConfigError, EngineError
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.cuda_queues import CudaDevice
from kvconnect.offload.copies.host_memory import CudaHostMemory
from kvconnect.offload.copies.row_parts import RowParts
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.offload.copies.rows_triton import RowKernel
from kvconnect.offload.copies.staged import StagedCopier
from kvconnect.offload.copies.staging import LEAST_STAGING_BYTES, Staging, fitted_staging
from kvconnect.offload.copies.tiles import TileTable
from kvconnect.offload.copies.trial import Trial
from kvconnect.pack.device_memory import spare_bytes

logger = logging.getLogger(__name__)

_MOST_STAGING_BYTES = 512 << 20
_PART_OF_MEMORY = 256


def make_cuda_copier(
    layout: RowLayout,
    arena: RowArena,
    device: torch.device,
    *,
    staging_bytes: int,
    reserved_bytes: int,
    mode: str,
    programs: int,
) -> StagedCopier:
    """See ``make_copier``.

    Raises:
        ConfigError: the GPU has no room for staging memory, or there is no driver.
    """
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    staging_bytes = staging_bytes or min(_MOST_STAGING_BYTES, total // _PART_OF_MEMORY)
    if staging_bytes < LEAST_STAGING_BYTES:
        raise ConfigError(
            f"kv_connector_extra_config.offload.staging_bytes is {staging_bytes}; accepted: at least "
            f"{LEAST_STAGING_BYTES}, or 0 for what suits the device"
        )
    wanted_bytes, spare = staging_bytes, spare_bytes(device, reserved_bytes)
    staging_bytes = fitted_staging(wanted_bytes, spare)
    if staging_bytes < wanted_bytes:
        logger.warning(
            "%d bytes of staging memory do not fit into the %d bytes that are spare on %s, beside %d that "
            "the serving stack is still to take: %d are taken",
            wanted_bytes,
            spare,
            device,
            reserved_bytes,
            staging_bytes,
        )
    try:
        memory = CudaHostMemory(device)
        storage = torch.zeros(staging_bytes, dtype=torch.uint8, device=device)
    except (EngineError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"kv_connector_extra_config.offload.staging_bytes: {device} has no room for {staging_bytes} "
            f"bytes of staging memory; accepted: less ({error})"
        ) from error
    staging = Staging.divide(storage.data_ptr(), staging_bytes)
    parts = RowParts(layout, arena, staging.part_bytes)
    kernel = RowKernel(TileTable(parts.kinds), device)
    if not arena.pinned:
        memory.use_single_copies("the host's memory is not pinned")
        mode = "dma"
    on_device = CudaDevice(device, memory)
    ways = Trial(parts, arena, staging, kernel, on_device.make_queue()).choose(mode, programs)
    torch.cuda.synchronize(device)
    return StagedCopier(parts, on_device, staging, kernel, ways, storage)

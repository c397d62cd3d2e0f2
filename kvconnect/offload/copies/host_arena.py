"""The host memory of rows: one mapping that a worker makes once and, beside a GPU, pins.

Memory is taken from the machine as rows are first written; pinning takes all of it at once. Child processes
do not get the mapping: a fork would make copies of pages that a device writes to.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import ConfigError, KVConnectError, LocalError
from kvconnect.offload.index.budgets import ArenaPlan

if TYPE_CHECKING:
    from kvconnect.offload.copies.cuda_device import CudaDevice

logger = logging.getLogger(__name__)

# One call for hundreds of GiB fails with some drivers; pieces also let the log report progress.
PIN_PIECE_BYTES = 4 << 30


class RowArena:
    """All rows of a plan.

    Args:
        plan: which rows there are.
        pinner: pins the memory; None where no device reads it by itself.
        piece_bytes: most bytes that are pinned by one call, a multiple of 4096.

    Raises:
        ConfigError: the machine does not give that much memory, or does not let it be pinned. From memory
            that is not pinned copies would be slow and every step would wait for them.
    """

    def __init__(
        self, plan: ArenaPlan, pinner: CudaDevice | None = None, piece_bytes: int = PIN_PIECE_BYTES
    ) -> None:
        self.plan = plan
        self.length_bytes = -(-plan.length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, self.length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"kv_connector_extra_config.offload.cpu_bytes: the machine does not give {self.length_bytes} "
                f"bytes of memory ({error}); accepted: less"
            ) from error
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            try:
                memory.madvise(getattr(mmap, advice))
            except (AttributeError, OSError) as error:
                logger.debug("%s is not accepted for host memory: %s", advice, error)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._pinner = pinner
        self._pieces: list[int] = []
        if pinner is not None:
            self._pin(pinner, piece_bytes)

    @property
    def borders(self) -> Sequence[int]:
        """Addresses, in order, that no single copy by a device may reach across."""
        return self._pieces[1:]

    @property
    def is_mapped(self) -> bool:
        """Whether kernels of the device read rows where they lie for us. Raises as ``CudaDevice``."""
        return self._pinner is None or all(map(self._pinner.is_mapped, self._pieces))

    def row(self, group: int, row: int) -> memoryview:
        """The bytes of one row, which can be written to. Raises ``LocalError``: there is no such row."""
        start = self.plan.offset_bytes(group, row)
        return self._bytes[start : start + self.plan.row_class(group).row_bytes].data

    def addresses(self, group: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where rows of a group begin. Raises ``LocalError``: one of them does not exist."""
        found = self.plan.row_class(group)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < found.num_all:
            raise LocalError(
                f"cache group {group} has rows 0 to {found.num_all - 1}; asked for are {int(rows.min())} to "
                f"{int(rows.max())}"
            )
        return self.address + found.offset_bytes + rows * found.row_bytes

    def close(self) -> None:
        """Unpin the memory. No copy may be under way; the memory itself goes with its last view."""
        pieces, self._pieces = self._pieces, []
        for address in pieces:
            assert self._pinner is not None
            try:
                self._pinner.unpin(address)
            except KVConnectError as error:
                logger.warning("host memory at %#x stays pinned: %s", address, error)

    def _pin(self, pinner: CudaDevice, piece_bytes: int) -> None:
        began = time.monotonic()
        for start in range(0, self.length_bytes, piece_bytes):
            address = self.address + start
            try:
                pinner.pin(address, min(piece_bytes, self.length_bytes - start))
            except KVConnectError as error:
                self.close()
                raise ConfigError(
                    f"kv_connector_extra_config.offload.cpu_bytes: the machine lets {start} of "
                    f"{self.length_bytes} bytes of memory be pinned ({error}); accepted: less, or allow the "
                    f"process to lock memory"
                ) from error
            self._pieces.append(address)
        pin_s = time.monotonic() - began
        logger.info("pinned %d bytes of host memory for blocks in %.1f s", self.length_bytes, pin_s)

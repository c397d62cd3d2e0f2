"""The seam of copies between device memory and rows of host memory.

A copier is told which blocks and rows belong together, never why. It moves bytes; whoever calls it knows
what they mean, and that nobody else writes to them meanwhile. Copies never raise: what goes wrong is in
their ticket.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import ConfigError, KVConnectError, LocalError
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.rows import GroupRows, RowLayout
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.orders import RowCopies

logger = logging.getLogger(__name__)

MODES = ("auto", "dma", "kernel")


class Ticket(Protocol):
    """A snapshot or restore that was asked for. It always ends, whatever fails."""

    @property
    def done(self) -> bool:
        """It ended: nobody reads or writes its blocks and rows for it any more."""
        ...

    @property
    def error(self) -> str | None:
        """Why its bytes are not right, once it is done; None if they are."""
        ...

    @property
    def waited_s(self) -> float:
        """How long the compute stream had to wait until its blocks were read, once it is done."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it is done. For tests and benchmarks."""
        ...


class Copier(Protocol):
    """Copies between the blocks of one worker and its rows.

    ``snapshot`` and ``mark`` are called on the thread that gives the device its steps, ``restore`` on any one
    thread, at the same time.
    """

    def snapshot(self, copies: Sequence[RowCopies]) -> Ticket:
        """Copy blocks to rows, as the blocks are when what was given to the device so far is done.

        Whatever is given to the device afterwards may overwrite the blocks. Rows are read once the ticket is
        done, and not before.
        """
        ...

    def mark(self) -> Any:
        """Remember what the device was given so far; for ``restore``."""
        ...

    def restore(self, copies: Sequence[RowCopies], after: Any = None) -> Ticket:
        """Copy rows to blocks, once what was given to the device up to the mark ``after`` is done.

        The blocks hold the rows' bytes for whatever is given to the device after the ticket is done.
        """
        ...

    @property
    def modes(self) -> tuple[str, str]:
        """How blocks leave the device and how they come back: ``cpu``, ``dma`` or ``kernel``."""
        ...

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes per second of both directions, measured at the start; 0 where that was not."""
        ...

    @property
    def staging_waits(self) -> int:
        """How often a snapshot had to wait until staging memory was free."""
        ...

    def close(self) -> None:
        """Wait until everything that was asked for is done, and let go of streams and staging memory."""
        ...


def make_arena(plan: ArenaPlan, device: torch.device | str) -> RowArena:
    """The rows of a plan beside a device; pinned where the device is a GPU.

    Raises:
        ConfigError: the machine does not give that much memory.
    """
    if torch.device(device).type != "cuda":
        return RowArena(plan)
    from kvconnect.offload.copies.host_memory import CudaHostMemory

    return RowArena(plan, CudaHostMemory(torch.device(device)))


def make_copier(
    table: RegionTable,
    layout: RowLayout,
    arena: RowArena,
    device: torch.device | str,
    *,
    staging_bytes: int = 0,
    reserved_bytes: int = 0,
    mode: str = "auto",
    programs: int = 0,
) -> Copier:
    """The copier for a device. On a GPU it takes a moment: kernels are compiled, and ways to copy are tried.

    Rows hold nothing yet: what is tried may write to them. If it fails the arena stays its owner's to close.

    ``staging_bytes`` is device memory for copies under way, ``programs`` how many programs of a copying
    kernel may run at a time; 0 for what suits the device. Staging is smaller where the device's free memory,
    less ``reserved_bytes`` of it, does not hold it. ``table`` must outlive the copier, and its tensors.

    Raises:
        ConfigError: a setting is not accepted, or the device has no room.
    """
    if mode not in MODES:
        raise ConfigError(f"copy is {mode!r}; accepted: {', '.join(MODES)}")
    for name, value in (("staging_bytes", staging_bytes), ("programs", programs)):
        if value < 0:
            raise ConfigError(f"{name} is {value}; accepted: 0 for what suits the device, or more")
    device = torch.device(device)
    if device.type != "cuda":
        from kvconnect.offload.copies.copier_cpu import CpuCopier

        return CpuCopier(layout, arena)
    try:
        from kvconnect.offload.copies.copier_cuda import make_cuda_copier
    except ImportError as error:
        raise ConfigError(f"device is {str(device)!r}, which needs Triton: pip install triton") from error
    made: Copier = make_cuda_copier(
        layout,
        arena,
        device,
        staging_bytes=staging_bytes,
        reserved_bytes=reserved_bytes,
        mode=mode,
        programs=programs,
    )
    return made


@dataclass(frozen=True)
class Ended:
    """A ticket of something that happened already."""

    error: str | None = None
    waited_s: float = 0.0
    done: bool = True

    def wait(self) -> None:
        """It is done."""


def failed(what: str, error: Exception) -> Ended:
    """The ticket of a copy that was not even begun."""
    logger.error("a %s of blocks failed: %s", what, error, exc_info=not isinstance(error, KVConnectError))
    return Ended(error_text(error))


def error_text(error: Exception) -> str:
    """What a ticket says of an error."""
    return f"{type(error).__name__}: {error}"


def columns_of(copies: RowCopies, rows: GroupRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks and rows of copies of one group, as columns.

    Raises:
        LocalError: they are not pairs, or a block is none of the cache, or the null block.
    """
    blocks, numbers = (np.array(ids, dtype=np.int64) for ids in (copies.block_ids, copies.rows))
    if len(blocks) != len(numbers):
        raise LocalError(f"{len(blocks)} blocks of cache group {copies.group} came with {len(numbers)} rows")
    if len(blocks) and not 0 < int(blocks.min()) <= int(blocks.max()) < rows.num_blocks:
        raise LocalError(
            f"cache group {copies.group} has blocks 1 to {rows.num_blocks - 1}; asked for are "
            f"{int(blocks.min())} to {int(blocks.max())}"
        )
    return blocks, numbers

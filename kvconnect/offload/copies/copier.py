"""The seam of copies between device memory and rows of host memory.

A copier moves bytes between blocks and rows; its caller knows what they mean, and that nothing else writes to
them meanwhile. Copies never raise: what goes wrong is in their ticket.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.orders import RowCopies

logger = logging.getLogger(__name__)


class CopyTicket(Protocol):
    """A snapshot or restore that was asked for. It always ends."""

    @property
    def done(self) -> bool:
        """It ended: nothing reads or writes its blocks and rows for it any more."""
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

    def snapshot(self, copies: Sequence[RowCopies]) -> CopyTicket:
        """Copy blocks to rows, as the blocks are when what was given to the device so far is done.

        What is given to the device afterwards may overwrite them. Rows are read once the ticket is done.
        """
        ...

    def mark(self) -> Any:
        """Remember what the device was given so far; for ``restore``."""
        ...

    def restore(self, copies: Sequence[RowCopies], after: Any = None) -> CopyTicket:
        """Copy rows to blocks, once what was given to the device up to the mark ``after`` is done.

        The blocks hold the rows' bytes for what is given to the device after the ticket is done.
        """
        ...

    @property
    def staging_waits(self) -> int:
        """How often a snapshot had to wait until staging memory was free."""
        ...

    def close(self) -> None:
        """Wait until everything that was asked for is done, and free streams and staging memory."""
        ...


def make_arena(plan: ArenaPlan, device: torch.device | str) -> RowArena:
    """The rows of a plan beside a device; pinned where the device is a GPU.

    Raises:
        ConfigError: the machine does not give that much memory, or does not let it be pinned.
    """
    if torch.device(device).type != "cuda":
        return RowArena(plan)
    from kvconnect.offload.copies.host_memory import CudaHostMemory

    return RowArena(plan, CudaHostMemory(torch.device(device)))


def make_copier(
    layout: RowLayout,
    arena: RowArena,
    device: torch.device | str,
    *,
    staging_bytes: int = 0,
    reserved_bytes: int = 0,
) -> Copier:
    """The copier for a device. On a GPU it takes a moment: kernels are compiled.

    The tensors of the layout must outlive it. If it fails the arena stays its owner's to close.

    ``staging_bytes`` is device memory for copies under way, 0 for what suits the device: less where its free
    memory, less ``reserved_bytes`` of it, does not hold that.

    Raises:
        ConfigError: the device has no room, or Triton is not installed.
    """
    device = torch.device(device)
    if device.type != "cuda":
        from kvconnect.offload.copies.copier_cpu import CpuCopier

        return CpuCopier(layout, arena)
    try:
        from kvconnect.offload.copies.copier_cuda import make_cuda_copier
    except ImportError as error:
        raise ConfigError(f"device is {str(device)!r}, which needs Triton: pip install triton") from error
    return make_cuda_copier(layout, arena, device, staging_bytes=staging_bytes, reserved_bytes=reserved_bytes)


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

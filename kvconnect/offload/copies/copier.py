"""Copies between device memory and rows of host memory.

A copier moves bytes between blocks and rows; its caller knows what they mean, and that nothing else writes to
them meanwhile. Copies never raise: what goes wrong is in their ticket.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.offload.copies.host_arena import RowArena
from kvconnect.offload.copies.rows import RowLayout, RowParts, page_numbers
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.pack.batches import ChunkLayout, StagedChunk
from kvconnect.pack.numpy_mover import NumpyMover
from kvconnect.transfer.orders import RowCopies

logger = logging.getLogger(__name__)


class CopyTicket:
    """A snapshot or restore that was asked for. It always ends: with an event of the device, or at once.

    Attributes:
        error: why its bytes are not right, once it is done; None if they are.
        waited_s: how long the compute stream had to wait until its blocks were read, once it is done:
            between the two events of each of ``waits``.
    """

    def __init__(
        self, error: str | None = None, end: Any = None, waits: Sequence[tuple[Any, Any]] = ()
    ) -> None:
        self.error, self.waited_s = error, 0.0
        self._end, self._waits = end, waits

    @property
    def done(self) -> bool:
        """It ended: nothing reads or writes its blocks and rows for it any more.

        Once the device reports a failure, nothing runs on it any more.
        """
        if self._end is None:
            return True
        try:
            if not self._end.query():
                return False
            self.waited_s = sum(before.elapsed_time(after) for before, after in self._waits) / 1e3
        except Exception as error:
            self.error = self.error or _text(error)
        self._end, self._waits = None, ()
        return True

    def wait(self) -> None:
        """Block the calling thread until it is done. For tests and benchmarks."""
        if self._end is not None:
            self._end.synchronize()
        assert self.done


class Copier:
    """Copies between the blocks of one worker and its rows; of this class where both are a CPU's.

    ``snapshot`` and ``mark`` are called on the thread that gives the device its steps, ``restore`` on any one
    thread, at the same time.

    Attributes:
        staging_waits: how often a snapshot had to wait until staging memory was free.
    """

    def __init__(self, parts: RowParts, arena: RowArena) -> None:
        self.staging_waits = 0
        self._parts, self._arena = parts, arena
        self._mover = NumpyMover([lanes for kind in parts.lanes_of for lanes in kind], is_placed=True)

    def snapshot(self, copies: Sequence[RowCopies]) -> CopyTicket:
        """Copy blocks to rows, as the blocks are when what was given to the device so far is done.

        What is given to the device afterwards may overwrite them. Rows are read once the ticket is done.
        """
        return self._copy("snapshot", copies, pack=True)

    def mark(self) -> Any:
        """Remember what the device was given so far; for ``restore``."""
        return None

    def restore(self, copies: Sequence[RowCopies], after: Any = None) -> CopyTicket:
        """Copy rows to blocks, once what was given to the device up to the mark ``after`` is done.

        The blocks hold the rows' bytes for what is given to the device after the ticket is done.
        """
        return self._copy("restore", copies, pack=False)

    def close(self) -> None:
        """Wait until everything that was asked for is done, and free streams and staging memory."""

    def _copy(self, what: str, copies: Sequence[RowCopies], pack: bool) -> CopyTicket:
        try:
            kind, block, address, _ = self._parts.columns(copies)
            numbers = page_numbers(kind, block, address - self._arena.address)
            moves = self._parts.moves(tuple(numbers))
            layout = ChunkLayout(self._arena.length_bytes, (), moves)
            self._mover.move(self._arena.address, StagedChunk(layout, numbers), None, pack)
        except Exception as error:
            return CopyTicket(failure(what, error))
        return CopyTicket()


def make_arena(plan: ArenaPlan, device: torch.device | str) -> RowArena:
    """The rows of a plan beside a device; pinned where the device is a GPU.

    Raises:
        ConfigError: the machine does not give that much memory, or does not let it be pinned.
    """
    if torch.device(device).type != "cuda":
        return RowArena(plan)
    from kvconnect.offload.copies.cuda_device import CudaDevice

    return RowArena(plan, CudaDevice(torch.device(device)))


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
        return Copier(RowParts(layout, arena), arena)
    try:
        from kvconnect.offload.copies.staged import make_staged_copier
    except ImportError as error:
        raise ConfigError(f"device is {str(device)!r}, which needs Triton: pip install triton") from error
    return make_staged_copier(layout, arena, device, staging_bytes, reserved_bytes)


def failure(what: str, error: Exception) -> str:
    """Log why a copy of blocks failed; the error text of its ticket."""
    logger.error("a %s of blocks failed: %s", what, error, exc_info=not isinstance(error, KVConnectError))
    return _text(error)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""Copies between device memory and rows of host memory: snapshots and restores.

A copier knows blocks and rows, but neither their contents nor requests. Its caller ensures that no other
write reaches them meanwhile. A failed copy does not raise: its ticket has the error.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from kvconnect.errors import ConfigError, EngineError
from kvconnect.offload.copies.cuda_device import CudaDevice, CudaQueue
from kvconnect.offload.copies.rows import Piece, RowArena, RowLayout, RowParts, page_numbers
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.pack.arena import spare_bytes
from kvconnect.pack.batches import ChunkLayout, StagedChunk
from kvconnect.pack.numpy_mover import NumpyMover
from kvconnect.transfer.orders import RowCopies

if TYPE_CHECKING:
    from kvconnect.pack.launcher import Launcher

logger = logging.getLogger(__name__)


class CopyTicket:
    """A snapshot or restore. It always ends: with an event of the device, or at once.

    Its owner keeps it until then, and with it what kernels read meanwhile (``keep``).

    Attributes:
        error: why the copy failed; valid once it is done, None for success.
        waited_s: how long the compute stream waited for staging memory, between the two events of each of
            ``waits``; valid once the copy is done.
    """

    def __init__(
        self,
        error: str | None = None,
        end: Any = None,
        waits: Sequence[tuple[Any, Any]] = (),
        keep: object = None,
    ) -> None:
        self.error, self.waited_s = error, 0.0
        self._end, self._waits, self._keep = end, waits, keep

    @property
    def done(self) -> bool:
        """Whether the copy has ended: its blocks and rows are quiescent.

        If the device reports a failure, the copy has ended too, since such a device runs no work any more.
        """
        if self._end is None:
            return True
        try:
            if not self._end.query():
                return False
            self.waited_s = sum(before.elapsed_time(after) for before, after in self._waits) / 1e3
        except Exception as error:
            self.error = self.error or _text(error)
        self._end, self._waits, self._keep = None, (), None
        return True

    def wait(self) -> None:
        """Block the calling thread until the copy is done. For tests and benchmarks."""
        if self._end is not None:
            self._end.synchronize()
        assert self.done


class Copier:
    """Copies between the blocks of one worker and its rows. This class is for a CPU, and copies at once.

    The thread that launches steps calls ``snapshot`` and ``mark``; one other thread may call ``restore``
    meanwhile.
    """

    def __init__(self, parts: RowParts, arena: RowArena) -> None:
        self._parts, self._arena = parts, arena
        self._mover = NumpyMover([lanes for kind in parts.lanes_of for lanes in kind], is_placed=True)

    def snapshot(self, copies: Sequence[RowCopies]) -> CopyTicket:
        """Copy blocks to rows, with the bytes that all work launched on the device so far leaves in them.

        Work launched afterwards may overwrite the blocks. The rows are complete once the ticket is done.
        """
        return self._move(copies, None, pack=True)

    def mark(self) -> Any:
        """A mark after all work launched on the device so far; for ``restore``."""
        return None

    def restore(self, copies: Sequence[RowCopies], after: Any = None) -> CopyTicket:
        """Copy rows to blocks, once all work launched before the mark ``after`` is done.

        Work launched after the ticket is done finds the rows' bytes in the blocks.
        """
        return self._move(copies, after, pack=False)

    def close(self) -> None:
        """Wait until all copies are done, and free streams and staging memory."""

    def _move(self, copies: Sequence[RowCopies], after: Any, pack: bool) -> CopyTicket:
        try:
            kind, block, address, _ = self._parts.columns(copies)
            numbers = page_numbers(kind, block, address - self._arena.address)
            moves = self._parts.moves(tuple(numbers))
            layout = ChunkLayout(self._arena.length_bytes, (), moves)
            self._mover.move_pages(self._arena.address, StagedChunk(layout, numbers), pack)
        except Exception as error:
            return CopyTicket(failure(error, pack))
        return CopyTicket()


def make_arena(plan: ArenaPlan, device: torch.device | str) -> RowArena:
    """Allocate the rows of a plan; for a GPU they are pinned.

    Raises:
        ConfigError: the machine cannot allocate or pin that much memory.
    """
    device = torch.device(device)
    return RowArena(plan, CudaDevice(device) if device.type == "cuda" else None)


def failure(error: Exception, pack: bool) -> str:
    """The error text for the ticket of a copy of blocks that failed."""
    # The ticket's owner logs the first.
    logger.debug("a %s of blocks failed", "snapshot" if pack else "restore", exc_info=error)
    return _text(error)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_MOST_STAGING_BYTES = 512 << 20
_LEAST_STAGING_BYTES = 16 << 20
_PART_OF_MEMORY = 256
_MOST_PREPARED = 256


class Ring:
    """A ring of staging memory: ``length_bytes`` from ``address`` on, of which spans are taken in turn.

    A span is taken, used, and sealed with a fence: the event after which no work uses it, or None.
    """

    def __init__(self, address: int, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._address = address
        # Places count on over the end of the ring, where they stand for its beginning again.
        self._start = self._end = 0
        self._sealed: deque[tuple[int, Any]] = deque()

    def take(self, length_bytes: int) -> tuple[int, Any]:
        """Take a span, which is no longer than the ring, once the last one was sealed.

        Returns its address, and the fence to wait for before its use; None for no wait. Fences pass in the
        order in which spans were sealed.
        """
        start, ring_bytes = self._end, self.length_bytes
        if start % ring_bytes + length_bytes > ring_bytes:
            start += ring_bytes - start % ring_bytes
        self._start, self._end = start, start + length_bytes
        fence = None
        # A fence covers all spans before its own.
        while self._sealed and self._sealed[0][0] < self._end - ring_bytes:
            fence = self._sealed.popleft()[1]
        return self._address + start % ring_bytes, fence

    def seal(self, fence: Any) -> None:
        """Seal the span taken last: no work uses it once the fence has passed."""
        self._sealed.append((self._start, fence))


class Direction:
    """One direction of copies: its kernel and its staging memory. One thread at a time uses it."""

    def __init__(self, parts: RowParts, launcher: Launcher, ring: Ring) -> None:
        self.launcher, self.ring = launcher, ring
        # Steps store few blocks, and similar numbers of them, so prepared layouts recur.
        self._prepare = lru_cache(_MOST_PREPARED)(lambda pages: launcher.prepare(0, (), parts.moves(pages)))

    def load(self, queue: CudaQueue, pieces: Sequence[Piece]) -> list[StagedChunk]:
        """Copy the number columns of all pieces to the device, at once; they are freed with the chunks."""
        layouts = [self._prepare(tuple(piece.numbers)) for piece in pieces]
        # Allocate in this queue's stream: torch reuses memory of another stream there at once, even while
        # kernels of this queue still use it.
        with queue.current():
            lent, staged = self.launcher.stage(layouts, [piece.numbers for piece in pieces])
        queue.run(partial(self.launcher.load, lent))
        return staged


class StagedCopier(Copier):
    """The ``Copier`` of a GPU, through staging memory that ``keep`` owns."""

    def __init__(
        self, parts: RowParts, device: CudaDevice, storing: Direction, restoring: Direction, keep: object
    ) -> None:
        self._parts, self._device, self._keep = parts, device, keep
        self._storing, self._restoring = storing, restoring
        self._to_host, self._from_host, self._unpacks = (device.make_queue() for _ in range(3))

    def mark(self) -> Any:
        return self._device.compute().record()

    def close(self) -> None:
        try:
            for queue in (self._to_host, self._from_host, self._unpacks):
                queue.record().synchronize()
        except Exception as error:
            logger.info("copies of blocks failed while the node ended: %s", error)
        self._keep = None

    def _move(self, copies: Sequence[RowCopies], after: Any, pack: bool) -> CopyTicket:
        """Move copies in pieces: to ``pack``, by the kernel and then the copy engines; else in reverse order.

        The two stages use the queues ``first`` and ``last``, so that they work on two pieces at a time.
        """
        pieces: Sequence[Piece] = ()
        all_staged: Sequence[StagedChunk] = ()
        end, waits = None, []
        try:
            if pack:
                way, first, last = self._storing, self._device.compute(), self._to_host
            else:
                way, first, last = self._restoring, self._from_host, self._unpacks
            # One half of the staging memory is filled while the other is copied to host memory.
            pieces = self._parts.pieces(copies, way.ring.length_bytes // (2 if pack else 4))
            if not pieces:
                return CopyTicket()
            if after is not None:
                last.wait_for(after)
            all_staged = way.load(first if pack else last, pieces)
            for piece, staged in zip(pieces, all_staged, strict=True):
                address, fence = way.ring.take(piece.total_bytes)
                host, place, length = piece.copies
                launch = partial(way.launcher.start, staged, address, pack)
                if pack:
                    if fence is not None and not fence.query():
                        before = first.record(timed=True)
                        first.wait_for(fence)
                        waits.append((before, first.record(timed=True)))
                    first.run(launch)
                    last.wait_for(first.record())
                    last.copy(address + place, host, length)
                else:
                    if fence is not None:
                        first.wait_for(fence)
                    first.copy(host, address + place, length)
                    last.wait_for(first.record())
                    last.run(launch)
                end = last.record()
                way.ring.seal(end)
        except Exception as error:
            text = failure(error, pack)
            if pieces:
                end = _end_of_failed(way, first, last) or end
            return CopyTicket(text, end, waits, all_staged)
        return CopyTicket(None, end, waits, all_staged)


def _end_of_failed(way: Direction, first: CudaQueue, last: CudaQueue) -> Any:
    """An event after which no work of a half-failed copy touches blocks or rows; None: the device is lost."""
    end = None
    try:
        last.wait_for(first.record())
        end = last.record()
    except Exception as lost:
        # A device that accepts no work runs none either.
        logger.error("the device takes no more copies, restart the server: %s", lost)
    way.ring.seal(end)
    return end


def make_copier(
    layout: RowLayout,
    arena: RowArena,
    device: torch.device | str,
    *,
    staging_bytes: int = 0,
    reserved_bytes: int = 0,
) -> Copier:
    """The copier for a device. On a GPU this compiles kernels, which takes a moment.

    The tensors of the layout must outlive the copier. The caller closes the arena, also after an error.

    ``staging_bytes`` is device memory for copies under way; 0 for a size that suits the device and its free
    memory, less ``reserved_bytes``.

    Raises:
        ConfigError: the device has no room, or Triton is not installed.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return Copier(RowParts(layout, arena), arena)
    try:
        from kvconnect.pack.launcher import Launcher
    except ImportError as error:
        raise ConfigError(f"device is {str(device)!r}, which needs Triton: pip install triton") from error
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    staging_bytes = staging_bytes or _suited_bytes(device, reserved_bytes)
    try:
        cuda = CudaDevice(device)
        storage = torch.zeros(staging_bytes, dtype=torch.uint8, device=device)
    except (EngineError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"{device} has no room for {staging_bytes} bytes of staging memory: {error}"
        ) from error
    ring_bytes = staging_bytes // 2 // 256 * 256
    parts = RowParts(layout, arena, ring_bytes // 4)
    all_lanes = [lanes for kind in parts.lanes_of for lanes in kind]

    def make_direction(address: int, pack: bool) -> Direction:
        # Each direction has its own thread, and a launcher serves one thread only.
        launcher = Launcher(all_lanes, device, is_placed=True)
        launcher.compile(pack)
        return Direction(parts, launcher, Ring(address, ring_bytes))

    storing = make_direction(storage.data_ptr(), pack=True)
    restoring = make_direction(storage.data_ptr() + ring_bytes, pack=False)
    torch.cuda.synchronize(device)
    return StagedCopier(parts, cuda, storing, restoring, keep=storage)


def fitted_staging(wanted_bytes: int, spare: int | None) -> int:
    """``wanted_bytes``, cut to ``spare`` bytes (None: unknown) but not below ``_LEAST_STAGING_BYTES``."""
    return wanted_bytes if spare is None else min(wanted_bytes, max(spare, _LEAST_STAGING_BYTES))


def _suited_bytes(device: torch.device, reserved_bytes: int) -> int:
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    wanted_bytes = min(_MOST_STAGING_BYTES, total_bytes // _PART_OF_MEMORY)
    spare = spare_bytes(device, reserved_bytes)
    fitted_bytes = fitted_staging(wanted_bytes, spare)
    if fitted_bytes < wanted_bytes:
        logger.warning(
            "offload: %d bytes of staging memory do not fit into the %d bytes that are spare on %s, beside "
            "%d that the serving stack is still to take: there are %d, so blocks are copied more slowly; "
            "leave more of the device free, under vLLM with a lower gpu_memory_utilization",
            wanted_bytes,
            spare,
            device,
            reserved_bytes,
            fitted_bytes,
        )
    return fitted_bytes

"""Copies between device memory and rows of host memory.

A copier moves bytes between blocks and rows; its caller knows what they mean, and that nothing else writes to
them meanwhile. Copies never raise: what goes wrong is in their ticket.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from kvconnect.errors import ConfigError, EngineError, KVConnectError, LocalError
from kvconnect.offload.copies.cuda_device import CudaDevice, CudaQueue
from kvconnect.offload.copies.rows import Piece, RowArena, RowLayout, RowParts, page_numbers
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.pack.arena import spare_bytes
from kvconnect.pack.batches import ChunkLayout, StagedChunk
from kvconnect.pack.numbers import NumberBuffer
from kvconnect.pack.numpy_mover import NumpyMover
from kvconnect.transfer.orders import RowCopies

if TYPE_CHECKING:
    from kvconnect.pack.launcher import Launcher

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
    device = torch.device(device)
    return RowArena(plan, CudaDevice(device) if device.type == "cuda" else None)


def failure(what: str, error: Exception) -> str:
    """Log why a copy of blocks failed; the error text of its ticket."""
    logger.error("a %s of blocks failed: %s", what, error, exc_info=not isinstance(error, KVConnectError))
    return _text(error)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_MOST_STAGING_BYTES = 512 << 20
_LEAST_STAGING_BYTES = 16 << 20
_PART_OF_MEMORY = 256
_MOST_PREPARED = 256


class Ring:
    """Staging memory: spans of ``length_bytes`` from ``address`` on, given out in turn.

    A span is taken, used, and sealed with a fence: the event after which nothing uses it, or None.
    """

    def __init__(self, address: int, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._address = address
        self._next = 0
        self._sealed: deque[tuple[int, int, Any]] = deque()
        self._open: tuple[int, int] | None = None

    def take(self, length_bytes: int) -> tuple[int, Any]:
        """The address of a span, and the fence that must be passed before it is used; None for none.

        Fences are passed in the order in which spans were sealed.

        Raises:
            LocalError: the span is longer than the ring, or the last one was not sealed.
        """
        if length_bytes > self.length_bytes:
            raise LocalError(f"a span has {length_bytes} bytes; accepted: up to {self.length_bytes}")
        if self._open is not None:
            raise LocalError("a span was taken before the last one was sealed")
        start = self._next if self._next + length_bytes <= self.length_bytes else 0
        self._open = start, start + length_bytes
        self._next = start + length_bytes
        fence = None
        # The oldest come first, so that what lies in the way is at the front; a fence stands for those
        # before it as well.
        in_the_way = [begin < start + length_bytes and start < end for begin, end, _ in self._sealed]
        last = max((index for index, hit in enumerate(in_the_way) if hit), default=-1)
        for _ in range(last + 1):
            fence = self._sealed.popleft()[2]
        return self._address + start, fence

    def seal(self, fence: Any) -> None:
        """Nothing uses the span that was taken last once this fence is passed."""
        if self._open is not None:
            self._sealed.append((*self._open, fence))
            self._open = None


class Direction:
    """One direction of copies: its kernel, and its staging memory. One thread at a time uses it.

    The numbers of launches are kept until the launches are done.
    """

    def __init__(self, parts: RowParts, launcher: Launcher, ring: Ring) -> None:
        self.ring = ring
        self._launcher = launcher
        # A step stores few blocks, and about as many each time.
        self._prepare = lru_cache(_MOST_PREPARED)(lambda pages: launcher.prepare(0, (), parts.moves(pages)))
        self._lent: list[NumberBuffer] = []
        self._kept: deque[tuple[Any, list[NumberBuffer]]] = deque()

    def load(self, queue: CudaQueue, pieces: Sequence[Piece]) -> list[StagedChunk]:
        """Bring the numbers of pieces to the device, at once."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        layouts = [self._prepare(tuple(piece.numbers)) for piece in pieces]
        # In memory of this queue: what torch frees on another stream it gives away there at once, although
        # kernels that were launched there before may still use it.
        with queue.current():
            lent, staged = self._launcher.stage(layouts, [piece.numbers for piece in pieces])
        self._lent.append(lent)
        queue.run(partial(self._launcher.load, lent))
        return staged

    def start(self, queue: CudaQueue, staged: StagedChunk, rows_at: int, pack: bool) -> None:
        """Move a piece between its blocks and its rows, whose places count from an address."""
        queue.run(partial(self._launcher.start, staged, rows_at, pack))

    def keep_until(self, end: Any) -> None:
        """All that was loaded so far is done then."""
        self._kept.append((end, self._lent))
        self._lent = []


class StagedCopier(Copier):
    """See ``Copier``. ``keep`` is what owns the staging memory."""

    def __init__(
        self, parts: RowParts, device: CudaDevice, storing: Direction, restoring: Direction, keep: object
    ) -> None:
        self.staging_waits = 0
        self._parts, self._device, self._keep = parts, device, keep
        self._storing, self._restoring = storing, restoring
        self._to_host, self._from_host, self._unpacks = (device.make_queue() for _ in range(3))

    def snapshot(self, copies: Sequence[RowCopies]) -> CopyTicket:
        try:
            compute = self._device.compute()
            # While one half of the staging memory leaves, the other is filled.
            pieces = self._parts.pieces(copies, self._storing.ring.length_bytes // 2)
        except Exception as error:
            return CopyTicket(failure("snapshot", error))
        return self._move(pieces, self._storing, compute, self._to_host, pack=True)

    def mark(self) -> Any:
        return self._device.compute().record()

    def restore(self, copies: Sequence[RowCopies], after: Any = None) -> CopyTicket:
        try:
            pieces = self._parts.pieces(copies, self._restoring.ring.length_bytes // 4)
            if after is not None:
                self._unpacks.wait_for(after)
        except Exception as error:
            return CopyTicket(failure("restore", error))
        return self._move(pieces, self._restoring, self._from_host, self._unpacks, pack=False)

    def close(self) -> None:
        try:
            for queue in (self._to_host, self._from_host, self._unpacks):
                queue.record().synchronize()
        except Exception as error:
            logger.warning("copies of blocks failed before their end: %s", error)
        self._keep = None

    def _move(
        self, pieces: Sequence[Piece], way: Direction, first: CudaQueue, last: CudaQueue, pack: bool
    ) -> CopyTicket:
        """Move piece by piece, by the kernel and by copy engines, in this order to ``pack``.

        The first of the two has one queue and the second another, so that they work on two pieces at a time.
        """
        if not pieces:
            return CopyTicket()
        end, waits = None, []
        try:
            all_staged = way.load(first if pack else last, pieces)
            for piece, staged in zip(pieces, all_staged, strict=True):
                address, fence = way.ring.take(piece.total_bytes)
                host, place, length = piece.copies
                if pack:
                    if fence is not None and not fence.query():
                        self.staging_waits += 1
                        before = first.record(timed=True)
                        first.wait_for(fence)
                        waits.append((before, first.record(timed=True)))
                    way.start(first, staged, address, pack)
                    last.wait_for(first.record())
                    last.copy(address + place, host, length)
                else:
                    if fence is not None:
                        first.wait_for(fence)
                    first.copy(host, address + place, length)
                    last.wait_for(first.record())
                    way.start(last, staged, address, pack)
                end = last.record()
                way.ring.seal(end)
            way.keep_until(end)
        except Exception as error:
            text = failure("snapshot" if pack else "restore", error)
            return CopyTicket(text, _end_of_failed(way, first, last) or end, waits)
        return CopyTicket(None, end, waits)


def _end_of_failed(way: Direction, first: CudaQueue, last: CudaQueue) -> Any:
    """What ends once nothing touches blocks or rows any more for copies that failed half-way."""
    end = None
    try:
        last.wait_for(first.record())
        end = last.record()
        way.keep_until(end)
    except Exception as lost:
        # A device that takes no work does none either.
        logger.error("the device takes no more copies: %s", lost)
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
        # Each direction has its own thread, and a launcher stages for one thread only.
        launcher = Launcher(all_lanes, device, is_placed=True)
        launcher.compile(pack)
        return Direction(parts, launcher, Ring(address, ring_bytes))

    storing = make_direction(storage.data_ptr(), pack=True)
    restoring = make_direction(storage.data_ptr() + ring_bytes, pack=False)
    torch.cuda.synchronize(device)
    return StagedCopier(parts, cuda, storing, restoring, keep=storage)


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

"""A GPU without one: memory that other processes can map, and copies that are done when a test says so.

An allocation is an anonymous file, and its handle the way to it through /proc. So it can be mapped as long as
its owner lives, stays mapped when the owner is gone, and leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np

from kvconnect.engine.ipc import Allocation, UnshareableError
from kvconnect.errors import EngineError

DEVICE = "cuda:0"
LEAD = 4096  # what lies before a buffer in its allocation

_owned: list[tuple[int, int, int]] = []  # address, length, file


def _free(owned: tuple[int, int, int]) -> None:
    _owned.remove(owned)
    os.close(owned[2])


class FakeBuffer:
    """A buffer in the middle of an allocation of this process."""

    device = DEVICE

    def __init__(self, content: np.ndarray) -> None:
        size = LEAD + len(content) + LEAD
        file = os.memfd_create("fake-gpu")
        os.ftruncate(file, size)
        self._map = mmap.mmap(file, size)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)[LEAD : LEAD + len(content)]
        self._bytes[:] = content
        owned = (self.address - LEAD, size, file)
        _owned.append(owned)
        weakref.finalize(self, _free, owned)

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    def read(self) -> np.ndarray:
        return self._bytes

    def write(self, content: np.ndarray) -> None:
        self._bytes[:] = content


def on_fake_gpu(content: np.ndarray) -> FakeBuffer:
    return FakeBuffer(content)


class FakeDriver:
    """``DeviceMemory`` over such allocations. ``opened`` and ``closed`` are the handles, in order."""

    def __init__(self) -> None:
        self.opened: list[bytes] = []
        self.closed: list[bytes] = []
        self._mapped: dict[int, tuple[bytes, mmap.mmap]] = {}

    def gpu_name(self, device: int) -> str:
        return f"fake-{device}"

    def share(self, address: int, device: int) -> Allocation:
        for start, length, file in _owned:
            if start <= address < start + length:
                handle = f"/proc/{os.getpid()}/fd/{file}".encode()
                return Allocation(handle, start, length, self.gpu_name(device))
        raise UnshareableError(f"{address:#x} is not shareable")

    def open(self, allocation: Allocation, device: int) -> int:
        try:
            file = os.open(allocation.handle, os.O_RDWR)
        except OSError as error:
            raise EngineError(f"cannot be mapped: {error}") from error
        mapped = mmap.mmap(file, allocation.length_bytes)
        os.close(file)
        address = int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
        self._mapped[address] = (allocation.handle, mapped)
        self.opened.append(allocation.handle)
        return address

    def close(self, address: int, device: int) -> None:
        handle, mapped = self._mapped.pop(address)
        mapped.close()
        self.closed.append(handle)

    def reach(self, gpu: str, device: int) -> None:
        pass


class FakeCopier:
    """``Copier`` that copies when it is asked whether it is done, and not before ``held`` is False."""

    def __init__(self) -> None:
        self.held = False
        self.fails = False

    def copy(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> Callable[[], bool]:
        waiting = [(source.tolist(), target.tolist(), length.tolist())]

        def done() -> bool:
            if self.fails:
                raise RuntimeError("an illegal memory access was encountered")
            if self.held:
                return False
            while waiting:
                for here, there, size in zip(*waiting.pop(), strict=True):
                    ctypes.memmove(there, here, size)
            return True

        return done

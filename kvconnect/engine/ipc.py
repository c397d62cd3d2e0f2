"""How memory of one process on a GPU becomes an address in another: CUDA's inter-process handles.

Owns the calls of the CUDA driver. It must not know peers, batches or spans.

The driver shares whole allocations, as ``cudaMalloc`` makes them, while an address usually lies somewhere
inside one: a caching allocator cuts tensors out of large segments. So what is shared is the allocation
around an address, and whoever maps it adds the distance between the two. Memory that is put together from
physical pieces has no such handle.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import msgspec

from kvconnect.errors import EngineError

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_PEER_ACCESS_ALREADY_ENABLED = 704


class UnshareableError(EngineError):
    """Memory that another process cannot map, by how it was allocated."""


class Allocation(msgspec.Struct, frozen=True):
    """One allocation on a GPU as other processes may map it.

    ``address`` and ``length_bytes`` are its owner's; ``gpu`` names the GPU wherever it is seen from.
    """

    handle: bytes
    address: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    length_bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    gpu: str


class DeviceMemory(Protocol):
    """What the engine asks of the driver. GPUs are numbered as this process sees them."""

    def gpu_name(self, device: int) -> str:
        """A name of the GPU that is the same in every process."""
        ...

    def share(self, address: int, device: int) -> Allocation:
        """The allocation around an address. Raises ``EngineError``."""
        ...

    def open(self, allocation: Allocation, device: int) -> int:
        """Map another process's allocation for kernels of a GPU; returns its address here.

        Raises:
            EngineError: the GPU cannot reach that memory.
        """
        ...

    def close(self, address: int, device: int) -> None:
        """Undo ``open``. Nothing on the GPU may still use it."""
        ...

    def reach(self, gpu: str, device: int) -> None:
        """Let kernels of a GPU use this process's memory on another one. Raises ``EngineError``."""
        ...


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


def load_driver() -> Any:
    """The CUDA driver's library, initialised. Raises ``EngineError``."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(f"there is no CUDA driver ({error})") from error
    _check(library, library.cuInit(0), "the CUDA driver cannot start")
    library.cuMemGetAddressRange_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.cuIpcGetMemHandle.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    library.cuMemcpyDtoDAsync_v2.argtypes = [
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    return library


def peer_access_problem() -> str:
    """Why no GPU that is seen here can reach another one's memory; empty if one can, or only one is seen.

    Raises:
        EngineError: there is no CUDA driver, or it does not start.
    """
    memory = CudaMemory()
    pairs = list(itertools.permutations(range(memory.num_gpus), 2))
    if not pairs or any(memory.can_reach(here, there) for here, there in pairs):
        return ""
    return f"none of the {memory.num_gpus} GPUs can access another one's memory (nvidia-smi topo -p2p r)"


class CudaMemory:
    """``DeviceMemory`` over the CUDA driver.

    Raises:
        EngineError: there is no driver, or it does not start.
    """

    def __init__(self) -> None:
        self._library = load_driver()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self._names = [self._uuid(number) for number in range(count.value)]

    @property
    def num_gpus(self) -> int:
        """How many GPUs this process sees."""
        return len(self._names)

    def can_reach(self, device: int, other: int) -> bool:
        """Whether kernels of a GPU can use the memory of another one."""
        possible = ctypes.c_int()
        numbers = (self._device(device), self._device(other))
        self._call("cuDeviceCanAccessPeer", ctypes.byref(possible), *numbers)
        return bool(possible.value)

    def gpu_name(self, device: int) -> str:
        """See ``DeviceMemory``: the UUID, as hexadecimal digits."""
        if not 0 <= device < len(self._names):
            raise EngineError(f"there is no cuda:{device}, this process sees {len(self._names)} GPUs")
        return self._names[device]

    def share(self, address: int, device: int) -> Allocation:
        """See ``DeviceMemory``."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._current(device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            code = self._library.cuIpcGetMemHandle(ctypes.byref(handle), base.value)
        if code:
            raise UnshareableError(
                f"the memory at {address:#x} on cuda:{device} cannot be mapped by another process "
                f"({_error_name(self._library, code)}): it must be allocated by cudaMalloc. Leave "
                "expandable_segments:True and backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF "
                "(PYTORCH_ALLOC_CONF), and allocators for a sleep mode out of the cache"
            )
        return Allocation(bytes(handle), base.value, size.value, self.gpu_name(device))

    def open(self, allocation: Allocation, device: int) -> int:
        """See ``DeviceMemory``."""
        if len(allocation.handle) != _HANDLE_BYTES:
            raise EngineError(
                f"a memory handle has {len(allocation.handle)} bytes, accepted: {_HANDLE_BYTES}"
            )
        self._check_access(allocation.gpu, device)
        handle, pointer = _Handle.from_buffer_copy(allocation.handle), ctypes.c_uint64()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current(device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, _LAZY_ENABLE_PEER_ACCESS)
            # A kernel that runs past the end of a mapping would take down everything of this process.
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer.value)
        if pointer.value != base.value or size.value < allocation.length_bytes:
            self.close(pointer.value, device)
            raise EngineError(
                f"an allocation is said to have {allocation.length_bytes} bytes, but {size.value} are mapped"
            )
        return pointer.value

    def close(self, address: int, device: int) -> None:
        """See ``DeviceMemory``."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", address)

    def reach(self, gpu: str, device: int) -> None:
        """See ``DeviceMemory``."""
        other = self._check_access(gpu, device)
        if other is None or other == device:
            return
        with self._current(other):
            theirs = self._contexts[other]
        with self._current(device):
            code = self._library.cuCtxEnablePeerAccess(theirs, 0)
        if code != _PEER_ACCESS_ALREADY_ENABLED:
            _check(self._library, code, f"cuda:{device} cannot access cuda:{other}")

    def start_copy(self, source: int, target: int, length_bytes: int, stream: int, device: int) -> None:
        """Copy between addresses that a GPU can use, on a stream of it. Raises ``EngineError``."""
        with self._current(device):
            self._call("cuMemcpyDtoDAsync_v2", target, source, length_bytes, stream)

    def _check_access(self, gpu: str, device: int) -> int | None:
        """The number of the GPU of this name, or None where this process does not see it.

        Memory on a GPU that is hidden from this process can be mapped all the same; then only the attempt
        shows whether there is a way to it.
        """
        other = self._names.index(gpu) if gpu in self._names else None
        if other not in (None, device) and not self.can_reach(device, other):
            raise EngineError(
                f"cuda:{device} cannot access the memory of cuda:{other}: there is neither NVLink nor "
                "peer-to-peer PCIe between them (nvidia-smi topo -p2p r)"
            )
        return other

    def _uuid(self, number: int) -> str:
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(number))
        return bytes(uuid).hex()

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        return device

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Make the primary context of a GPU current, which is the one that torch uses."""
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: Any) -> None:
        _check(self._library, getattr(self._library, function)(*arguments), function)


def _check(library: Any, code: int, what: str) -> None:
    if code:
        raise EngineError(f"{what}: the CUDA driver says {_error_name(library, code)}")


def _error_name(library: Any, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return f"{name.value.decode() if name.value else 'error'} ({code})"

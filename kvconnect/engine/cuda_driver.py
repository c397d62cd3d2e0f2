"""Calls of the CUDA driver that torch does not offer. It must not know peers, batches or spans."""

from __future__ import annotations

import ctypes
from typing import Any

from kvconnect.errors import EngineError

_DMA_BUF_SUPPORTED = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"""


def load_driver() -> Any:
    """The initialised driver library. Raises ``EngineError``: there is no driver, or it cannot start."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(f"there is no CUDA driver ({error})") from error
    check_code(library, library.cuInit(0), "the CUDA driver cannot start")
    return library


def allocation_around(address: int, device: int) -> tuple[int, int]:
    """Address and length in bytes of the GPU allocation that contains an address.

    The allocation may be larger than a tensor, since caching allocators divide allocations. Raises
    ``EngineError``: the address is in no allocation of this process.
    """
    library = load_driver()
    number, context = ctypes.c_int(), ctypes.c_void_p()
    base, length_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    check_code(library, library.cuDeviceGet(ctypes.byref(number), device), f"there is no cuda:{device}")
    # The primary context is the one that torch uses.
    code = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    check_code(library, code, f"cuda:{device} has no context")
    library.cuCtxPushCurrent_v2(context)
    try:
        code = library.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(length_bytes), ctypes.c_uint64(address)
        )
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(context))
        library.cuDevicePrimaryCtxRelease_v2(number)
    check_code(library, code, f"no allocation on cuda:{device} is known at {address:#x}")
    return base.value, length_bytes.value


def check_code(library: Any, code: int, what: str) -> None:
    """Raises ``EngineError``: the driver's code is not success. ``what`` begins the text."""
    if code:
        name = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        text = name.value.decode() if name.value else "error"
        raise EngineError(f"{what}: the CUDA driver returned {text} ({code})")


def supports_dmabuf() -> bool:
    """Whether RDMA devices can use the memory of this process's GPUs without a kernel module."""
    value = ctypes.c_int()
    try:
        library = load_driver()
        code = library.cuDeviceGetAttribute(ctypes.byref(value), _DMA_BUF_SUPPORTED, 0)
        check_code(library, code, "the CUDA driver reports no DMA-BUF")
    except EngineError:
        return False
    return bool(value.value)

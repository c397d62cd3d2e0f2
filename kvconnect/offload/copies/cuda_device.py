"""A GPU beside host memory: pinning, streams, and copies between the two by the GPU's copy engines.

The module owns the CUDA driver calls that torch does not offer. It must not know rows or blocks.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from kvconnect.engine.cuda_driver import check_code, load_driver
from kvconnect.pack.page_lanes import Column

logger = logging.getLogger(__name__)

_REGISTER_PORTABLE, _REGISTER_DEVICEMAP = 1, 2
_ACCESS_IN_STREAM_ORDER = 1
# Up to so many copies are begun one by one, since the batch call has a cost of its own.
_FEW = 4


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes`` of the driver; each hint is a location's type and id."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaDevice:
    """One GPU. All but ``compute`` and ``make_queue`` raise ``EngineError`` where the driver refuses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library = load_driver()
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        # Drivers from CUDA 13 on have it too, beside a later form.
        self._has_batches = hasattr(self._library, "cuMemcpyBatchAsync")
        if not self._has_batches:
            logger.info("copies between host and GPU are begun one by one: this CUDA driver is before 12.8")

    def compute(self) -> CudaQueue:
        """The calling thread's current stream, which runs the model's steps."""
        return CudaQueue(torch.cuda.current_stream(self._device), self, True)

    def make_queue(self) -> CudaQueue:
        """A new stream."""
        return CudaQueue(torch.cuda.Stream(self._device), self, False)  # type: ignore[no-untyped-call]

    def pin(self, address: int, length_bytes: int) -> None:
        """Page-lock host memory and map it, so that devices can read and write it."""
        flags = ctypes.c_uint(_REGISTER_PORTABLE | _REGISTER_DEVICEMAP)
        with self._current():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), flags)

    def is_mapped(self, address: int) -> bool:
        """Whether kernels reach pinned memory at its host address."""
        found = ctypes.c_uint64()
        place = ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0)
        with self._current():
            self._call("cuMemHostGetDevicePointer_v2", *place)
        return found.value == address

    def unpin(self, address: int) -> None:
        """Undo ``pin``. The memory must be quiescent."""
        with self._current():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy(self, source: Column, target: Column, length: Column, stream: int) -> None:
        """Begin copies between host and GPU on a stream, in any order; columns of addresses and bytes."""
        with self._current():
            if self._has_batches and len(length) > _FEW:
                self._copy_batch(source, target, length, stream)
                return
            columns = (column.tolist() for column in (target, source, length))
            for there, here, size in zip(*columns, strict=True):
                self._call(
                    "cuMemcpyAsync",
                    ctypes.c_uint64(there),
                    ctypes.c_uint64(here),
                    ctypes.c_size_t(size),
                    ctypes.c_void_p(stream),
                )

    def _copy_batch(self, source: Column, target: Column, length: Column, stream: int) -> None:
        columns = [np.ascontiguousarray(column, dtype=np.int64) for column in (target, source, length)]
        attributes = _Attributes(source_access_order=_ACCESS_IN_STREAM_ORDER)
        from_first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._call(
            "cuMemcpyBatchAsync",
            *(ctypes.c_void_p(column.ctypes.data) for column in columns),
            ctypes.c_size_t(len(length)),
            ctypes.byref(attributes),
            ctypes.byref(from_first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the GPU's primary context current, which is the one that torch uses."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: Any) -> None:
        check_code(self._library, getattr(self._library, function)(*arguments), function)


class CudaQueue:
    """A CUDA stream: its work runs in order. ``is_current``: it is the calling thread's current stream."""

    def __init__(self, stream: torch.cuda.Stream, device: CudaDevice, is_current: bool) -> None:
        self._stream, self._device, self._is_current = stream, device, is_current

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the stream is current, so that torch allocates memory for this stream."""
        return nullcontext() if self._is_current else torch.cuda.stream(self._stream)

    def run(self, launch: Callable[[], None]) -> None:
        """Call ``launch`` while the stream is current, so that its work goes to this stream."""
        with self.current():
            launch()

    def copy(self, source: Column, target: Column, length: Column) -> None:
        """Copy ranges of memory by the device's copy engines, in any order."""
        self._device.copy(source, target, length, self._stream.cuda_stream)

    def record(self, timed: bool = False) -> Any:
        """An event after all work given to the stream so far."""
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait_for(self, event: Any) -> None:
        """Make work given from now on wait for an event of any stream."""
        self._stream.wait_event(event)

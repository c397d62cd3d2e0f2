"""The device that a benchmark runs on, and what a call takes there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.options import DEVICES, option
from kvconnect.errors import ConfigError

_RUNS = 50
_WARM_UP = 5


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_option() -> Any:
    """Where a benchmark runs that needs one device."""
    return option(default_device(), "cpu or cuda; left out, the GPU if there is one.", accepted=DEVICES)


def check_device(device: str) -> None:
    """Raise ``ConfigError`` if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; accepted: cpu")


def use_device(device: str) -> None:
    """Make a device current for this thread; nothing to do for a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


def wait_for_device(device: str) -> None:
    """Wait for all that was launched on a device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def run_seconds(
    call: Callable[[], object], runs: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Seconds of the host in each call, the device idle before it; ``before`` is not counted."""
    times = []
    for _ in range(runs):
        before()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def host_us(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median microseconds of the host in a call, as ``run_seconds`` counts them."""
    return statistics.median(run_seconds(call, _WARM_UP + _RUNS, before)[_WARM_UP:]) * 1e6


def device_us(call: Callable[[], object], device: str) -> float:
    """Median microseconds of a call on the device; on a CPU by the clock."""
    if device == "cpu":
        return host_us(call)
    for _ in range(_WARM_UP):
        call()
    times: list[float] = []
    for _ in range(_RUNS):
        # The stream is kept busy meanwhile, as in a serving step: what is measured is the device, not
        # how fast this thread launches.
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)

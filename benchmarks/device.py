"""The device that a benchmark runs on, and what a call takes there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from kvconnect.errors import ConfigError

_RUNS = 50
_WARM_UP = 5


def check_device(device: str) -> None:
    """Raise ``ConfigError`` if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; accepted: cpu")


def use_device(device: str) -> None:
    """Make a device current for this thread; nothing to do for a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


def wait_for_device(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def run_seconds(call: Callable[[], object], runs: int) -> list[float]:
    """Seconds of the host in each call, the device idle before it."""
    times = []
    for _ in range(runs):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def device_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call on the GPU."""
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

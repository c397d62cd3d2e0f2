"""A benchmark of the disk tier: how near it comes to plain sequential I/O of as many bytes, measured beside.

Before each read of either kind the kernel is asked to forget the files, so that they come from the disk; how
far that goes is up to the disk, which may have a memory of its own. Writes of either kind begin when nothing
else waits to be written, and end when their bytes are synced.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.options import Options as BaseOptions
from benchmarks.options import option
from benchmarks.page_cache import drop_pages
from benchmarks.report import Report
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.offload.disk.disk_tier import DiskTier
from kvconnect.offload.disk.folder import FolderOwner
from kvconnect.offload.tier import Kind, TierRow

_NAMESPACE = "be" * 32
_PLAIN_BYTES = 8 << 20
_JOB_ROWS = 64
_HANG_S = 600.0
_SMALL_BYTES = 4096


@dataclass(frozen=True)
class Options(BaseOptions):
    """What is measured, and where."""

    path: str = option("", "A folder on the disk that is meant; left out, one for temporary files.")
    record_bytes: tuple[int, ...] = option((1 << 20, 64 << 10), "Bytes of a row (repeatable).", least=1)
    total_bytes: int = option(1 << 30, "Bytes written and read each time.", least=1)
    records: int = option(100_000, "Records to recover; 0 for none.", least=0)
    repeat: int = option(3, "Runs of each, of which the median counts.", least=1)


def bench_disk(options: Options, report: Report) -> None:
    """Time writes, reads and recovery in a folder below ``path``.

    Raises:
        ConfigError: the path is no folder, or there is too little room.
    """
    path = options.path
    if path and not Path(path).is_dir():
        raise ConfigError(f"--path is {path!r}; accepted: a folder that is there")
    with tempfile.TemporaryDirectory(prefix="kvconnect-bench-", dir=path or None) as name:
        folder = Path(name)
        room = os.statvfs(folder)
        free_bytes = room.f_bavail * room.f_frsize
        wanted_bytes = max(3 * options.total_bytes, 2 * options.records * _SMALL_BYTES)
        if free_bytes < wanted_bytes:
            raise ConfigError(f"{folder} has {free_bytes} bytes free; this takes {wanted_bytes}")
        for record_bytes in options.record_bytes:
            report.add(_time_records(folder, record_bytes, options.total_bytes, options.repeat))
        if options.records:
            report.add(_time_recovery(folder, options.records), "disk recovery")


def _time_records(folder: Path, record_bytes: int, total_bytes: int, repeat: int) -> dict[str, float]:
    """Writes and reads of records of one length, medians, in MB (10^6 bytes) a second.

    ``written`` is until all rows were reported written, ``synced`` until they are on the disk; ``cached`` is
    a read from the kernel's memory.
    """
    count = max(1, total_bytes // record_bytes)
    total_bytes = count * record_bytes
    memory = np.frombuffer(np.random.default_rng(0).bytes(total_bytes), dtype=np.uint8).copy()
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeat):
        taken["plain_write"].append(_plain_write(folder, memory))
        taken["plain_read"].append(_plain_read(folder, memory, True))
        taken["plain_cached"].append(_plain_read(folder, memory, False))
        _remove_all(folder)
        written_s, synced_s = _tier_write(folder, memory, record_bytes)
        taken["written"].append(written_s)
        taken["synced"].append(synced_s)
        taken["read"].append(_tier_read(folder, memory, record_bytes, True))
        taken["cached"].append(_tier_read(folder, memory, record_bytes, False))
        _remove_all(folder)
    rate = {what: total_bytes / 1e6 / statistics.median(times) for what, times in taken.items()}
    return {
        "record_bytes": record_bytes,
        "total_bytes": total_bytes,
        "plain_write_mb_per_s": round(rate["plain_write"], 1),
        "written_mb_per_s": round(rate["written"], 1),
        "synced_mb_per_s": round(rate["synced"], 1),
        "synced_of_plain": round(rate["synced"] / rate["plain_write"], 3),
        "plain_read_mb_per_s": round(rate["plain_read"], 1),
        "read_mb_per_s": round(rate["read"], 1),
        "read_of_plain": round(rate["read"] / rate["plain_read"], 3),
        "plain_cached_mb_per_s": round(rate["plain_cached"], 1),
        "cached_mb_per_s": round(rate["cached"], 1),
    }


# ---- plain


def _plain_write(folder: Path, memory: np.ndarray) -> float:
    os.sync()
    start = time.perf_counter()
    file = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    view = memory.data
    offset = 0
    while offset < len(view):
        offset += os.pwrite(file, view[offset : offset + _PLAIN_BYTES], offset)
    os.fsync(file)
    os.close(file)
    return time.perf_counter() - start


def _plain_read(folder: Path, memory: np.ndarray, is_forgotten: bool) -> float:
    into = np.zeros_like(memory).data
    if is_forgotten:
        drop_pages(folder)
    start = time.perf_counter()
    file = os.open(folder / "plain", os.O_RDONLY)
    offset = 0
    while offset < len(into):
        offset += os.preadv(file, [into[offset : offset + _PLAIN_BYTES]], offset)
    os.close(file)
    return time.perf_counter() - start


# ---- the tier


def _open(folder: Path, limit_bytes: int) -> DiskTier:
    tier = DiskTier(folder / "tier", FolderOwner(_NAMESPACE), limit_bytes, max_queued_bytes=limit_bytes)
    if not tier.recovered.wait(_HANG_S):
        raise KVConnectError("the disk tier is not recovered after ten minutes")
    return tier


def _rows(memory: np.ndarray, record_bytes: int) -> list[TierRow]:
    view = memory.data
    return [
        TierRow(0, start.to_bytes(32, "little"), view[start : start + record_bytes])
        for start in range(0, len(view), record_bytes)
    ]


def _run(tier: DiskTier, kind: Kind, rows: Sequence[TierRow]) -> None:
    """All rows in jobs, as a worker gives them."""
    call = tier.write if kind == "write" else tier.read
    jobs = set()
    for start in range(0, len(rows), _JOB_ROWS):
        jobs.add(start)
        call(start, rows[start : start + _JOB_ROWS])
    deadline = time.monotonic() + _HANG_S
    while jobs:
        told = tier.poll().done.get(kind, {})
        if any(told.values()) or time.monotonic() > deadline:
            raise KVConnectError(f"rows are missing: {tier.state()}")
        jobs -= told.keys()
        time.sleep(0.0005)


def _tier_write(folder: Path, memory: np.ndarray, record_bytes: int) -> tuple[float, float]:
    rows = _rows(memory, record_bytes)
    tier = _open(folder, 2 * len(memory) + (64 << 20) + 16384 * len(rows))
    os.sync()
    start = time.perf_counter()
    _run(tier, "write", rows)
    written_s = time.perf_counter() - start
    tier.close()
    os.sync()
    return written_s, time.perf_counter() - start


def _tier_read(folder: Path, memory: np.ndarray, record_bytes: int, is_forgotten: bool) -> float:
    into = np.zeros_like(memory)
    rows = _rows(into, record_bytes)
    tier = _open(folder, 2 * len(memory) + (64 << 20) + 16384 * len(rows))
    tier.poll()
    if is_forgotten:
        drop_pages(tier.path)
    start = time.perf_counter()
    _run(tier, "read", rows)
    taken_s = time.perf_counter() - start
    tier.close()
    if not np.array_equal(into, memory):
        raise KVConnectError("what was read is not what was written")
    return taken_s


def _time_recovery(folder: Path, records: int) -> dict[str, float]:
    """Seconds to find what was kept, after the kernel forgot the files and when it has them."""
    limit_bytes = 4 * records * _SMALL_BYTES + (64 << 20)
    memory = np.zeros(_SMALL_BYTES, dtype=np.uint8)
    rows = [TierRow(0, index.to_bytes(32, "little"), memory.data) for index in range(records)]
    tier = _open(folder, limit_bytes)
    _run(tier, "write", rows)
    tier.close()
    times = []
    for is_forgotten in (True, False):
        if is_forgotten:
            drop_pages(tier.path)
        start = time.perf_counter()
        tier = _open(folder, limit_bytes)
        times.append(time.perf_counter() - start)
        found = len(tier.poll().added)
        tier.close()
        if found != records:
            raise KVConnectError(f"{found} of {records} records were found")
    return {
        "records": records,
        "record_bytes": _SMALL_BYTES,
        "forgotten_s": round(times[0], 3),
        "cached_s": round(times[1], 3),
    }


def _remove_all(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()

"""SIGKILL of a process that writes to the disk tier as fast as it can, at any moment, again and again."""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.faults import disk_rows
from tests.faults.reports import RowReport, progress

_LIMITS_BYTES = (4 << 20, 8 << 20, 16 << 20)
_LONGEST_BYTES = 128 << 10
_ROWS_PER_JOB = 8
_LATEST_KILL_S = 0.1
_WRITING_SHARE = 0.8
"""The part of the kills that come after the first write; the others may hit the start as well."""

_FIRST_WRITE_TIMEOUT_S = 20.0
_NUMBERS_PER_LIFE = 1 << 32
_ACKNOWLEDGED = struct.Struct("<Q")


@dataclass
class DiskKillReport(RowReport):
    """``torn`` are kills that left a record half written; ``acknowledged`` are the rows that lives said were
    written.
    """

    kills: int = 0
    wrote: int = 0
    torn: int = 0
    corrupt: int = 0
    acknowledged: int = 0
    most_of_bound: float = 0.0
    slowest_open_s: float = 0.0


def run_disk_kills(path: Path, kills: int, *, seed: int = 0) -> DiskKillReport:
    """Let a process write to a folder until it is killed, ``kills`` times; look at what is left each time.

    Every life has a bound of its own. Must be called in a process without other threads: it forks.
    """
    report = DiskKillReport()
    rng = random.Random(seed)
    before_bytes = 0
    for life in range(kills):
        limit_bytes = rng.choice(_LIMITS_BYTES)
        most_bytes, acknowledged = _live(path, life, limit_bytes, rng)
        report.kills += 1
        report.wrote += bool(acknowledged)
        # A smaller bound than the life before it had holds from the moment that the folder is opened.
        allowed_bytes = max(limit_bytes, before_bytes)
        before_bytes = limit_bytes
        report.most_of_bound = max(report.most_of_bound, most_bytes / allowed_bytes)
        if most_bytes > allowed_bytes:
            report.problems.append(f"life {life}: {most_bytes} bytes of {allowed_bytes}")
        _look(path, life, limit_bytes, acknowledged, report)
        if (life + 1) % 50 == 0:
            progress(
                f"{life + 1} of {kills}: {report.torn} torn, {report.served} served, {report.wrong} wrong"
            )
    return report


def _live(path: Path, life: int, limit_bytes: int, rng: random.Random) -> tuple[int, list[int]]:
    """One life and its end; the most bytes that were seen, and the numbers that it said were written."""
    reading, writing = os.pipe()
    seed = rng.random()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _write_until_killed(path, life, limit_bytes, writing, random.Random(seed))
        finally:
            os._exit(1)
    os.close(writing)
    if rng.random() < _WRITING_SHARE:
        select.select([reading], [], [], _FIRST_WRITE_TIMEOUT_S)
    end = time.monotonic() + rng.uniform(0.0, _LATEST_KILL_S)
    most_bytes = 0
    while time.monotonic() < end:
        most_bytes = max(most_bytes, disk_rows.taken_bytes(path))
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    _pid, status = os.waitpid(child, 0)
    most_bytes = max(most_bytes, disk_rows.taken_bytes(path))
    with open(reading, "rb") as pipe:
        told = pipe.read()
    whole = len(told) // _ACKNOWLEDGED.size * _ACKNOWLEDGED.size
    numbers = [number for (number,) in _ACKNOWLEDGED.iter_unpack(told[:whole])]
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"life {life} ended by itself: {status}")
    return most_bytes, numbers


def _write_until_killed(path: Path, life: int, limit_bytes: int, pipe: int, rng: random.Random) -> None:
    tier = disk_rows.open_tier(path, limit_bytes)
    number = (life + 1) * _NUMBERS_PER_LIFE
    rows = disk_rows.numbered_rows(range(number, number + _ROWS_PER_JOB), _LONGEST_BYTES)
    while True:
        numbers = range(number, number + _ROWS_PER_JOB)
        number += _ROWS_PER_JOB
        tier.write(1, rows)
        # The next ones are made while these are written, so that most kills hit a write.
        rows = disk_rows.numbered_rows(range(number, number + _ROWS_PER_JOB), _LONGEST_BYTES)
        failed, _failures = disk_rows.finish(tier, "write", 1)
        if failed:
            raise RuntimeError(f"{len(failed)} rows were not kept")
        os.write(pipe, b"".join(_ACKNOWLEDGED.pack(one) for one in numbers))
        # What is read now and then makes room later.
        if rng.random() < 0.3:
            some = rng.sample(numbers, 4)
            _right, wrong, _failures = disk_rows.served(tier, some, _LONGEST_BYTES)
            if wrong:
                raise RuntimeError(f"rows {wrong} are wrong")


def _look(path: Path, life: int, limit_bytes: int, acknowledged: list[int], report: DiskKillReport) -> None:
    """Open what a life left, and read all of it."""
    start = time.monotonic()
    tier = disk_rows.open_tier(path, limit_bytes)
    try:
        if not tier.recovered.wait(60.0):
            report.problems.append(f"life {life}: not recovered after a minute")
            return
        report.slowest_open_s = max(report.slowest_open_s, time.monotonic() - start)
        taken_bytes = disk_rows.taken_bytes(path)
        if taken_bytes > limit_bytes:
            report.problems.append(f"after life {life}: {taken_bytes} bytes of {limit_bytes}")
        news = tier.poll()
        there = sorted(disk_rows.number_of(content) for content in news.added)
        right, wrong, failures = disk_rows.served(tier, there, _LONGEST_BYTES)
        failures.update(news.failures)
        report.failures = dict(Counter(report.failures) + failures)
        report.torn += failures["disk_torn"]
        report.corrupt += len(there) - len(right) - len(wrong)
        report.acknowledged += len(acknowledged)
        report.served += len(right)
        report.wrong += len(wrong)
        if wrong:
            report.problems.append(f"after life {life}: rows {sorted(wrong)[:5]} are wrong")
        lost = set(_must_be_there(acknowledged, limit_bytes)) - right
        if lost:
            report.problems.append(f"after life {life}: rows {sorted(lost)[:5]} were written and are lost")
    finally:
        if not tier.close():
            report.problems.append(f"after life {life}: the tier does not close")


def _must_be_there(acknowledged: list[int], limit_bytes: int) -> list[int]:
    """The youngest of the rows that were written, as far as nothing can have made them go.

    A job that was not acknowledged may have been written behind them, and what was read besides.
    """
    most_bytes = limit_bytes // 3 - _ROWS_PER_JOB * _LONGEST_BYTES
    found = []
    length_bytes = 0
    for number in reversed(acknowledged):
        length_bytes += disk_rows.length_of(number, _LONGEST_BYTES)
        if length_bytes > most_bytes:
            break
        found.append(number)
    return found

"""A disk tier whose process is killed while it writes.

Rows have bytes that follow from their number, so that whoever reads one knows whether it is right.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvconnect.offload.disk.disk_tier import DiskTier
from kvconnect.offload.disk.folder import FolderOwner
from kvconnect.offload.tier import Content
from tests.faults.stage import Report, progress
from tests.offload.tier_suite import TierDriver, rows_of, until

NAMESPACE = hashlib.sha256(b"python -m tests.faults disk").hexdigest()
_WORD = np.uint64(0x9E3779B97F4A7C15)
_RUN_S = 60.0
_MAX_QUEUED_BYTES = 64 << 20


def open_tier(path: Path, limit_bytes: int, namespace: str = NAMESPACE) -> TierDriver:
    """A tier, which recovers what is there, to be driven."""
    return TierDriver(DiskTier(path, FolderOwner(namespace), limit_bytes, max_queued_bytes=_MAX_QUEUED_BYTES))


def content_of(number: int) -> Content:
    """What a numbered row is called."""
    return (number % 3, number.to_bytes(8, "little") + hashlib.sha256(number.to_bytes(8, "little")).digest())


def number_of(content: Content) -> int:
    return int.from_bytes(content[1][:8], "little")


def length_of(number: int, longest: int) -> int:
    """How long a numbered row is: one of sixteen lengths, so that many are as long as another."""
    return longest // 16 * (1 + (number * 2654435761 >> 16) % 16)


def bytes_of(number: int, longest: int) -> bytes:
    """A row: no word of it is in another row, or elsewhere in the same."""
    count = length_of(number, longest) // 8
    words = np.arange(count, dtype=np.uint64) + (np.uint64(number) << np.uint64(20))
    return (words * _WORD).tobytes()


def numbered_rows(numbers: Iterable[int], longest: int) -> dict[Content, bytes]:
    return {content_of(number): bytes_of(number, longest) for number in numbers}


def served(driver: TierDriver, numbers: Iterable[int], longest: int) -> tuple[set[int], set[int]]:
    """Read numbered rows: those that are right, and those that are wrong."""
    found = driver.read({content_of(number): length_of(number, longest) for number in numbers})
    right: set[int] = set()
    wrong: set[int] = set()
    for content, row in found.items():
        number = number_of(content)
        (right if row == bytes_of(number, longest) else wrong).add(number)
    return right, wrong


def taken_bytes(path: Path) -> int:
    """What everything below a path takes now: the larger of what files say and what the disk says."""
    total = 0
    for folder, _names, files in os.walk(path):
        for name in files:
            try:
                facts = os.stat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            total += max(facts.st_size, facts.st_blocks * 512)
    return total


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
class DiskKillReport(Report):
    """``torn`` are kills that left a record half written.

    ``served`` are the rows that were read afterwards, ``wrong`` those of them that are not what was written,
    ``failures`` what the tier counted, by reason.
    """

    kills: int = 0
    torn: int = 0
    served: int = 0
    wrong: int = 0
    failures: dict[str, int] = field(default_factory=dict)


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
        # A smaller bound than the life before it had holds from the moment that the folder is opened.
        allowed_bytes = max(limit_bytes, before_bytes)
        before_bytes = limit_bytes
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
        most_bytes = max(most_bytes, taken_bytes(path))
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    _pid, status = os.waitpid(child, 0)
    most_bytes = max(most_bytes, taken_bytes(path))
    with open(reading, "rb") as pipe:
        told = pipe.read()
    whole = len(told) // _ACKNOWLEDGED.size * _ACKNOWLEDGED.size
    numbers = [number for (number,) in _ACKNOWLEDGED.iter_unpack(told[:whole])]
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"life {life} ended by itself: {status}")
    return most_bytes, numbers


def _write_until_killed(path: Path, life: int, limit_bytes: int, pipe: int, rng: random.Random) -> None:
    driver = open_tier(path, limit_bytes)
    number = (life + 1) * _NUMBERS_PER_LIFE
    rows = rows_of(numbered_rows(range(number, number + _ROWS_PER_JOB), _LONGEST_BYTES))
    while True:
        numbers = range(number, number + _ROWS_PER_JOB)
        number += _ROWS_PER_JOB
        call = driver.begin("write", rows)
        # The next ones are made while these are written, so that most kills hit a write.
        rows = rows_of(numbered_rows(range(number, number + _ROWS_PER_JOB), _LONGEST_BYTES))
        if failed := driver.wait(call):
            raise RuntimeError(f"{len(failed)} rows were not kept")
        os.write(pipe, b"".join(_ACKNOWLEDGED.pack(one) for one in numbers))
        # What is read now and then makes room later.
        if rng.random() < 0.3:
            some = rng.sample(numbers, 4)
            _right, wrong = served(driver, some, _LONGEST_BYTES)
            if wrong:
                raise RuntimeError(f"rows {wrong} are wrong")


def _look(path: Path, life: int, limit_bytes: int, acknowledged: list[int], report: DiskKillReport) -> None:
    """Open what a life left, and read all of it."""
    driver = open_tier(path, limit_bytes)
    try:
        until(lambda: not driver.tier.state()["recovering"], f"life {life}: not recovered", _RUN_S)
        if (taken := taken_bytes(path)) > limit_bytes:
            report.problems.append(f"after life {life}: {taken} bytes of {limit_bytes}")
        driver.poll()
        right, wrong = served(driver, sorted(map(number_of, driver.index)), _LONGEST_BYTES)
        report.failures = dict(Counter(report.failures) + Counter(driver.failures))
        report.torn += driver.failures.get("disk_torn", 0)
        report.served += len(right)
        report.wrong += len(wrong)
        if wrong:
            report.problems.append(f"after life {life}: rows {sorted(wrong)[:5]} are wrong")
        lost = set(_must_be_there(acknowledged, limit_bytes)) - right
        if lost:
            report.problems.append(f"after life {life}: rows {sorted(lost)[:5]} were written and are lost")
    finally:
        if not driver.tier.close():
            report.problems.append(f"after life {life}: the tier does not close")


def _must_be_there(acknowledged: list[int], limit_bytes: int) -> list[int]:
    """The youngest of the rows that were written, as far as nothing can have made them go.

    A job that was not acknowledged may have been written behind them, and what was read besides.
    """
    most_bytes = limit_bytes // 3 - _ROWS_PER_JOB * _LONGEST_BYTES
    found = []
    length_bytes = 0
    for number in reversed(acknowledged):
        length_bytes += length_of(number, _LONGEST_BYTES)
        if length_bytes > most_bytes:
            break
        found.append(number)
    return found

"""A disk tier whose process is killed while it writes, and whose files a disk or another program damages.

Rows have bytes that follow from their number, so that whoever reads one knows whether it is right.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvconnect.offload.disk.disk_tier import DiskTier
from kvconnect.offload.disk.folder import FolderOwner, row_name
from kvconnect.offload.record import HEADER_BYTES
from kvconnect.offload.tier import Content
from tests.faults.stage import RowReport, progress
from tests.offload.tier_suite import TierDriver, rows_of, until

NAMESPACE = hashlib.sha256(b"python -m tests.faults disk").hexdigest()
OTHER_NAMESPACE = hashlib.sha256(b"another").hexdigest()
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
class DiskKillReport(RowReport):
    """``torn`` are kills that left a record half written."""

    kills: int = 0
    torn: int = 0


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


_LONGEST_DAMAGED_BYTES = 8 << 10
_LIMIT_BYTES = 256 << 20
_PAGE_BYTES = 4096
_DAMAGED_ROWS_PER_JOB = 1000

Spans = dict[Path, tuple[int, int]]
"""By file: the number and the whole length of its record."""


@dataclass
class DamageReport(RowReport):
    """``damaged`` are the records that were, ``missed`` the rows that were not served.

    ``when`` is ``closed`` if a tier was opened afterwards, ``open`` if one knew the files before.
    """

    kind: str
    when: str
    damaged: int = 0
    missed: int = 0


def run_damage(path: Path, records: int, *, seed: int = 0) -> list[DamageReport]:
    """Damage ``records`` records in every way, at rest and under an open tier, and read all of them."""
    whole = path / "whole"
    numbers = range(1, records + 1)
    spans = _write(whole, numbers, NAMESPACE)
    _write(path / "other", numbers, OTHER_NAMESPACE)
    reports = []
    for kind, damage in KINDS.items():
        for when in ("closed", "open"):
            copy = path / "copy"
            shutil.copytree(whole, copy)
            here = {copy / file.relative_to(whole): record for file, record in spans.items()}
            driver = _open(copy) if when == "open" else None
            damaged = damage(here, random.Random(f"{seed} {kind} {when}"))
            reports.append(DamageReport(kind, when, len(damaged)))
            _read(driver or _open(copy), numbers, damaged, reports[-1])
            shutil.rmtree(copy)
            progress(f"{kind}, {when}: {reports[-1].served} served, {reports[-1].wrong} wrong")
    return reports


def _read(driver: TierDriver, numbers: Sequence[int], damaged: set[int], report: DamageReport) -> None:
    """Read all rows, and close the tier."""
    # What was wrong once is not there the second time.
    _right, wrong = served(driver, numbers, _LONGEST_DAMAGED_BYTES)
    report.wrong = len(wrong)
    right, wrong = served(driver, numbers, _LONGEST_DAMAGED_BYTES)
    report.wrong += len(wrong)
    report.failures = driver.failures
    report.served = len(right)
    report.missed = len(numbers) - len(right) - len(wrong)
    if report.wrong:
        report.problems.append(f"{report.wrong} rows that are wrong were served")
    if damaged & right:
        report.problems.append(f"{len(damaged & right)} damaged records were served")
    if damaged and not report.failures:
        report.problems.append("nothing was counted")
    if not driver.tier.close():
        report.problems.append("the tier does not close")


def _edited(spans: Spans) -> Iterator[tuple[bytearray, int, int]]:
    """The bytes of every file, written back when the next ones are asked for, its number and its length."""
    for file, (number, length) in spans.items():
        data = bytearray(file.read_bytes())
        yield data, number, length
        _overwrite(file, data)


def _twins(spans: Spans) -> Iterator[tuple[Path, Path]]:
    """Files of equal length, two at a time."""
    by_length: dict[int, Path] = {}
    for file, (_number, length) in spans.items():
        if length in by_length:
            yield by_length.pop(length), file
        else:
            by_length[length] = file


# ---- ways of damage: each returns the records that are not whole any more


def _flip(spans: Spans, rng: random.Random, *, share: float, first: int) -> set[int]:
    """One bit of some records, of the bytes from ``first`` on."""
    damaged = set()
    for data, number, length in _edited(spans):
        if rng.random() < share:
            data[rng.randrange(first, length)] ^= 1 << rng.randrange(8)
            damaged.add(number)
    return damaged


def _truncate(spans: Spans, rng: random.Random) -> set[int]:
    """Every file, somewhere."""
    for data, _number, length in _edited(spans):
        del data[rng.randrange(length) :]
    return _numbers(spans)


def _swap(spans: Spans, _rng: random.Random, *, kept: int) -> set[int]:
    """Records in each other's files, but for their first bytes."""
    damaged = set()
    for first, second in _twins(spans):
        here, there = first.read_bytes(), second.read_bytes()
        _overwrite(first, here[:kept] + there[kept:])
        _overwrite(second, there[:kept] + here[kept:])
        damaged |= {spans[first][0], spans[second][0]}
    return damaged


def _zero_pages(spans: Spans, rng: random.Random) -> set[int]:
    """Pages of the files, as a disk leaves them that lost its power."""
    damaged = set()
    for data, number, length in _edited(spans):
        for start in range(0, length, _PAGE_BYTES):
            if rng.random() < 0.1:
                data[start : start + _PAGE_BYTES] = bytes(len(data[start : start + _PAGE_BYTES]))
                damaged.add(number)
    return damaged


def _foreign(spans: Spans, _rng: random.Random) -> set[int]:
    """The same rows of another namespace, in the places of our own."""
    for file in spans:
        (other,) = file.parents[2].glob(f"other/*/{file.name}")
        _overwrite(file, other.read_bytes())
    return _numbers(spans)


def _append(spans: Spans, rng: random.Random) -> set[int]:
    """Bytes behind the row: garbage with a piece of the record, or the header and a row that is another's."""
    for data, _number, _length in _edited(spans):
        garbage = rng.randbytes(rng.randrange(1, 5000))
        if rng.random() < 0.5:
            data += garbage + data[rng.randrange(len(data)) :]
        else:
            data += data[:HEADER_BYTES] + garbage
    return set()


def _shift(spans: Spans, rng: random.Random) -> set[int]:
    """Bytes taken out of or put into every file."""
    for data, _number, length in _edited(spans):
        at = rng.randrange(length)
        if rng.random() < 0.5:
            data[at:at] = rng.randbytes(rng.randrange(1, 500))
        else:
            del data[at : at + rng.randrange(1, 500)]
    return _numbers(spans)


KINDS: dict[str, Callable[[Spans, random.Random], set[int]]] = {
    "flipped": partial(_flip, share=1.0, first=0),
    "flipped rows": partial(_flip, share=0.3, first=HEADER_BYTES),
    "truncated": _truncate,
    "swapped": partial(_swap, kept=0),
    "swapped rows": partial(_swap, kept=HEADER_BYTES),
    "zeroed pages": _zero_pages,
    "foreign": _foreign,
    "appended": _append,
    "shifted": _shift,
}


def _open(path: Path, namespace: str = NAMESPACE) -> TierDriver:
    driver = open_tier(path, _LIMIT_BYTES, namespace)
    until(lambda: not driver.tier.state()["recovering"], f"{path} is not recovered", _RUN_S)
    return driver


def _write(path: Path, numbers: Sequence[int], namespace: str) -> Spans:
    """Write rows, and say where they are."""
    driver = _open(path, namespace)
    for start in range(0, len(numbers), _DAMAGED_ROWS_PER_JOB):
        some = numbers[start : start + _DAMAGED_ROWS_PER_JOB]
        assert not driver.write(numbered_rows(some, _LONGEST_DAMAGED_BYTES))
    driver.tier.close()
    (folder,) = path.iterdir()
    return {
        folder / row_name(content_of(number)): (
            number,
            HEADER_BYTES + length_of(number, _LONGEST_DAMAGED_BYTES),
        )
        for number in numbers
    }


def _overwrite(file: Path, data: bytes | bytearray) -> None:
    """In place: a process that has it open sees it."""
    with open(file, "r+b") as there:
        there.write(data)
        there.truncate()


def _numbers(spans: Spans) -> set[int]:
    return {number for number, _length in spans.values()}

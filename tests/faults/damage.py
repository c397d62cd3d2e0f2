"""What a disk or another program may do to the files of the disk tier, and what it serves afterwards."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvconnect.offload.disk.disk_tier import DiskTier
from kvconnect.offload.disk.folder import row_name
from kvconnect.offload.record import HEADER_BYTES
from tests.faults import disk_rows
from tests.faults.reports import RowReport, progress

_LONGEST_BYTES = 8 << 10
_LIMIT_BYTES = 256 << 20
_PAGE_BYTES = 4096
_ROWS_PER_JOB = 1000

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
    spans = _write(whole, numbers, disk_rows.NAMESPACE)
    _write(path / "other", numbers, disk_rows.OTHER_NAMESPACE)
    reports = []
    for kind, damage in KINDS.items():
        for when in ("closed", "open"):
            copy = path / "copy"
            shutil.copytree(whole, copy)
            here = {copy / file.relative_to(whole): record for file, record in spans.items()}
            tier = _open(copy) if when == "open" else None
            damaged = damage(here, random.Random(f"{seed} {kind} {when}"))
            reports.append(DamageReport(kind, when, len(damaged)))
            _read(tier or _open(copy), numbers, damaged, reports[-1])
            shutil.rmtree(copy)
            progress(f"{kind}, {when}: {reports[-1].served} served, {reports[-1].wrong} wrong")
    return reports


def _read(tier: DiskTier, numbers: Sequence[int], damaged: set[int], report: DamageReport) -> None:
    """Read all rows, and close the tier."""
    # What was wrong once is not there the second time.
    _right, wrong, failures = disk_rows.served(tier, numbers, _LONGEST_BYTES)
    report.wrong = len(wrong)
    right, wrong, more_failures = disk_rows.served(tier, numbers, _LONGEST_BYTES)
    report.wrong += len(wrong)
    report.failures = dict(failures + more_failures)
    report.served = len(right)
    report.missed = len(numbers) - len(right) - len(wrong)
    if report.wrong:
        report.problems.append(f"{report.wrong} rows that are wrong were served")
    if damaged & right:
        report.problems.append(f"{len(damaged & right)} damaged records were served")
    if damaged and not report.failures:
        report.problems.append("nothing was counted")
    if not tier.close():
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


def _open(path: Path, namespace: str = disk_rows.NAMESPACE) -> DiskTier:
    tier = disk_rows.open_tier(path, _LIMIT_BYTES, namespace)
    if not tier.recovered.wait(60.0):
        raise TimeoutError(f"{path} is not recovered after a minute")
    return tier


def _write(path: Path, numbers: Sequence[int], namespace: str) -> Spans:
    """Write rows, and say where they are."""
    tier = _open(path, namespace)
    for start in range(0, len(numbers), _ROWS_PER_JOB):
        tier.write(1, disk_rows.numbered_rows(numbers[start : start + _ROWS_PER_JOB], _LONGEST_BYTES))
        failed, _failures = disk_rows.finish(tier, "write", 1)
        assert not failed
    tier.close()
    return {
        tier.path / row_name(disk_rows.content_of(number)): (
            number,
            HEADER_BYTES + disk_rows.length_of(number, _LONGEST_BYTES),
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

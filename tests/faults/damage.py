"""What a disk or another program may do to the files of the disk tier, and what it serves afterwards."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.table import read_trailer
from kvconnect.offload.disk.tier import DiskTier
from kvconnect.offload.record import HEADER_BYTES
from tests.faults import disk_rows
from tests.faults.reports import RowReport

_LONGEST_BYTES = 8 << 10
_LIMIT_BYTES = 256 << 20
_SEGMENT_BYTES = 4 << 20
_PAGE_BYTES = 4096
_ROWS_PER_JOB = 1000

Spans = dict[Path, list[tuple[int, int, int]]]
"""By file: the number, the offset and the whole length of each of its records."""


@dataclass
class DamageReport(RowReport):
    """``damaged`` are the records that were, ``missed`` the rows that were not served.

    ``when`` is ``closed`` if a tier was opened afterwards, ``open`` if one knew the files before.
    """

    kind: str
    when: str
    damaged: int = 0
    missed: int = 0


def run_damage(
    path: Path, records: int, *, seed: int = 0, say: Callable[[str], None] = lambda _text: None
) -> list[DamageReport]:
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
            here = {copy / file.relative_to(whole): some for file, some in spans.items()}
            rng = random.Random(f"{seed} {kind} {when}")
            reports.append(_damage_and_read(kind, when, copy, here, damage, rng, numbers))
            shutil.rmtree(copy)
            say(f"{kind}, {when}: {reports[-1].served} served, {reports[-1].wrong} wrong")
    return reports


def _damage_and_read(
    kind: str,
    when: str,
    path: Path,
    spans: Spans,
    damage: Callable[[Spans, random.Random], set[int]],
    rng: random.Random,
    numbers: Sequence[int],
) -> DamageReport:
    report = DamageReport(kind, when)
    tier = _open(path) if when == "open" else None
    damaged = damage(spans, rng)
    tier = tier or _open(path)
    right: set[int] = set()
    wrong: set[int] = set()
    for _ in range(2):
        # What was wrong once is not there the second time.
        right, wrong, failures = disk_rows.served(tier, numbers, _LONGEST_BYTES)
        report.wrong += len(wrong)
        for reason, times in failures.items():
            report.failures[reason] = report.failures.get(reason, 0) + times
    report.damaged, report.served = len(damaged), len(right)
    report.missed = len(numbers) - len(right) - len(wrong)
    if report.wrong:
        report.problems.append(f"{report.wrong} rows that are wrong were served")
    # At rest whole records say who they are, wherever they lie.
    is_found = kind in ("swapped", "shifted") and when == "closed"
    if damaged & right and not is_found:
        report.problems.append(f"{len(damaged & right)} damaged records were served")
    if damaged and not is_found and not report.failures:
        report.problems.append("nothing was counted")
    if not tier.close():
        report.problems.append("the tier does not close")
    return report


def _edited(spans: Spans) -> Iterator[tuple[bytearray, Sequence[tuple[int, int, int]]]]:
    """The bytes of every file, written back when the next ones are asked for, and where its records are."""
    for file, some in spans.items():
        data = bytearray(file.read_bytes())
        yield data, some
        _overwrite(file, data)


# ---- ways of damage: each returns the records that are not whole any more


def _flip(spans: Spans, rng: random.Random) -> set[int]:
    """One bit of every record."""
    for data, some in _edited(spans):
        for _number, offset, length in some:
            data[offset + rng.randrange(length)] ^= 1 << rng.randrange(8)
    return _numbers(spans)


def _flip_some(spans: Spans, rng: random.Random) -> set[int]:
    """One bit of the rows of some records, none of their headers."""
    damaged = set()
    for data, some in _edited(spans):
        for number, offset, length in some:
            if rng.random() < 0.3:
                data[offset + rng.randrange(HEADER_BYTES, length)] ^= 1 << rng.randrange(8)
                damaged.add(number)
    return damaged


def _truncate(spans: Spans, rng: random.Random) -> set[int]:
    """Every file, somewhere."""
    damaged = set()
    for data, some in _edited(spans):
        length = rng.randrange(len(data))
        del data[length:]
        damaged |= {number for number, offset, size in some if offset + size > length}
    return damaged


def _swap(spans: Spans, rng: random.Random) -> set[int]:
    """Whole records in each other's places."""
    damaged = set()
    for data, some in _edited(spans):
        by_length: dict[int, list[tuple[int, int]]] = {}
        for number, offset, length in some:
            by_length.setdefault(length, []).append((number, offset))
        for length, there in by_length.items():
            parts = [bytes(data[offset : offset + length]) for _number, offset in there]
            order = rng.sample(range(len(there)), len(there))
            for (number, offset), source in zip(there, order, strict=True):
                data[offset : offset + length] = parts[source]
                if there[source][0] != number:
                    damaged.add(number)
    return damaged


def _swap_rows(spans: Spans, _rng: random.Random) -> set[int]:
    """The rows of records, but not their headers."""
    damaged = set()
    for data, some in _edited(spans):
        by_length: dict[int, tuple[int, int]] = {}
        for number, offset, length in some:
            if length not in by_length:
                by_length[length] = (number, offset)
                continue
            other, there = by_length.pop(length)
            here = slice(offset + HEADER_BYTES, offset + length)
            beyond = slice(there + HEADER_BYTES, there + length)
            data[here], data[beyond] = data[beyond], data[here]
            damaged |= {number, other}
    return damaged


def _zero_pages(spans: Spans, rng: random.Random) -> set[int]:
    """Pages of the files, as a disk leaves them that lost its power."""
    damaged = set()
    for data, some in _edited(spans):
        pages = [start for start in range(0, len(data), _PAGE_BYTES) if rng.random() < 0.1]
        for start in pages:
            data[start : start + _PAGE_BYTES] = bytes(len(data[start : start + _PAGE_BYTES]))
            damaged |= {
                number
                for number, offset, length in some
                if offset < start + _PAGE_BYTES and start < offset + length
            }
    return damaged


def _foreign(spans: Spans, _rng: random.Random) -> set[int]:
    """The same rows of another namespace, in the places of our own."""
    for file in spans:
        (other,) = file.parents[2].glob(f"other/*/{file.name}")
        _overwrite(file, bytearray(other.read_bytes()))
    return _numbers(spans)


def _flip_tables(spans: Spans, rng: random.Random) -> set[int]:
    """One bit of what lies behind the records of every file."""
    for data, some in _edited(spans):
        _number, offset, length = some[-1]
        data[rng.randrange(offset + length, len(data))] ^= 1 << rng.randrange(8)
    return set()


def _append_garbage(spans: Spans, rng: random.Random) -> set[int]:
    """Bytes behind the last record, and pieces of records among them."""
    for data, _some in _edited(spans):
        start = rng.randrange(len(data))
        data += rng.randbytes(rng.randrange(1, 5000)) + data[start : start + 50_000]
    return set()


def _append_pieces(spans: Spans, rng: random.Random) -> set[int]:
    """A header behind the last record that has no row, or another's."""
    for data, some in _edited(spans):
        _number, offset, _length = rng.choice(some)
        data += data[offset : offset + HEADER_BYTES] + rng.randbytes(rng.randrange(1, 5000))
    return set()


def _shift(spans: Spans, rng: random.Random) -> set[int]:
    """Bytes taken out of or put into the middle of every file."""
    damaged = set()
    for data, some in _edited(spans):
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[at:at] = rng.randbytes(rng.randrange(1, 500))
        else:
            del data[at : at + rng.randrange(1, 500)]
        damaged |= {number for number, offset, length in some if offset + length > at}
    return damaged


KINDS: dict[str, Callable[[Spans, random.Random], set[int]]] = {
    "flipped": _flip,
    "flipped rows": _flip_some,
    "truncated": _truncate,
    "swapped": _swap,
    "swapped rows": _swap_rows,
    "zeroed pages": _zero_pages,
    "foreign": _foreign,
    "flipped tables": _flip_tables,
    "garbage behind": _append_garbage,
    "pieces behind": _append_pieces,
    "shifted": _shift,
}


def _open(path: Path, namespace: str = disk_rows.NAMESPACE) -> DiskTier:
    tier = DiskTier(path, namespace, disk_rows.options(_LIMIT_BYTES, _SEGMENT_BYTES))
    if not tier.wait_recovered(60.0):
        raise TimeoutError(f"{path} is not recovered after a minute")
    return tier


def _write(path: Path, numbers: Sequence[int], namespace: str) -> Spans:
    """Write rows, and say where they are."""
    tier = _open(path, namespace)
    for start in range(0, len(numbers), _ROWS_PER_JOB):
        tier.write(1, disk_rows.numbered_rows(numbers[start : start + _ROWS_PER_JOB], _LONGEST_BYTES))
        failed, _failures = disk_rows.finish(tier, "written", 1)
        assert not failed
    tier.close()
    spans: Spans = {}
    rest = list(numbers)
    for file in sorted(tier.path.glob("*.kv")):
        offset, end = 0, _data_bytes(file)
        spans[file] = []
        while offset < end:
            length = HEADER_BYTES + disk_rows.length_of(rest[0], _LONGEST_BYTES)
            spans[file].append((rest.pop(0), offset, length))
            offset += length
        assert offset == end
    assert not rest
    return spans


def _data_bytes(file: Path) -> int:
    """Where the last record of a sealed segment ends."""
    opened = os.open(file, os.O_RDONLY)
    try:
        trailer = read_trailer(Files(), opened)
    finally:
        os.close(opened)
    assert trailer is not None
    return trailer.data_bytes


def _overwrite(file: Path, data: bytearray) -> None:
    """In place: whoever has it open sees it."""
    with open(file, "r+b") as there:
        there.write(data)
        there.truncate()


def _numbers(spans: Spans) -> set[int]:
    return {number for some in spans.values() for number, _offset, _length in some}

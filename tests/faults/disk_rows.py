"""Rows whose bytes follow from their number, so that whoever reads one knows whether it is right."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kvconnect.offload.disk.disk_tier import DiskTier
from kvconnect.offload.disk.folder import FolderOwner
from kvconnect.offload.tier import Content, Kind, TierRow

NAMESPACE = hashlib.sha256(b"python -m tests.faults disk").hexdigest()
OTHER_NAMESPACE = hashlib.sha256(b"another").hexdigest()
_WORD = np.uint64(0x9E3779B97F4A7C15)
_RUN_S = 60.0
_MAX_QUEUED_BYTES = 64 << 20


def open_tier(path: Path, limit_bytes: int, namespace: str = NAMESPACE) -> DiskTier:
    """A tier, which recovers what is there."""
    return DiskTier(path, FolderOwner(namespace), limit_bytes, max_queued_bytes=_MAX_QUEUED_BYTES)


def content_of(number: int) -> Content:
    """What a numbered row is called."""
    return (number % 3, number.to_bytes(8, "little") + hashlib.sha256(number.to_bytes(8, "little")).digest())


def number_of(content: Content) -> int:
    """The number of a row."""
    return int.from_bytes(content[1][:8], "little")


def length_of(number: int, longest: int) -> int:
    """How long a numbered row is: one of sixteen lengths, so that many are as long as another."""
    return longest // 16 * (1 + (number * 2654435761 >> 16) % 16)


def bytes_of(number: int, longest: int) -> bytes:
    """A row: no word of it is in another row, or elsewhere in the same."""
    count = length_of(number, longest) // 8
    words = np.arange(count, dtype=np.uint64) + (np.uint64(number) << np.uint64(20))
    return (words * _WORD).tobytes()


def numbered_rows(numbers: Iterable[int], longest: int) -> list[TierRow]:
    """Rows to be written."""
    return [TierRow(*content_of(number), memoryview(bytes_of(number, longest))) for number in numbers]


def finish(tier: DiskTier, kind: Kind, job: int) -> tuple[tuple[Content, ...], Counter[str]]:
    """Wait for a job; what its report names, and the failures told meanwhile.

    Raises:
        TimeoutError: it is not reported.
    """
    deadline = time.monotonic() + _RUN_S
    failures = Counter[str]()
    while time.monotonic() < deadline:
        news = tier.poll()
        failures.update(news.failures)
        told = news.done.get(kind, {})
        if job in told:
            return told[job], failures
        time.sleep(0.0002)
    raise TimeoutError(f"{kind} {job} was never reported: {tier.state()}")


def served(tier: DiskTier, numbers: Sequence[int], longest: int) -> tuple[set[int], set[int], Counter[str]]:
    """Read numbered rows: those that are right, those that are wrong, and what failed."""
    rows = [
        TierRow(*content_of(number), memoryview(bytearray(length_of(number, longest)))) for number in numbers
    ]
    tier.read(1, rows)
    missing, failures = finish(tier, "read", 1)
    lost = {number_of(content) for content in missing}
    right: set[int] = set()
    wrong: set[int] = set()
    for number, row in zip(numbers, rows, strict=True):
        if number not in lost:
            (right if bytes(row.memory) == bytes_of(number, longest) else wrong).add(number)
    return right, wrong, failures


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

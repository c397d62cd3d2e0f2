"""The contract of ``kvconnect.offload.tier.LowerTier`` as a suite that every lower tier must pass.

A new tier subclasses ``LowerTierSuite``, defines how to make one, and inherits all cases. Cases drive a tier
as its owner does: jobs, a wake, and ``poll``; what comes back is held against a dictionary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvconnect.errors import LocalError
from kvconnect.offload.tier import MAX_HASH_BYTES, Content, Kind, LowerTier, TierRow, TierUpdate
from tests.offload.opened import closes_later

HANG_S = 30.0
_PROMPT_S = 0.25


def until(condition: Callable[[], object], what: str = "it did not come", timeout_s: float = HANG_S) -> None:
    """Until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


class TierDriver:
    """Waits for the jobs of one tier, and keeps the index that its updates make."""

    def __init__(self, tier: LowerTier) -> None:
        self.tier = tier
        self.index: set[Content] = set()
        self.failures: dict[str, int] = {}
        self._woken = threading.Event()
        self._ended: dict[Kind, dict[int, tuple[Content, ...]]] = {"write": {}, "read": {}, "seek": {}}
        self._next_job = 0
        tier.on_update(self._woken.set)
        closes_later(self)

    def close(self) -> None:
        """Stop it, as it may be stopped."""
        assert self.tier.close()

    def poll(self) -> TierUpdate:
        """Take what is new, and note it."""
        update = self.tier.poll()
        for kind, jobs in self._ended.items():
            ended = update.done.get(kind, {})
            assert not jobs.keys() & ended.keys(), f"{kind} was reported twice"
            jobs.update(ended)
        self.index |= set(update.changed(True))
        self.index -= set(update.changed(False))
        for reason, times in update.failures.items():
            self.failures[reason] = self.failures.get(reason, 0) + times
        return update

    def new_job(self) -> int:
        """A number that was not used yet."""
        self._next_job += 1
        return self._next_job

    def wait(self, kind: Kind, job: int) -> tuple[Content, ...]:
        """What a job's report names."""
        deadline = time.monotonic() + HANG_S
        while job not in self._ended[kind]:
            self._woken.wait(0.5)
            self._woken.clear()
            self.poll()
            assert time.monotonic() < deadline, f"{kind} {job} never ended: {self.tier.state()}"
        return self._ended[kind][job]

    def write(self, rows: Mapping[Content, bytes]) -> tuple[Content, ...]:
        """Write rows and wait; what was not kept."""
        job = self.new_job()
        self.tier.write(job, rows_of(rows))
        return self.wait("write", job)

    def read(self, lengths: Mapping[Content, int]) -> dict[Content, bytes]:
        """Read contents and wait; those that were there."""
        job = self.new_job()
        rows = blank_rows(lengths)
        self.tier.read(job, rows)
        missing = set(self.wait("read", job))
        assert missing <= set(lengths)
        return {row.content: bytes(row.memory) for row in rows if row.content not in missing}

    def seek(self, contents: Sequence[Content]) -> set[Content]:
        """Which of these are there."""
        job = self.new_job()
        self.tier.seek(job, contents)
        return set(self.wait("seek", job))


def rows_of(rows: Mapping[Content, bytes]) -> list[TierRow]:
    """Rows in memory that can be written to, as an arena's."""
    return [TierRow(group, digest, memoryview(bytearray(data))) for (group, digest), data in rows.items()]


def blank_rows(lengths: Mapping[Content, int]) -> list[TierRow]:
    """Rows to read into."""
    return [
        TierRow(group, digest, memoryview(bytearray(length))) for (group, digest), length in lengths.items()
    ]


def some_rows(count: int, seed: int, *, length: int = 0, group: int = 0) -> dict[Content, bytes]:
    """Random rows, of one length or of many."""
    rng = np.random.default_rng(seed)
    found = {}
    for _ in range(count):
        size = length or int(rng.integers(1, 5000))
        found[group, rng.bytes(32)] = rng.bytes(size)
    return found


def lengths_of(rows: Mapping[Content, bytes]) -> dict[Content, int]:
    """How long rows are."""
    return {content: len(data) for content, data in rows.items()}


class LowerTierSuite:
    """Subclass it as ``TestX`` and write ``make_tier``. ``queue_bytes`` is the bound of a tier's queue.

    It is ``indexed`` if it reports what it has; if not, it must be asked.
    """

    queue_bytes = 1 << 20
    indexed = True

    def make_tier(self, tmp_path: Path) -> Any:
        """A tier with room for some megabytes, whose queue takes ``queue_bytes``."""
        raise NotImplementedError

    @pytest.fixture
    def driver(self, tmp_path: Path) -> TierDriver:
        return TierDriver(self.make_tier(tmp_path))

    # ---- bytes

    def test_what_was_written_is_read(self, driver: TierDriver) -> None:
        rows = some_rows(50, 1) | some_rows(3, 2, length=200_000, group=7)
        assert driver.write(rows) == ()
        assert driver.read(lengths_of(rows)) == rows
        assert not driver.failures

    def test_a_row_of_another_length_is_missing(self, driver: TierDriver) -> None:
        short, long = some_rows(2, 5, length=1000).items()
        other = some_rows(1, 6, length=1000)
        driver.write(dict([short, long]) | other)
        wrong = {short[0]: 999, long[0]: 1001} | lengths_of(other)
        assert driver.read(wrong) == other

    def test_groups_and_hashes_are_distinct(self, driver: TierDriver) -> None:
        hashes = [b"\0", b"\0\0", b"\0" * 32, b"a", b"a\0", b"a" * 64]
        rows = {
            (group, one): bytes([group, index]) * 50
            for group in (0, 1, 255)
            for index, one in enumerate(hashes)
        }
        assert driver.write(rows) == ()
        assert driver.read(lengths_of(rows)) == rows
        assert driver.read({(2, b"a"): 100, (1, b"a\0\0"): 100}) == {}

    def test_memory_is_its_owners_again_once_a_job_was_reported(self, driver: TierDriver) -> None:
        rows = some_rows(30, 7, length=3000)
        written = rows_of(rows)
        driver.tier.write(1000, written)
        assert driver.wait("write", 1000) == ()
        for row in written:
            row.memory[:] = bytes(len(row.memory))
        assert driver.read(lengths_of(rows)) == rows
        read = blank_rows(lengths_of(rows))
        driver.tier.read(1000, read)
        assert driver.wait("read", 1000) == ()
        for row in read:
            row.memory[:] = b"\xff" * len(row.memory)
        assert driver.read(lengths_of(rows)) == rows
        assert all(bytes(row.memory) == b"\xff" * 3000 for row in read)

    # ---- jobs

    def test_a_content_is_kept_once(self, driver: TierDriver) -> None:
        rows = some_rows(5, 8)
        twice = [*rows_of(rows), *rows_of(rows)]
        driver.tier.write(1, twice)
        driver.tier.write(2, rows_of(rows))
        assert driver.wait("write", 1) == driver.wait("write", 2) == ()
        assert driver.read(lengths_of(rows)) == rows

    def test_a_row_that_cannot_be_kept_fails_alone(self, driver: TierDriver) -> None:
        rows = some_rows(3, 19)
        bad = {(0, b"empty"): b"", (0, b""): b"no hash", (0, b"l" * (MAX_HASH_BYTES + 1)): b"long hash"}
        assert set(driver.write(rows | bad)) == set(bad)
        assert sum(driver.failures.values()) == len(bad)
        assert driver.read(lengths_of(rows)) == rows

    def test_jobs_without_rows_are_reported(self, driver: TierDriver) -> None:
        driver.tier.write(1, [])
        driver.tier.read(1, [])
        driver.tier.seek(1, [])
        assert driver.wait("write", 1) == driver.wait("read", 1) == driver.wait("seek", 1) == ()

    def test_a_job_that_was_not_reported_is_not_taken_again(self, driver: TierDriver) -> None:
        driver.tier.read(1, blank_rows({(0, b"a"): 10}))
        with pytest.raises(LocalError, match="job 1"):
            driver.tier.read(1, blank_rows({(0, b"b"): 10}))
        assert driver.wait("read", 1) == ((0, b"a"),)

    def test_many_jobs_at_once(self, driver: TierDriver) -> None:
        parts = [some_rows(20, 100 + index, length=1500) for index in range(20)]
        for index, rows in enumerate(parts):
            driver.tier.write(index, rows_of(rows))
        for index in range(len(parts)):
            assert driver.wait("write", index) == ()
        reads = [blank_rows(lengths_of(rows)) for rows in parts]
        for index, read in enumerate(reads):
            driver.tier.read(index, read)
        for index, (rows, read) in enumerate(zip(parts, reads, strict=True)):
            assert driver.wait("read", index) == ()
            assert {row.content: bytes(row.memory) for row in read} == rows

    def test_its_caller_does_not_wait(self, driver: TierDriver) -> None:
        rows = rows_of(some_rows(900, 9, length=1000))
        calls: dict[Kind, Callable[..., None]] = {"write": driver.tier.write, "read": driver.tier.read}
        for kind, call in calls.items():
            # The machine may be busy; not every time, though.
            for _ in range(10):
                job, start = driver.new_job(), time.monotonic()
                call(job, rows)
                took_s = time.monotonic() - start
                driver.wait(kind, job)
                if took_s < _PROMPT_S:
                    break
            assert took_s < _PROMPT_S, kind

    def test_what_is_beyond_the_queue_fails_and_is_counted(self, driver: TierDriver) -> None:
        length = self.queue_bytes // 4
        rows = some_rows(40, 10, length=length)
        driver.tier.write(1, rows_of(rows))
        driver.tier.write(2, rows_of({(1, b"too long for the queue"): bytes(self.queue_bytes + 1)}))
        failed = driver.wait("write", 1)
        assert failed
        assert driver.wait("write", 2)
        assert sum(times for reason, times in driver.failures.items() if "queue" in reason) == len(failed) + 1
        kept = {content: data for content, data in rows.items() if content not in failed}
        assert driver.read(lengths_of(rows)) == kept

    # ---- what it has

    def test_it_reports_what_it_has(self, driver: TierDriver) -> None:
        rows, others = some_rows(20, 11), some_rows(20, 12)
        driver.write(rows)
        assert driver.seek([*others, *rows]) == set(rows)
        if self.indexed:
            assert driver.index == set(rows)
        else:
            assert not driver.index

    def test_who_believes_wrongly_is_notified(self, driver: TierDriver) -> None:
        driver.index = {(0, b"never written")}
        assert driver.read({(0, b"never written"): 100}) == {}
        if self.indexed:
            assert not driver.index

    def test_nothing_from_before_a_clear_is_found_after_it(self, driver: TierDriver) -> None:
        rows, late, fresh = some_rows(50, 13), some_rows(200, 14), some_rows(20, 15)
        driver.write(rows)
        job = driver.new_job()
        driver.tier.write(job, rows_of(late))
        driver.tier.clear()
        driver.index.clear()
        assert driver.seek([*rows, *late]) == set()
        assert driver.write(fresh) == ()
        driver.wait("write", job)
        assert driver.read(lengths_of(rows | late | fresh)) == fresh
        assert driver.index == (set(fresh) if self.indexed else set())
        assert driver.write(rows) == ()
        assert driver.read(lengths_of(rows)) == rows

    # ---- the end

    def test_after_close_every_job_was_reported(self, driver: TierDriver) -> None:
        rows = some_rows(100, 16)
        for index in range(5):
            driver.tier.write(index, rows_of(rows))
            driver.tier.read(index, blank_rows(lengths_of(rows)))
        assert driver.tier.close()
        assert driver.tier.close()
        driver.tier.write(7, rows_of(rows))
        driver.tier.read(7, blank_rows(lengths_of(rows)))
        for index in (0, 1, 2, 3, 4, 7):
            driver.wait("write", index)
            driver.wait("read", index)
        assert set(driver.wait("write", 7)) == set(driver.wait("read", 7)) == set(rows)
        driver.tier.poll()
        assert not driver.tier.poll()

    def test_random_jobs_against_a_dictionary(self, driver: TierDriver) -> None:
        rng = np.random.default_rng(17)
        everything = some_rows(60, 18)
        model: set[Content] = set()
        for _ in range(60):
            some = [content for content in everything if rng.random() < 0.2]
            if rng.random() < 0.5:
                assert driver.write({content: everything[content] for content in some}) == ()
                model |= set(some)
            elif rng.random() < 0.1:
                driver.tier.clear()
                model.clear()
            else:
                found = driver.read({content: len(everything[content]) for content in some})
                assert found == {content: everything[content] for content in some if content in model}

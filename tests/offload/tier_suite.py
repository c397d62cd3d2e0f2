"""The contract of ``kvconnect.offload.lower_tier.LowerTier`` as a suite that every lower tier must pass.

A new tier subclasses ``LowerTierSuite``, defines how to make one, and inherits all cases. Cases drive a tier
as its owner does: calls, a wake, and ``poll``; what comes back is held against a dictionary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvconnect.offload.lower_tier import LowerTier
from kvconnect.offload.tier import MAX_HASH_BYTES, Content, Kind, TierCall, TierRow, TierUpdate
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
    """Waits for the calls of one tier, and keeps the index that its updates make."""

    def __init__(self, tier: LowerTier) -> None:
        self.tier = tier
        self.index: set[Content] = set()
        self.failures: dict[str, int] = {}
        self._woken = threading.Event()
        self._ended: list[TierCall] = []
        tier.tracker.wake = self._woken.set
        closes_later(self)

    def close(self) -> None:
        """Stop it, as it may be stopped."""
        assert self.tier.close()

    def poll(self) -> TierUpdate:
        """Take what is new, and note it."""
        update = self.tier.poll()
        for call in update.done:
            assert call not in self._ended, f"{call.kind} was reported twice"
            self._ended.append(call)
        self.index |= set(update.changed(True))
        self.index -= set(update.changed(False))
        for reason, times in update.failures.items():
            self.failures[reason] = self.failures.get(reason, 0) + times
        return update

    def begin(self, kind: Kind, rows: Sequence[TierRow]) -> TierCall:
        """A call, which has begun."""
        call = TierCall(kind, rows)
        self.tier.begin(call)
        return call

    def wait(self, call: TierCall) -> tuple[Content, ...]:
        """What the report of a call names."""
        deadline = time.monotonic() + HANG_S
        while call not in self._ended:
            self._woken.wait(0.5)
            self._woken.clear()
            self.poll()
            assert time.monotonic() < deadline, f"{call.kind} never ended: {self.tier.state()}"
        return tuple(call.named)

    def write(self, rows: Mapping[Content, bytes]) -> tuple[Content, ...]:
        """Write rows and wait; what was not kept."""
        return self.wait(self.begin("write", rows_of(rows)))

    def read(self, lengths: Mapping[Content, int]) -> dict[Content, bytes]:
        """Read contents and wait; those that were there."""
        rows = blank_rows(lengths)
        missing = set(self.wait(self.begin("read", rows)))
        assert missing <= set(lengths)
        return {row.content: bytes(row.memory) for row in rows if row.content not in missing}

    def seek(self, contents: Sequence[Content]) -> set[Content]:
        """Which of these are there."""
        return set(self.wait(self.begin("seek", [TierRow(*content) for content in contents])))


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
        assert driver.wait(driver.begin("write", written)) == ()
        for row in written:
            row.memory[:] = bytes(len(row.memory))
        assert driver.read(lengths_of(rows)) == rows
        read = blank_rows(lengths_of(rows))
        assert driver.wait(driver.begin("read", read)) == ()
        for row in read:
            row.memory[:] = b"\xff" * len(row.memory)
        assert driver.read(lengths_of(rows)) == rows
        assert all(bytes(row.memory) == b"\xff" * 3000 for row in read)

    # ---- jobs

    def test_a_content_is_kept_once(self, driver: TierDriver) -> None:
        rows = some_rows(5, 8)
        twice = [*rows_of(rows), *rows_of(rows)]
        calls = [driver.begin("write", rows) for rows in (twice, rows_of(rows))]
        assert [driver.wait(call) for call in calls] == [(), ()]
        assert driver.read(lengths_of(rows)) == rows

    def test_a_row_that_cannot_be_kept_fails(self, driver: TierDriver) -> None:
        bad = {(0, b"empty"): b"", (0, b""): b"no hash", (0, b"l" * (MAX_HASH_BYTES + 1)): b"long hash"}
        for content, data in bad.items():
            assert driver.write({content: data}) == (content,)
        assert sum(driver.failures.values()) == len(bad)
        assert driver.write(rows := some_rows(3, 19)) == ()
        assert driver.read(lengths_of(rows)) == rows

    def test_calls_without_rows_are_reported(self, driver: TierDriver) -> None:
        assert driver.wait(driver.begin("write", [])) == driver.wait(driver.begin("read", [])) == ()

    def test_many_calls_at_once(self, driver: TierDriver) -> None:
        parts = [some_rows(20, 100 + index, length=1500) for index in range(20)]
        for call in [driver.begin("write", rows_of(rows)) for rows in parts]:
            assert driver.wait(call) == ()
        reads = [driver.begin("read", blank_rows(lengths_of(rows))) for rows in parts]
        for rows, call in zip(parts, reads, strict=True):
            assert driver.wait(call) == ()
            assert {row.content: bytes(row.memory) for row in call.rows} == rows

    def test_its_caller_does_not_wait(self, driver: TierDriver) -> None:
        rows = rows_of(some_rows(900, 9, length=1000))
        kinds: Sequence[Kind] = ("write", "read")
        for kind in kinds:
            # The machine may be busy; not every time, though.
            for _ in range(10):
                start = time.monotonic()
                call = driver.begin(kind, rows)
                took_s = time.monotonic() - start
                driver.wait(call)
                if took_s < _PROMPT_S:
                    break
            assert took_s < _PROMPT_S, kind

    def test_what_is_beyond_the_queue_fails_and_is_counted(self, driver: TierDriver) -> None:
        length = self.queue_bytes // 4
        rows = some_rows(40, 10, length=length)
        call = driver.begin("write", rows_of(rows))
        assert driver.write({(1, b"too long for the queue"): bytes(self.queue_bytes + 1)})
        failed = driver.wait(call)
        assert failed
        assert sum(times for reason, times in driver.failures.items() if "queue" in reason) == len(failed) + 1
        kept = {content: data for content, data in rows.items() if content not in failed}
        assert driver.read(lengths_of(rows)) == kept

    # ---- what it has

    def test_who_believes_wrongly_is_notified(self, driver: TierDriver) -> None:
        driver.index = {(0, b"never written")}
        assert driver.read({(0, b"never written"): 100}) == {}
        if self.indexed:
            assert not driver.index

    def test_nothing_from_before_a_clear_is_found_after_it(self, driver: TierDriver) -> None:
        rows, late, fresh = some_rows(50, 13), some_rows(200, 14), some_rows(20, 15)
        driver.write(rows)
        call = driver.begin("write", rows_of(late))
        driver.tier.clear()
        driver.index.clear()
        assert self.indexed or driver.seek([*rows, *late]) == set()
        assert driver.write(fresh) == ()
        driver.wait(call)
        assert driver.read(lengths_of(rows | late | fresh)) == fresh
        assert driver.index == (set(fresh) if self.indexed else set())
        assert driver.write(rows) == ()
        assert driver.read(lengths_of(rows)) == rows

    # ---- the end

    def test_after_close_every_call_was_reported(self, driver: TierDriver) -> None:
        rows = some_rows(100, 16)
        kinds: Sequence[Kind] = ("write", "read") * 5
        calls = [driver.begin(kind, rows_of(rows)) for kind in kinds]
        assert driver.tier.close()
        assert driver.tier.close()
        late = [driver.begin(kind, rows_of(rows)) for kind in kinds[:2]]
        for call in (*calls, *late):
            driver.wait(call)
        assert [set(call.named) for call in late] == [set(rows)] * 2
        driver.tier.poll()
        assert not driver.tier.poll()

    def test_random_calls_against_a_dictionary(self, driver: TierDriver) -> None:
        rng = np.random.default_rng(17)
        everything = some_rows(60, 18) | some_rows(5, 2, length=200_000, group=7)
        model: set[Content] = set()
        for _ in range(60):
            some = [content for content in everything if rng.random() < 0.2]
            if rng.random() < 0.5:
                assert driver.write({content: everything[content] for content in some}) == ()
                model |= set(some)
            elif rng.random() < 0.1:
                driver.tier.clear()
                driver.index.clear()
                model.clear()
            else:
                found = driver.read({content: len(everything[content]) for content in some})
                assert found == {content: everything[content] for content in some if content in model}
            if self.indexed:
                assert driver.index == model
            else:
                assert driver.seek(list(everything)) == model
                assert not driver.index
        assert not driver.failures

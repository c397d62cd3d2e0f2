"""The disk tier: the contract of lower tiers, restarts, its bound and its folder, and disks that fail."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.errors import ConfigError
from kvconnect.offload.disk import row_files
from kvconnect.offload.disk.disk_tier import READ_THREADS, DiskTier
from kvconnect.offload.disk.folder import FolderOwner, RowFile, bytes_on_disk, row_name
from kvconnect.offload.disk.row_files import Catalog
from kvconnect.offload.record import HEADER_BYTES
from kvconnect.offload.tier import CompletionTracker
from tests.faults.disk import run_damage, taken_bytes
from tests.offload.disk_kit import (
    NAMESPACE,
    Faults,
    FaultyFolder,
    check,
    open_driver,
    open_tier,
    row_paths,
)
from tests.offload.tier_suite import LowerTierSuite, TierDriver, lengths_of, rows_of, some_rows, until


class TestDiskTier(LowerTierSuite):
    def make_tier(self, tmp_path):
        return DiskTier(tmp_path, FolderOwner(NAMESPACE), 64 << 20, max_queued_bytes=self.queue_bytes)


# ---- what a restart finds


def test_a_restart_reports_footers_and_rows_without_one_too(tmp_path):
    rows = some_rows(40, 1)
    first = open_driver(tmp_path)
    footers = {content: b"of " + content[1] for content in rows}
    described = [row._replace(footer=footers[row.content]) for row in rows_of(rows)]
    assert first.wait(first.begin("write", described)) == ()
    spoilt, cut, *_ = paths = row_paths(first.tier)
    assert first.tier.close()
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
    cut.write_bytes(cut.read_bytes()[:-9])
    second = open_tier(tmp_path, reads_footers=True)
    update = second.poll()
    assert set(update.changed(True)) == set(rows)
    lost = {content for content in rows if row_name(content) in (spoilt.name, cut.name)}
    assert len(paths) == 40
    assert {content for content, footer in update.footers.items() if not footer} == lost
    assert all(footer in (b"", footers[content]) for content, footer in update.footers.items())
    # A row without a footer that is right is as good.
    second_driver = TierDriver(second)
    assert second_driver.read(lengths_of(rows)) == rows
    second.close()


def test_what_is_there_and_written_again_is_reported_again(tmp_path):
    """With several ranks: one missed it, so that all are ordered to write it."""
    rows = some_rows(5, 1)
    driver = open_driver(tmp_path)
    assert driver.write(rows) == ()
    driver.index.clear()
    assert driver.write(rows) == ()
    assert driver.index == set(rows)


def test_what_is_gone_before_it_was_told_is_not_reported():
    tracker = CompletionTracker("a test")
    catalog = Catalog(tracker)
    files = [RowFile(row_name((0, bytes([at]))), (0, bytes([at])), 9, float(at)) for at in range(3)]
    catalog.adopt(files, tracker.epoch)
    assert not tracker.take()
    found = catalog.contents()
    assert found == [(0, bytes([at])) for at in (2, 1, 0)], "most recently used first"
    catalog.doom_oldest(1)
    tracker.take()
    catalog.report(found, dict.fromkeys(found, b"f"))
    assert set(tracker.take().changed(True)) == set(found[:2])


def test_a_row_that_is_whole_after_a_clear_is_not_there():
    tracker = CompletionTracker("a test")
    catalog = Catalog(tracker)
    epoch = tracker.epoch
    catalog.clear()
    catalog.add((0, b"a"), 4096, epoch)
    assert not tracker.take()
    assert catalog.has([(0, b"a")]) == [False]
    assert catalog.doomed() == [row_name((0, b"a"))]


def test_questions_are_answered_while_a_great_many_rows_are_found_at_a_start():
    catalog = Catalog(CompletionTracker("a test"))
    names = [at.to_bytes(4, "big") for at in range(5_000)]
    files = [RowFile(row_name((0, name)), (0, name), 9, 0.0) for name in names]
    known = []

    class Lock:
        def __enter__(self):
            known.append(len(catalog))

        def __exit__(self, *_):
            known.append(len(catalog))

    catalog._lock = Lock()
    catalog.adopt(files, catalog.tracker.epoch)
    assert known[-1] == 5_000
    assert max(after - before for before, after in itertools.pairwise(known)) <= 1024
    assert catalog.taken_bytes == sum(file.disk_bytes for file in files)


def test_ranks_and_namespaces_share_a_path_and_nothing_else(tmp_path):
    rows = some_rows(20, 3)
    drivers = [
        open_driver(tmp_path, rank=rank, world_size=2, namespace=namespace)
        for rank in (0, 1)
        for namespace in (NAMESPACE, "f" * 64)
    ]
    drivers[0].write(rows)
    assert [len(driver.read(lengths_of(rows))) for driver in drivers] == [20, 0, 0, 0]


def test_only_its_owner_may_look(tmp_path):
    path = tmp_path / "not" / "there" / "yet"
    driver = open_driver(path)
    driver.write(some_rows(10, 4))
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path, path.parent)] == [0o700, 0o700]
    assert stat.S_IMODE(driver.tier.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in driver.tier.path.iterdir()} == {0o600}
    driver.tier.close()
    driver.tier.path.chmod(0o755)
    again = open_driver(path)
    assert stat.S_IMODE(again.tier.path.stat().st_mode) == 0o700


def test_a_folder_has_one_process(tmp_path):
    first = open_driver(tmp_path)
    # Locks are of open files, so a second one of this process is refused as another process's.
    with pytest.raises(ConfigError, match=f"{first.tier.path} is used by process {os.getpid()}"):
        open_tier(tmp_path)
    first.tier.close()
    open_tier(tmp_path).close()


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is not a folder"):
            open_tier(path)


def test_a_large_job_is_read_by_several_threads(tmp_path):
    class WatchedFolder(FaultyFolder):
        readers: ClassVar[set[int]] = set()
        all_read = threading.Barrier(READ_THREADS)

        def read(self, file, buffers, offset):
            thread = threading.get_ident()
            if thread not in self.readers:
                self.readers.add(thread)
                self.all_read.wait(30.0)
            return super().read(file, buffers, offset)

    driver = open_driver(tmp_path, 64 << 20, open_folder=Faults(WatchedFolder))
    rows = some_rows(60, 5, length=300_000)
    assert driver.write(rows) == ()
    assert driver.read(dict(reversed(lengths_of(rows).items()))) == rows
    assert len(WatchedFolder.readers) == READ_THREADS


# ---- the bound


@pytest.mark.parametrize("length", [7000, 100_000])
def test_the_bound_holds_at_every_moment(tmp_path, length):
    limit_bytes = 2 << 20
    driver = open_driver(tmp_path, limit_bytes)
    most_bytes, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal most_bytes
        while not is_over.is_set():
            most_bytes = max(most_bytes, taken_bytes(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    written = {}
    try:
        for seed in range(40):
            rows = some_rows(200_000 // length, seed, length=length)
            assert driver.write(rows) == ()
            check(driver.tier)
            written |= rows
            # What was read is written again, within the same bound.
            driver.read(lengths_of(dict(list(written.items())[-len(rows) * 3 :])))
    finally:
        is_over.set()
        watcher.join()
    assert limit_bytes / 2 < most_bytes <= limit_bytes
    driver.poll()
    found = driver.read(lengths_of(written))
    assert found == {content: written[content] for content in driver.index}
    assert len(found) * length > limit_bytes / 2
    assert not driver.failures


def test_the_oldest_makes_room_and_what_was_read_stays(tmp_path):
    driver = open_driver(tmp_path, 2 << 20)
    loved, other = some_rows(10, 1, length=1000), some_rows(10, 2, length=1000)
    driver.write(loved | other)
    for seed in range(3, 43):
        rows = some_rows(100, seed, length=1000)
        assert driver.write(rows) == ()
        assert driver.read(lengths_of(loved)) == loved
    assert driver.read(lengths_of(other)) == {}
    assert driver.read(lengths_of(rows)) == rows
    assert not driver.failures


def test_a_row_that_exceeds_the_bound_is_not_kept(tmp_path):
    driver = open_driver(tmp_path, 1 << 20)
    large = some_rows(1, 1, length=1 << 20)
    assert set(driver.write(large)) == set(large)
    assert driver.failures == {"disk_too_large": 1}
    # One that fits has the disk for itself.
    largest = some_rows(1, 2, length=900_000)
    assert driver.write(largest) == ()
    assert driver.read(lengths_of(largest)) == largest
    assert taken_bytes(tmp_path) <= 1 << 20


def test_what_others_left_counts_and_makes_room_first(tmp_path):
    for index in range(3):
        left = open_driver(tmp_path, 4 << 20, namespace=f"{index}" * 64)
        for seed in range(5):
            left.write(some_rows(25, seed, length=20_000))
        left.tier.close()
    held = open_driver(tmp_path, 4 << 20, namespace="a" * 64)
    elsewhere = open_driver(tmp_path, 4 << 20, rank=1, world_size=2)
    for one in (held, elsewhere):
        one.write(some_rows(20, 9, length=20_000))
    elsewhere.tier.close()
    assert taken_bytes(tmp_path) > 2 << 20
    ours = open_driver(tmp_path, 1 << 20, rank=2, world_size=2)
    beside = taken_bytes(held.tier.path) + taken_bytes(elsewhere.tier.path)
    assert taken_bytes(tmp_path) - beside <= 1 << 20
    for seed in range(20):
        rows = some_rows(20, seed, length=20_000)
        assert ours.write(rows) == ()
        assert taken_bytes(tmp_path) - beside <= 1 << 20
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["0", "0", "a"]
    assert held.read(lengths_of(some_rows(20, 9, length=20_000)))


def test_segments_of_an_earlier_version_are_removed(tmp_path):
    driver = open_driver(tmp_path)
    driver.write(rows := some_rows(10, 1))
    driver.tier.close()
    for number in range(3):
        (driver.tier.path / f"{number:012d}.kv").write_bytes(b"KVCR" * 10_000)
    again = open_driver(tmp_path)
    assert len(row_paths(again.tier)) == 10
    assert again.read(lengths_of(rows)) == rows
    assert not again.failures


def test_what_was_used_last_stays_after_a_restart(tmp_path):
    driver = open_driver(tmp_path)
    rows = some_rows(100, 1, length=10_000)
    assert driver.write(rows) == ()
    driver.tier.close()
    for age, path in enumerate(sorted(driver.tier.path.glob("*.kv"))):
        os.utime(path, (age, age))
    youngest = {path.name for path in sorted(driver.tier.path.glob("*.kv"))[70:]}
    again = open_driver(tmp_path, 512 << 10)
    assert {path.name for path in row_paths(again.tier)} <= youngest
    assert len(again.index) == 28


def test_files_of_others_in_the_folder_are_left_alone(tmp_path):
    driver = open_driver(tmp_path)
    driver.tier.close()
    (driver.tier.path / "notes.txt").write_text("mine")
    (driver.tier.path / "7-00.kv.bak").write_text("mine")
    again = open_driver(tmp_path)
    again.write(some_rows(10, 1))
    again.tier.clear()
    again.tier.close()
    assert {"notes.txt", "7-00.kv.bak"} <= {path.name for path in driver.tier.path.iterdir()}


def test_what_is_cleared_stays_void_where_its_files_outlive_the_process(tmp_path):
    """Neither a close nor a kill waits until hundreds of thousands of files are removed."""
    removals = threading.Semaphore(0)

    class SlowFolder(FaultyFolder):
        def remove(self, name):
            assert removals.acquire(timeout=30.0)
            super().remove(name)

    driver = open_driver(tmp_path, open_folder=Faults(SlowFolder))
    rows = some_rows(50, 1)
    assert driver.write(rows) == ()
    driver.tier.clear()
    until(lambda: (driver.tier.path / "cleared").exists(), "it is not marked")
    threading.Timer(0.2, removals.release, (3,)).start()
    assert driver.tier.close()
    assert len(row_paths(driver.tier)) > 40
    again = open_driver(tmp_path)
    assert not again.index
    until(lambda: not (driver.tier.path / "cleared").exists(), "it stays marked")
    assert not row_paths(again.tier)
    assert again.write(rows) == ()
    again.tier.close()
    last = open_driver(tmp_path)
    assert last.index == set(rows)
    assert not again.failures


def test_of_a_prompt_the_end_makes_room_first(tmp_path):
    driver = open_driver(tmp_path, 1 << 20)
    prompt = some_rows(40, 1, length=10_000)
    assert driver.write(prompt) == ()
    driver.write(some_rows(40, 2, length=10_000))
    driver.poll()
    kept = [content in driver.index for content in prompt]
    assert kept == sorted(kept, reverse=True)
    assert 0 < sum(kept) < 40
    driver.tier.close()
    again = open_driver(tmp_path, 800 << 10)
    left = [content in again.index for content in prompt]
    assert left == sorted(left, reverse=True)
    assert 0 < sum(left) < sum(kept)


def test_what_is_there_of_a_job_does_not_make_room_for_the_rest_of_it(tmp_path):
    driver = open_driver(tmp_path, 1 << 20)
    prompt = some_rows(40, 1, length=10_000)
    end = dict(list(prompt.items())[20:])
    assert driver.write(end) == ()
    assert driver.write(some_rows(40, 2, length=10_000)) == ()
    assert driver.write(prompt) == ()
    assert driver.read(lengths_of(prompt)) == prompt


def test_a_folder_is_not_locked_while_others_list_it(tmp_path, monkeypatch):
    left = open_driver(tmp_path, namespace="b" * 64)
    assert left.write(some_rows(10, 1)) == ()
    left.tier.close()
    is_listing, may_end = threading.Event(), threading.Event()
    usual = row_files.list_files

    def list_slowly(path):
        is_listing.set()
        assert may_end.wait(30.0)
        return usual(path)

    monkeypatch.setattr(row_files, "list_files", list_slowly)
    ours = DiskTier(tmp_path, FolderOwner(NAMESPACE), 8 << 20)
    assert is_listing.wait(30.0)
    monkeypatch.setattr(row_files, "_HELD_WAIT_S", 0.0)
    theirs = DiskTier(tmp_path, FolderOwner("b" * 64), 8 << 20)
    may_end.set()
    assert theirs.close()
    assert ours.close()


class DiskMachine(RuleBasedStateMachine):
    """A tier against a dictionary: it may forget what is old, and serves only what was written."""

    LIMIT = 512 << 10

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.written: dict = {}
        self.limit_bytes = self.LIMIT
        self.driver = open_driver(self.path, self.limit_bytes)
        self.seed = 0

    def teardown(self) -> None:
        assert self.driver.tier.close()
        shutil.rmtree(self.path)

    @rule(count=st.integers(1, 40), length=st.sampled_from([0, 1, 4096, 20_000]))
    def write(self, count, length):
        self.seed += 1
        rows = some_rows(count, self.seed, length=length)
        self.written |= rows
        self.write_and_read(rows)

    def write_and_read(self, rows):
        failed = self.driver.write(rows)
        taken_bytes = sum(bytes_on_disk(len(row) + HEADER_BYTES) for row in rows.values())
        if taken_bytes < self.limit_bytes // 2:
            assert not failed
        # Of a job that is larger than the disk the first rows made room for the last.
        kept = {content: row for content, row in rows.items() if content not in failed}
        assert self.driver.read(lengths_of(rows)) == kept

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def read_some(self, data):
        some = data.draw(st.lists(st.sampled_from(sorted(self.written)), max_size=20, unique=True))
        found = self.driver.read({content: len(self.written[content]) for content in some})
        assert found == {content: self.written[content] for content in some if content in self.driver.index}

    @rule()
    def write_again(self):
        self.write_and_read(dict(list(self.written.items())[-10:]))

    @rule(limit_bytes=st.sampled_from([LIMIT, LIMIT // 2]))
    def restart(self, limit_bytes):
        assert self.driver.tier.close()
        before = self.driver.index
        self.driver = open_driver(self.path, limit_bytes)
        assert self.driver.index <= before
        if limit_bytes >= self.limit_bytes:
            assert self.driver.index == before
        self.limit_bytes = limit_bytes

    @rule()
    def clear(self):
        self.driver.tier.clear()
        self.driver.index.clear()
        found = self.driver.read(lengths_of(self.written))
        assert found == {}

    @invariant()
    def agrees(self):
        self.driver.poll()
        check(self.driver.tier)
        assert taken_bytes(self.path) <= self.limit_bytes
        assert not self.driver.failures


TestDiskAgainstADictionary = DiskMachine.TestCase
TestDiskAgainstADictionary.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


SOON = {"pause_s": 0.01}


@pytest.fixture
def files():
    return Faults()


def is_off(driver):
    return driver.tier.state()["paused_by"]


def writes_again(driver, seed=999):
    """Whether what is written now is kept and served, before long."""

    def is_kept() -> bool:
        nonlocal seed
        seed += 1
        rows = some_rows(3, seed)
        return driver.write(rows) == () and driver.read(lengths_of(rows)) == rows

    until(is_kept, f"nothing is kept: {driver.tier.state()} {driver.failures}")
    assert not is_off(driver)


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        ("write", errno.EIO, "disk_io"),
        ("write", errno.ENOSPC, "disk_full"),
        ("write", errno.EDQUOT, "disk_full"),
        ("write", errno.EROFS, "disk_read_only"),
        ("create", errno.EROFS, "disk_read_only"),
        ("create", errno.ENOSPC, "disk_full"),
        ("create", errno.EMFILE, "disk_io"),
        ("create", errno.EACCES, "disk_read_only"),
    ],
)
def test_a_disk_that_refuses_is_tried_again(tmp_path, files, call, error, reason):
    driver = open_driver(tmp_path, open_folder=files, **SOON)
    before, rows = some_rows(10, 1), some_rows(10, 2)
    if call == "write":
        assert driver.write(before) == ()
    files.faults[call] = error
    assert set(driver.write(rows)) == set(rows)
    assert driver.failures[reason] >= 1
    assert is_off(driver) == reason
    assert driver.read(lengths_of(rows)) == {}
    if call == "write" and reason != "disk_full":
        assert driver.read(lengths_of(before)) == before
    # While it is left alone rows fail at once.
    driver.write(rows)
    assert driver.failures.keys() <= {reason, "disk_paused"}
    del files.faults[call]
    writes_again(driver)
    assert driver.write(rows) == ()
    assert driver.read(lengths_of(rows)) == rows


def test_a_full_disk_makes_room_with_the_oldest_and_goes_on(tmp_path, files):
    driver = open_driver(tmp_path, 64 << 20, open_folder=files, **SOON)
    files.room_bytes = 1 << 20
    kept = {}
    for seed in range(30):
        rows = some_rows(20, seed, length=10_000)
        failed = driver.write(rows)
        kept = {content: row for content, row in rows.items() if content not in failed} or kept
        assert driver.read(lengths_of(rows)).items() <= rows.items()
    assert driver.failures["disk_full"]
    assert len(kept) == 20
    assert driver.read(lengths_of(kept)) == kept
    assert taken_bytes(tmp_path) < 1.3 * (1 << 20)
    assert not is_off(driver)
    # Nothing of a row that did not fit is left behind.
    driver.tier.close()
    again = open_driver(tmp_path, 64 << 20)
    assert again.index == driver.index
    assert not again.failures


def test_a_row_that_was_written_in_part_is_removed(tmp_path, files):
    driver = open_driver(tmp_path, open_folder=files, **SOON)
    whole = some_rows(5, 1, length=1000)
    assert driver.write(whole) == ()
    files.room_bytes, files.no_room = 500, errno.EIO
    assert driver.write(some_rows(1, 2, length=1000))
    assert [file.stat().st_size for file in driver.tier.path.glob("*.kv*")] == 5 * [1132]
    # Where it cannot be removed the next write begins with it, or a restart removes it.
    files.room_bytes = None
    files.calls.clear()
    files.faults["rename"] = files.faults["remove"] = errno.EIO
    until(lambda: driver.write(some_rows(1, 3, length=100_000)) and files.calls.get("rename"), "no write")
    lengths = [file.stat().st_size for file in driver.tier.path.glob("*.kv*")]
    assert max(lengths) == 100_132
    assert driver.tier.close()
    again = open_driver(tmp_path)
    assert again.index == driver.index
    assert again.failures == {"disk_torn": 1}
    assert len(list(again.tier.path.glob("*.kv*"))) == 5
    assert again.read(lengths_of(whole)) == whole


def test_bad_sectors_are_misses(tmp_path, files):
    driver = open_driver(tmp_path, open_folder=files)
    rows = some_rows(50, 1)
    driver.write(rows)
    files.faults["read"] = errno.EIO
    assert driver.read(lengths_of(rows)) == {}
    assert driver.failures == {"disk_io": 50}
    assert not driver.index
    del files.faults["read"]
    assert driver.read(lengths_of(rows)) == {}
    assert driver.write(rows) == ()
    assert driver.read(lengths_of(rows)) == rows


def test_too_many_open_files_lose_nothing(tmp_path, files):
    driver = open_driver(tmp_path, open_folder=files)
    rows = some_rows(50, 1)
    driver.write(rows)
    files.faults["open"] = errno.EMFILE
    assert driver.read(lengths_of(rows)) == {}
    del files.faults["open"]
    assert driver.index == set(rows)
    assert driver.read(lengths_of(rows)) == rows


def test_old_rows_that_cannot_be_removed_stop_writing(tmp_path, files):
    limit_bytes = 1 << 20
    driver = open_driver(tmp_path, limit_bytes, open_folder=files, **SOON)
    files.faults["remove"] = errno.EPERM
    for seed in range(20):
        driver.write(some_rows(100, seed, length=1000))
        assert taken_bytes(tmp_path) <= limit_bytes
    assert driver.failures["disk_read_only"]
    del files.faults["remove"]
    writes_again(driver)
    assert taken_bytes(tmp_path) <= limit_bytes


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    driver = open_driver(tmp_path / "cache", 8 << 20, **SOON)
    rows, unread = some_rows(300, 1, length=1000), some_rows(5, 77)
    driver.write(rows | unread)
    shutil.rmtree(tmp_path / "cache")
    assert driver.read(lengths_of(rows)) == {}
    assert driver.failures["disk_gone"]
    assert driver.index == set(unread)
    writes_again(driver)
    driver.poll()
    assert driver.index.isdisjoint(unread)
    assert driver.write(rows) == ()
    assert driver.read(lengths_of(rows)) == rows
    assert taken_bytes(tmp_path) < 2 << 20


def test_a_folder_that_somebody_else_took_meanwhile_is_left_to_them(tmp_path):
    driver = open_driver(tmp_path / "cache", 8 << 20, **SOON)
    assert driver.write(some_rows(200, 1, length=1000)) == ()
    (tmp_path / "cache").rename(tmp_path / "moved")
    other = open_driver(tmp_path / "cache", 8 << 20)
    rows = some_rows(300, 2, length=1000)
    assert len(driver.write(rows)) == 300
    assert driver.failures["disk_held"] == driver.failures["disk_gone"] == 1
    assert other.write(rows) == ()
    assert len(row_paths(other.tier)) == 300
    other.tier.close()
    writes_again(driver)


def test_rows_that_somebody_removes_are_misses(tmp_path):
    driver = open_driver(tmp_path, 8 << 20, **SOON)
    rows = some_rows(300, 1, length=1000)
    driver.write(rows)
    for file in row_paths(driver.tier)[1:]:
        file.unlink()
    found = driver.read(lengths_of(rows))
    assert len(found) == 1
    assert found.items() <= rows.items()
    assert driver.index == set(found)
    assert driver.failures == {"disk_gone": 299}
    assert driver.write(rows) == ()
    assert driver.read(lengths_of(rows)) == rows


def test_a_folder_that_cannot_be_used_at_the_start_is_tried_again(tmp_path, files):
    files.faults["open"] = errno.EACCES
    driver = open_driver(tmp_path, open_folder=files, **SOON)
    rows = some_rows(10, 1)
    assert driver.read(lengths_of(rows)) == {}
    assert set(driver.write(rows)) == set(rows)
    assert driver.failures["disk_read_only"]
    del files.faults["open"]
    writes_again(driver)


def test_what_was_cleared_while_it_could_not_be_reached_does_not_come_back(tmp_path, files):
    rows = some_rows(10, 1)
    first = open_driver(tmp_path)
    first.write(rows)
    first.tier.close()
    files.faults["open"] = errno.EACCES
    driver = open_driver(tmp_path, open_folder=files, **SOON)
    driver.tier.clear()
    del files.faults["open"]
    writes_again(driver)
    assert driver.read(lengths_of(rows)) == {}
    fresh = some_rows(5, 2)
    assert driver.write(fresh) == ()
    assert driver.tier.close()
    again = open_driver(tmp_path)
    assert fresh.keys() <= again.index
    assert again.read(lengths_of(rows)) == {}


def test_rows_beyond_a_limit_on_the_length_of_files_fail_alone(tmp_path):
    driver = open_driver(tmp_path, **SOON)
    rows, long = some_rows(50, 1, length=1000), some_rows(3, 2, length=300_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        assert set(driver.write(long | rows)) == set(long)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert driver.read(lengths_of(rows)) == rows
    assert driver.failures == {"disk_too_large": 3}


def test_threads_live_on_whatever_is_raised(tmp_path, files, monkeypatch):
    driver = open_driver(tmp_path, open_folder=files)
    rows = some_rows(20, 1)
    driver.write(rows)

    def fail(*_args):
        raise RuntimeError("injected")

    monkeypatch.setattr(FaultyFolder, "read", fail)
    assert driver.read(lengths_of(rows)) == {}
    monkeypatch.setattr(FaultyFolder, "write", fail)
    assert driver.write(some_rows(5, 2))
    assert driver.failures["disk_internal"] >= 2
    monkeypatch.undo()
    assert driver.read(lengths_of(rows)) == rows
    more = some_rows(5, 3)
    assert driver.write(more) == ()
    assert driver.read(lengths_of(more)) == more


def test_a_disk_that_hangs_is_left_behind(tmp_path, files, monkeypatch):
    driver = open_driver(tmp_path, open_folder=files)
    monkeypatch.setattr("kvconnect.offload.lower_tier.CLOSE_TIMEOUT_S", 0.2)
    is_begun, is_free = threading.Event(), threading.Event()
    monkeypatch.setattr(FaultyFolder, "write", lambda *_args: is_begun.set() or (is_free.wait() and 0))
    call = driver.begin("write", rows_of(some_rows(3, 1)))
    assert is_begun.wait(30.0)
    assert not driver.tier.close()
    is_free.set()
    assert len(driver.wait(call)) == 3


def test_rows_that_are_cleared_while_room_is_made_take_none_of_it(tmp_path, files, monkeypatch):
    """Clearing is another thread's: it can come between any two looks at what is taken."""
    driver = open_driver(tmp_path, 1 << 20, open_folder=files, **SOON)
    for seed in range(4):
        driver.write(some_rows(30, seed, length=10_000))
    catalog, doom = driver.tier._catalog, type(driver.tier._catalog).doom_oldest

    def doom_what_was_just_cleared(self, length_bytes):
        monkeypatch.setattr(type(catalog), "doom_oldest", doom)
        catalog.clear()
        return doom(self, length_bytes)

    monkeypatch.setattr(type(catalog), "doom_oldest", doom_what_was_just_cleared)
    driver.write(some_rows(30, 9, length=10_000))
    writes_again(driver)
    assert taken_bytes(tmp_path) <= 1 << 20


def test_a_folder_that_cannot_be_listed_is_opened_anew(tmp_path, files):
    driver = open_driver(tmp_path, **SOON)
    rows = some_rows(40, 1, length=10_000)
    assert driver.write(rows) == ()
    assert driver.tier.close()
    files.faults["listing"] = errno.EIO
    again = open_driver(tmp_path, open_folder=files, **SOON)
    more = some_rows(3, 2)
    assert set(again.write(more)) == set(more)
    del files.faults["listing"]
    writes_again(again)
    assert again.read(lengths_of(rows)) == rows
    assert again.failures.keys() <= {"disk_io", "disk_paused"}


def test_nothing_wrong_is_served_after_kills():
    command = [sys.executable, "-m", "tests.faults", "disk", "--count", "12", "--records", "0"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stdout + told.stderr
    report = json.loads(told.stdout)
    assert (report["kills"], report["wrong"], report["problems"]) == (12, 0, [])
    assert report["served"] > 0


def test_nothing_damaged_is_served_and_what_is_not_damaged_is(tmp_path):
    records = 200
    damage = {(report.kind, report.when): report for report in run_damage(tmp_path, records, seed=1)}
    for way, report in damage.items():
        assert report.wrong == 0, way
        assert report.problems == [], way
        assert report.served + report.missed == records, way
    for when in ("closed", "open"):
        report = damage["flipped rows", when]
        assert report.damaged
        assert report.served == records - report.damaged
        assert report.failures == {"disk_corrupt": report.damaged}
    assert damage["flipped", "open"].served == damage["foreign", "closed"].served == 0
    assert damage["appended", "closed"].served == damage["appended", "open"].served == records
    zeroed = damage["zeroed pages", "closed"]
    assert zeroed.damaged
    assert zeroed.served == records - zeroed.damaged

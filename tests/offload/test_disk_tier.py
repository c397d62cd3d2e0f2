"""The disk tier: the contract of lower tiers, restarts, its bound, its folder and its lock."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.config import OffloadConfig
from kvconnect.errors import ConfigError
from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.disk import row_files
from kvconnect.offload.disk.catalog import Catalog
from kvconnect.offload.disk.disk_tier import READ_THREADS, DiskTier, open_disk_tier
from kvconnect.offload.disk.folder import FolderOwner, RowFile, bytes_on_disk, row_name
from kvconnect.offload.namespace import Namespace
from kvconnect.offload.record import HEADER_BYTES
from tests.faults.disk_rows import taken_bytes
from tests.offload.disk_kit import (
    NAMESPACE,
    Faults,
    FaultyFolder,
    check,
    open_driver,
    open_tier,
    row_paths,
    wait_until,
)
from tests.offload.tier_suite import LowerTierSuite, TierDriver, lengths_of, rows_of, some_rows


class TestDiskTier(LowerTierSuite):
    def make_tier(self, tmp_path):
        return DiskTier(tmp_path, FolderOwner(NAMESPACE), 64 << 20, max_queued_bytes=self.queue_bytes)


# ---- what a restart finds


def test_a_restart_reports_footers_and_rows_without_one_too(tmp_path):
    rows = some_rows(40, 1)
    first = open_driver(tmp_path)
    footers = {content: b"of " + content[1] for content in rows}
    job = first.new_job()
    first.tier.write(job, [row._replace(footer=footers[row.content]) for row in rows_of(rows)])
    assert first.wait("written", job) == ()
    spoilt, cut, *_ = paths = row_paths(first.tier)
    assert first.tier.close()
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
    cut.write_bytes(cut.read_bytes()[:-9])
    second = open_tier(tmp_path, reads_footers=True)
    wait_until(lambda: second._tracker._changes.keys() == set(rows), "told")
    update = second.poll()
    lost = {content for content in rows if row_name(content) in (spoilt.name, cut.name)}
    assert len(paths) == 40
    assert {content for content, footer in update.footers.items() if not footer} == lost
    assert all(footer in (b"", footers[content]) for content, footer in update.footers.items())
    # A row without a footer that is right is as good.
    second_driver = TierDriver(second)
    assert second_driver.read(lengths_of(rows)) == rows
    second.close()


def test_an_error_of_ours_over_one_footer_hides_no_other_row(tmp_path, monkeypatch):
    rows = some_rows(5, 1)
    first = open_driver(tmp_path)
    assert first.write(rows) == ()
    assert first.tier.close()
    bad = next(iter(rows))
    monkeypatch.setattr(
        row_files.RowFiles, "read_footer", lambda _, content: b"f" if content != bad else 1 // 0
    )
    second = open_tier(tmp_path, reads_footers=True)
    wait_until(lambda: not second.state()["recovering"], "reported")
    update = second.poll()
    assert set(update.added) == set(rows)
    assert update.footers == {content: b"" if content == bad else b"f" for content in rows}
    assert update.failures == {"disk_internal": 1}
    second.close()


def test_what_is_there_and_written_again_is_reported_again(tmp_path):
    """With several ranks: one missed it, so that all are ordered to write it."""
    rows = some_rows(5, 1)
    driver = open_driver(tmp_path)
    assert driver.write(rows) == ()
    driver.index.clear()
    assert driver.write(rows) == ()
    assert driver.index == set(rows)
    driver.tier.close()


def test_what_is_gone_before_it_was_told_is_not_reported():
    tracker = CompletionTracker()
    catalog = Catalog(tracker, waits=True)
    files = [RowFile(row_name((0, bytes([at]))), (0, bytes([at])), 9, float(at)) for at in range(3)]
    catalog.adopt(files, catalog.epoch)
    assert not tracker.take()
    unreported = catalog.unreported(2) + catalog.unreported(2)
    assert unreported == [(0, bytes([at])) for at in (2, 1, 0)], "most recently used first"
    catalog.doom_oldest(1)
    tracker.take()
    catalog.report(dict.fromkeys(unreported, b"f"))
    assert set(tracker.take().added) == set(unreported[:2])
    assert catalog.unreported(2) == []


@pytest.mark.parametrize("waits", [True, False])
def test_questions_are_answered_while_a_great_many_rows_are_found_at_a_start(waits):
    catalog = Catalog(CompletionTracker(), waits=waits)
    names = [at.to_bytes(4, "big") for at in range(5_000)]
    files = [RowFile(row_name((0, name)), (0, name), 9, 0.0) for name in names]
    known = []

    class Lock:
        def __enter__(self):
            known.append(len(catalog))

        def __exit__(self, *_):
            known.append(len(catalog))

    catalog._lock = Lock()
    catalog.adopt(files, catalog.epoch)
    assert known[-1] == 5_000
    assert max(after - before for before, after in itertools.pairwise(known)) <= 1024
    assert catalog.taken_bytes == sum(file.disk_bytes for file in files)


def test_a_restart_finds_what_was_written(tmp_path):
    rows = some_rows(200, 1)
    first = open_driver(tmp_path)
    assert first.write(rows) == ()
    assert first.tier.close()
    second = open_driver(tmp_path)
    assert second.index == set(rows)
    assert second.read(lengths_of(rows)) == rows
    assert not second.failures
    # And goes on behind it.
    more = some_rows(50, 2)
    assert second.write(more) == ()
    assert second.tier.close()
    third = open_driver(tmp_path)
    assert third.read(lengths_of(rows | more)) == rows | more
    assert third.tier.close()


def test_ranks_and_namespaces_share_a_path_and_nothing_else(tmp_path):
    rows = some_rows(20, 3)
    drivers = [
        open_driver(tmp_path, rank=rank, world_size=2, namespace=namespace)
        for rank in (0, 1)
        for namespace in (NAMESPACE, "f" * 64)
    ]
    drivers[0].write(rows)
    assert [len(driver.read(lengths_of(rows))) for driver in drivers] == [20, 0, 0, 0]
    for driver in drivers:
        driver.tier.close()


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
    again.tier.close()


def test_a_folder_has_one_process(tmp_path):
    first = open_driver(tmp_path)
    with pytest.raises(ConfigError, match=f"{first.tier.path} is used by process {os.getpid()}"):
        open_tier(tmp_path)
    code = (
        "import sys; from pathlib import Path; from tests.offload.disk_kit import open_tier\n"
        "try: open_tier(Path(sys.argv[1]))\nexcept Exception as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert str(first.tier.path) in told.stdout
    assert f"process {os.getpid()}" in told.stdout
    first.tier.close()
    open_tier(tmp_path).close()


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is not a folder"):
            open_tier(path)


def test_it_is_opened_as_configured(tmp_path):
    config = OffloadConfig(cpu_bytes=1, disk_path=str(tmp_path), disk_bytes=1 << 30)
    namespace = Namespace.of({"model": "m"})
    tier = open_disk_tier(config, namespace, rank=3, world_size=4)
    assert tier.path == tmp_path / f"{namespace.name}-rank3"
    assert tier.close()


def test_a_large_job_is_read_by_several_threads(tmp_path):
    class WatchedFolder(FaultyFolder):
        readers: ClassVar[set[str]] = set()

        def read(self, file, buffers, offset):
            self.readers.add(threading.current_thread().name)
            time.sleep(0.01)
            return super().read(file, buffers, offset)

    driver = open_driver(tmp_path, 64 << 20, open_folder=Faults(WatchedFolder))
    rows = some_rows(60, 5, length=300_000)
    assert driver.write(rows) == ()
    WatchedFolder.readers.clear()
    assert driver.read(dict(reversed(lengths_of(rows).items()))) == rows
    assert len(WatchedFolder.readers) == READ_THREADS
    assert driver.tier.close()


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
    driver.tier.close()


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
    driver.tier.close()


def test_a_smaller_bound_after_a_restart_keeps_the_youngest(tmp_path):
    driver = open_driver(tmp_path, 8 << 20)
    parts = [some_rows(50, seed, length=5000) for seed in range(50)]
    for rows in parts:
        if rows is parts[-1]:
            # A system's times of files are some milliseconds apart, and rows of one time are equally old.
            time.sleep(0.05)
        assert driver.write(rows) == ()
    driver.tier.close()
    assert taken_bytes(tmp_path) > 4 << 20
    again = open_driver(tmp_path, 1 << 20)
    assert taken_bytes(tmp_path) <= 1 << 20
    assert again.read(lengths_of(parts[-1])) == parts[-1]
    assert again.read(lengths_of(parts[0])) == {}
    assert again.write(parts[0]) == ()
    assert taken_bytes(tmp_path) <= 1 << 20
    again.tier.close()


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
    driver.tier.close()


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
    for one in (ours, held):
        one.tier.close()


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
    again.tier.close()


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
    again.tier.close()


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


def test_cleared_files_leave_the_disk(tmp_path):
    driver = open_driver(tmp_path)
    driver.write(some_rows(500, 1))
    assert row_paths(driver.tier)
    driver.tier.clear()
    wait_until(lambda: not row_paths(driver.tier), "the files are still there")
    driver.tier.close()
    again = open_driver(tmp_path)
    assert not again.index
    again.tier.close()


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
    wait_until(lambda: (driver.tier.path / "cleared").exists(), "it is not marked")
    threading.Timer(0.2, removals.release, (3,)).start()
    assert driver.tier.close()
    assert len(row_paths(driver.tier)) > 40
    again = open_driver(tmp_path)
    assert not again.index
    wait_until(lambda: not (driver.tier.path / "cleared").exists(), "it stays marked")
    assert not row_paths(again.tier)
    assert again.write(rows) == ()
    again.tier.close()
    last = open_driver(tmp_path)
    assert last.index == set(rows)
    assert not again.failures
    last.tier.close()


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
    again.tier.close()


def test_what_is_there_of_a_job_does_not_make_room_for_the_rest_of_it(tmp_path):
    driver = open_driver(tmp_path, 1 << 20)
    prompt = some_rows(40, 1, length=10_000)
    end = dict(list(prompt.items())[20:])
    assert driver.write(end) == ()
    assert driver.write(some_rows(40, 2, length=10_000)) == ()
    assert driver.write(prompt) == ()
    assert driver.read(lengths_of(prompt)) == prompt
    driver.tier.close()


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

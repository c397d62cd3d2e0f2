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
from collections import Counter, OrderedDict
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.errors import ConfigError
from kvconnect.offload.disk import row_files
from kvconnect.offload.disk.disk_tier import READ_THREADS, DiskTier
from kvconnect.offload.disk.folder import (
    OVERHEAD_BYTES,
    UNFINISHED,
    FolderOwner,
    RowFile,
    bytes_on_disk,
    row_name,
)
from kvconnect.offload.disk.row_files import Catalog
from kvconnect.offload.record import HEADER_BYTES, RecordFormat, namespace_of
from kvconnect.offload.tier import CompletionTracker
from tests.faults.disk import taken_bytes
from tests.offload.disk_kit import (
    BUG,
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


def test_what_is_there_of_a_job_does_not_make_room_for_the_rest_of_it(tmp_path):
    driver = open_driver(tmp_path, 1 << 20)
    prompt = some_rows(40, 1, length=10_000)
    end = dict(list(prompt.items())[20:])
    assert driver.write(end) == ()
    assert driver.write(some_rows(40, 2, length=10_000)) == ()
    assert driver.write(prompt) == ()
    assert driver.read(lengths_of(prompt)) == prompt
    assert driver.tier.close()


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


REASONS = {
    errno.EIO: "disk_io",
    errno.EMFILE: "disk_io",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EROFS: "disk_read_only",
    errno.EACCES: "disk_read_only",
    BUG: "disk_internal",
}
ERRORS = st.sampled_from(list(REASONS))


def flip(raw, at, _):
    raw[at] ^= 1


def cut(raw, at, _):
    del raw[at:]


def take_out(raw, at, _):
    del raw[at : at + 5]


def put_in(raw, at, _):
    raw[at:at] = b"more"


def lose_page(raw, at, _):
    """As a disk leaves it that lost its power."""
    page = slice(at // 4096 * 4096, at // 4096 * 4096 + 4096)
    raw[page] = bytes(len(raw[page]))


def swap(raw, _, other):
    raw[:] = other


def swap_rows(raw, _, other):
    raw[HEADER_BYTES:] = other[HEADER_BYTES:]


def append(raw, _, other):
    raw += other


class DiskMachine(RuleBasedStateMachine):
    """A tier against a dictionary in the order of use: what it has is exactly that, whatever the disk did.

    A rule with a fault mends it, and ends with rows that are kept.
    """

    LIMIT = 512 << 10
    # It has the disk for itself.
    LARGEST = LIMIT - OVERHEAD_BYTES - 4096 - HEADER_BYTES
    OTHERS = ("notes.txt", "7-00.kv.bak")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.files = Faults()
        self.written: dict = {}
        self.model: OrderedDict = OrderedDict()
        self.seed = 0
        self.open(self.LIMIT)

    def open(self, limit_bytes):
        self.limit_bytes = limit_bytes
        self.driver = open_driver(self.path, limit_bytes, open_folder=self.files, pause_s=60.0)
        self.tier, self.files.most_bytes = self.driver.tier, 0
        self.put_others()

    def put_others(self):
        for name in self.OTHERS:
            (self.tier.path / name).touch()

    def teardown(self) -> None:
        assert self.tier.close()
        shutil.rmtree(self.path)

    def fresh(self, count=3, length=0):
        self.seed += 1
        rows = some_rows(count, self.seed, length=length)
        self.written |= rows
        return rows

    def failures(self):
        self.driver.poll()
        found, self.driver.failures = self.driver.failures, {}
        return found

    def read(self, contents):
        return self.driver.read({content: len(self.written[content]) for content in contents})

    def rows(self, contents):
        return {content: self.written[content] for content in contents}

    def use(self, contents):
        # The end of a sequence makes room first.
        for content in reversed(list(contents)):
            if content in self.model:
                self.model.move_to_end(content)

    def keep(self, rows):
        """What the model makes of a write."""
        room_bytes, too_large = self.limit_bytes - OVERHEAD_BYTES, 0
        self.use(rows)
        for content in reversed(list(rows)):
            taken_bytes = bytes_on_disk(len(rows[content]) + HEADER_BYTES)
            if content in self.model:
                continue
            if taken_bytes > room_bytes:
                too_large += 1
                continue
            while sum(self.model.values()) + taken_bytes > room_bytes:
                self.model.popitem(last=False)
            self.model[content] = taken_bytes
        return {"disk_too_large": too_large} if too_large else {}

    def write_and_read(self, rows):
        failed = self.driver.write(rows)
        assert self.failures() == self.keep(rows)
        assert set(failed) == rows.keys() - self.model.keys()
        assert self.read(rows) == {content: row for content, row in rows.items() if content in self.model}
        self.use(rows)

    def mend(self, lost=frozenset()):
        """The disk is as good as new: all that was there and is not ``lost`` is, but for what made room."""
        before = self.model.keys() - lost
        has_room = sum(self.model.values()) + (50 << 10) < self.limit_bytes - OVERHEAD_BYTES
        self.files.faults.clear()
        self.tier._retry_at = 0.0
        rows = self.fresh()
        assert self.driver.write(rows) == ()
        assert self.read(rows) == rows
        assert not self.tier.state()["paused_by"]
        until(lambda: not self.tier.state()["recovering"])
        contents = self.tier._catalog.contents()
        assert set(contents) <= before | rows.keys()
        assert not has_room or set(contents) == before | rows.keys()
        # The order of use may be another one.
        self.model = OrderedDict(self.tier._catalog._rows)

    def some(self, data):
        # What made room may depend on the clock of the disk, and what is drawn must not.
        names = sorted(self.model)
        drawn = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
        return sorted({names[at % len(names)] for at in drawn})

    @rule(count=st.integers(1, 40), length=st.sampled_from([0, 0, 1, 4096, 20_000, LARGEST]))
    def write(self, count, length):
        self.write_and_read(self.fresh(min(count, 3) if length == self.LARGEST else count, length))

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def read_some(self, data):
        some = data.draw(st.lists(st.sampled_from(sorted(self.written)), max_size=20, unique=True))
        assert self.read(some) == self.rows(content for content in some if content in self.model)
        self.use(some)

    @rule()
    def write_again(self):
        rows = dict(list(self.written.items())[-10:])
        # Another rank missed it, so that all are ordered to write it, and this one is to report it again.
        self.driver.index -= rows.keys()
        self.write_and_read(rows)

    @rule(limit_bytes=st.sampled_from([LIMIT, LIMIT // 2]), remains=st.booleans())
    def restart(self, limit_bytes, remains):
        assert self.tier.close()
        if remains:
            # Of a write that a kill cut off, and of version 0.1.
            for name in (UNFINISHED, "000000000001.kv"):
                (self.tier.path / name).write_bytes(b"KVCR" * 10_000)
        is_smaller = limit_bytes < self.limit_bytes
        self.open(limit_bytes)
        assert self.failures() == ({"disk_torn": 1} if remains else {})
        before, self.model = self.model, OrderedDict()
        for content in reversed(self.tier._catalog.contents()):
            self.model[content] = before[content]
        assert is_smaller or self.model.keys() == before.keys()
        files = {path.name for path in self.tier.path.glob("*.kv*")}
        assert files == {*map(row_name, self.model), self.OTHERS[1]}

    @rule()
    def clear(self):
        self.tier.clear()
        self.driver.index.clear()
        self.model.clear()
        assert self.read(self.written) == {}

    @rule(call=st.sampled_from(["create", "write", "rename"]), error=ERRORS)
    def refuse(self, call, error):
        rows, reason = self.fresh(), REASONS[error]
        self.files.faults[call] = error
        failed = [set(self.driver.write(rows)) for _ in range(2)]
        assert failed == [set(rows)] * 2
        assert self.tier.state()["paused_by"] == ("" if error == BUG else reason)
        assert self.read(rows) == {}
        assert not (self.tier.path / UNFINISHED).exists() or error == BUG
        failures = self.failures()
        if error == BUG:
            assert failures == {reason: 6}
        else:
            # A full disk is tried once more, without the rows used longest ago.
            assert failures == {reason: failures[reason], "disk_paused": 5}
            assert failures[reason] <= 1 + (reason == "disk_full")
        lost = self.model.keys() - self.driver.index
        assert not lost or reason == "disk_full" or sum(self.model.values()) > self.LIMIT // 4
        self.mend(lost)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), call=st.sampled_from(["open", "read"]), error=ERRORS)
    def cannot_read(self, data, call, error):
        some = self.some(data)
        self.files.faults[call] = error
        assert self.read(some) == {}
        assert self.failures() == {REASONS[error]: len(some)}
        self.files.faults.clear()
        # A file that cannot be opened now may be readable later; a sector is not tried again.
        lost = some if call == "read" and error != BUG else ()
        assert self.read(some) == self.rows(() if lost else some)
        self.mend(set(lost))

    @precondition(lambda self: self.model)
    @rule(
        data=st.data(),
        how=st.sampled_from([flip, cut, take_out, put_in, lose_page, swap, swap_rows, append, None]),
        namespace=st.sampled_from([NAMESPACE, NAMESPACE, "f" * 64]),
        restarts=st.booleans(),
    )
    def damage(self, data, how, namespace, restarts):
        """Files are removed, or other bytes are in them; some are another namespace's."""
        some, reasons, at = self.some(data), Counter(), data.draw(st.integers(0, 1 << 16))
        for content in some:
            path, row = self.tier.path / row_name(content), self.written[content]
            if how is None:
                path.unlink()
                reasons["disk_gone"] += 1
                continue
            raw = bytearray(RecordFormat(namespace).header(content, memoryview(row)) + row)
            twin = bytes(byte ^ 1 for byte in row)
            other = RecordFormat(namespace).header((0, b"another"), memoryview(twin)) + twin
            how(raw, at % len(raw), other)
            path.write_bytes(raw)
            if len(raw) < HEADER_BYTES + len(row):
                reasons["disk_truncated"] += 1
            elif namespace_of(bytes(raw[:HEADER_BYTES])) == bytes.fromhex("f" * 64):
                reasons["disk_foreign"] += 1
            elif how is not append:
                reasons["disk_corrupt"] += 1
        lost = set(some if reasons else ())
        # A file that is longer by a little may take one block more.
        has_room = sum(self.model.values()) + (100 << 10) < self.limit_bytes - OVERHEAD_BYTES
        if restarts and has_room and how not in (None, append):
            assert self.tier.close()
            self.open(self.limit_bytes)
        assert self.read(self.model) == self.rows(content for content in self.model if content not in lost)
        assert self.failures() == reasons
        for content in () if lost else some:
            os.truncate(self.tier.path / row_name(content), HEADER_BYTES + len(self.written[content]))
        self.mend(lost)

    @rule()
    def vanish(self):
        # What was cleared before is removed then.
        self.write_and_read(self.fresh())
        shutil.rmtree(self.tier.path)
        lost, some = set(self.model), list(self.model)[::2]
        assert self.read(some) == {}
        assert self.failures() == {"disk_gone": len(some)}
        self.model.clear()
        self.mend(lost)
        self.put_others()
        assert self.failures() == {"disk_gone": 1}

    @rule()
    def nothing_can_be_removed(self):
        self.files.faults["remove"] = errno.EPERM
        rows = self.fresh(30, 20_000)
        failed = self.driver.write(rows)
        assert self.failures().keys() == {"disk_read_only", "disk_paused"}
        assert self.read(rows) == {content: row for content, row in rows.items() if content not in failed}
        self.model = OrderedDict.fromkeys(self.driver.index, 32 << 10)
        self.mend()

    @rule(
        call=st.sampled_from(["open", "listing"]),
        error=st.sampled_from([errno.EIO, errno.EACCES]),
        clears=st.booleans(),
    )
    def start_without_the_folder(self, call, error, clears):
        assert self.tier.close()
        self.files.faults[call] = error
        self.open(self.limit_bytes)
        rows = self.fresh()
        assert self.read(self.model) == {}
        assert set(self.driver.write(rows)) == set(rows)
        assert self.failures().keys() == {REASONS[error], "disk_paused"}
        if clears:
            self.tier.clear()
            self.model.clear()
        self.mend()

    @invariant()
    def agrees(self):
        self.driver.poll()
        check(self.tier)
        assert self.driver.index == self.model.keys()
        assert self.tier._catalog.contents() == list(reversed(self.model))
        assert all((self.tier.path / name).exists() for name in self.OTHERS)
        assert self.files.most_bytes <= self.limit_bytes
        assert taken_bytes(self.path) <= self.limit_bytes
        assert not self.failures()


TestDiskAgainstADictionary = DiskMachine.TestCase
TestDiskAgainstADictionary.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


SOON = {"pause_s": 0.01}


@pytest.fixture
def files():
    return Faults()


def writes_again(driver, seed=999):
    """Whether what is written now is kept and served, before long."""

    def is_kept() -> bool:
        nonlocal seed
        seed += 1
        rows = some_rows(3, seed)
        return driver.write(rows) == () and driver.read(lengths_of(rows)) == rows

    until(is_kept, f"nothing is kept: {driver.tier.state()} {driver.failures}")
    assert not driver.tier.state()["paused_by"]


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
    assert not driver.tier.state()["paused_by"]
    # Nothing of a row that did not fit is left behind.
    driver.tier.close()
    again = open_driver(tmp_path, 64 << 20)
    assert again.index == driver.index
    assert not again.failures


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


def test_nothing_wrong_is_served_after_kills():
    command = [sys.executable, "-m", "tests.faults", "disk", "--count", "12"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stdout + told.stderr
    report = json.loads(told.stdout)
    assert (report["kills"], report["wrong"], report["problems"]) == (12, 0, [])
    assert report["served"] > 0

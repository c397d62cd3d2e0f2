"""Disks that are full, read-only, broken or gone: misses and counted reasons, and service afterwards."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading

import pytest

from tests.faults.disk_rows import taken_bytes
from tests.offload.disk_kit import Faults, FaultyFolder, open_driver, row_paths, wait_until
from tests.offload.tier_suite import lengths_of, rows_of, some_rows

SOON = {"retry_s": (0.01, 0.05)}


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

    wait_until(is_kept, f"nothing is kept: {driver.tier.state()} {driver.failures}")
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
    assert driver.tier.close()


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
    again.tier.close()


def test_a_full_disk_with_nothing_of_ours_to_give(tmp_path, files):
    driver = open_driver(tmp_path, open_folder=files, **SOON)
    files.room_bytes = 0
    rows = some_rows(20, 1)
    assert set(driver.write(rows)) == set(rows)
    assert driver.failures["disk_full"]
    files.room_bytes = None
    writes_again(driver)
    assert driver.tier.close()


def test_a_row_that_was_written_in_part_is_removed(tmp_path, files):
    driver = open_driver(tmp_path, open_folder=files, **SOON)
    whole = some_rows(5, 1, length=1000)
    assert driver.write(whole) == ()
    files.room_bytes, files.no_room = 500, errno.EIO
    assert driver.write(some_rows(1, 2, length=1000))
    assert [file.stat().st_size for file in driver.tier.path.glob("*.kv*")] == 5 * [1132]
    # Where it cannot be removed it takes room, until a restart removes it.
    files.room_bytes = None
    files.calls.clear()
    files.faults["rename"] = files.faults["remove"] = errno.EIO
    wait_until(
        lambda: driver.write(some_rows(1, 3, length=100_000)) and files.calls.get("rename"), "no write"
    )
    lengths = [file.stat().st_size for file in driver.tier.path.glob("*.kv*")]
    assert max(lengths) == 100_132
    assert sum(lengths) <= driver.tier.state()["taken_bytes"]
    assert driver.tier.close()
    again = open_driver(tmp_path)
    assert again.index == driver.index
    assert again.failures == {"disk_torn": 1}
    assert len(list(again.tier.path.glob("*.kv*"))) == 5
    assert again.read(lengths_of(whole)) == whole
    again.tier.close()


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
    assert driver.tier.close()


def test_too_many_open_files_lose_nothing(tmp_path, files):
    driver = open_driver(tmp_path, open_folder=files)
    rows = some_rows(50, 1)
    driver.write(rows)
    files.faults["open"] = errno.EMFILE
    assert driver.read(lengths_of(rows)) == {}
    del files.faults["open"]
    assert driver.index == set(rows)
    assert driver.read(lengths_of(rows)) == rows
    assert driver.tier.close()


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
    assert driver.tier.close()


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    driver = open_driver(tmp_path / "cache", 8 << 20, **SOON)
    rows = some_rows(300, 1, length=1000)
    driver.write(rows)
    shutil.rmtree(tmp_path / "cache")
    assert driver.read(lengths_of(rows)) == {}
    assert driver.failures["disk_gone"]
    assert not driver.index
    writes_again(driver)
    assert driver.write(rows) == ()
    assert driver.read(lengths_of(rows)) == rows
    assert taken_bytes(tmp_path) < 2 << 20
    assert driver.tier.close()


def test_a_folder_that_vanishes_between_two_writes(tmp_path):
    driver = open_driver(tmp_path / "cache", 8 << 20, **SOON)
    for seed in range(6):
        rows = some_rows(200, seed, length=1000)
        wait_until(lambda rows=rows: driver.write(rows) == (), f"never kept: {driver.failures}")
        assert driver.read(lengths_of(rows)) == rows
        shutil.rmtree(tmp_path / "cache")
    assert driver.tier.close()


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
    assert driver.tier.close()


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
    assert driver.tier.close()


def test_a_folder_that_cannot_be_used_at_the_start_is_tried_again(tmp_path, files):
    files.faults["open"] = errno.EACCES
    driver = open_driver(tmp_path, open_folder=files, **SOON)
    rows = some_rows(10, 1)
    assert driver.read(lengths_of(rows)) == {}
    assert set(driver.write(rows)) == set(rows)
    assert driver.failures["disk_read_only"]
    del files.faults["open"]
    writes_again(driver)
    assert driver.tier.close()


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
    again.tier.close()


def test_a_read_only_folder_still_gives_back(tmp_path, files, monkeypatch):
    rows = some_rows(50, 1)
    first = open_driver(tmp_path)
    first.write(rows)
    first.tier.close()
    usual_open = FaultyFolder.open

    def open_read_only(self, name, flags):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return usual_open(self, name, flags)

    monkeypatch.setattr(FaultyFolder, "open", open_read_only)
    driver = open_driver(tmp_path, open_folder=files, **SOON)
    assert driver.read(lengths_of(rows)) == rows
    assert driver.write(some_rows(5, 2))
    assert driver.failures == {"disk_read_only": 1, "disk_paused": 4}
    assert driver.tier.close()


def test_rows_beyond_a_limit_on_the_length_of_files_fail_alone(tmp_path):
    code = """
import resource, sys
from pathlib import Path
from tests.offload.tier_suite import lengths_of, some_rows
from tests.offload.disk_kit import open_driver
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
driver = open_driver(Path(sys.argv[1]), 8 << 20, retry_s=(0.01, 0.05))
rows, long = some_rows(50, 1, length=1000), some_rows(3, 2, length=300_000)
assert set(driver.write(long | rows)) == set(long)
assert driver.read(lengths_of(rows)) == rows
assert driver.failures == {"disk_too_large": 3}
assert driver.tier.close()
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200_000


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
    assert driver.tier.close()


def test_a_disk_that_hangs_is_left_behind(tmp_path, files, monkeypatch):
    driver = open_driver(tmp_path, open_folder=files)
    monkeypatch.setattr("kvconnect.offload.disk.disk_tier._CLOSE_TIMEOUT_S", 0.2)
    is_begun, is_free = threading.Event(), threading.Event()
    monkeypatch.setattr(FaultyFolder, "write", lambda *_args: is_begun.set() or (is_free.wait() and 0))
    driver.tier.write(100, rows_of(some_rows(3, 1)))
    assert is_begun.wait(30.0)
    assert not driver.tier.close()
    is_free.set()
    assert len(driver.wait("written", 100)) == 3
    assert driver.tier.close()


def test_a_small_disk_that_is_really_full(tmp_path):
    code = """
import sys
from pathlib import Path
from tests.faults.disk_rows import taken_bytes
from tests.offload.tier_suite import lengths_of, some_rows
from tests.offload.disk_kit import open_driver
path = Path(sys.argv[1])
driver = open_driver(path, 8 << 20, retry_s=(0.01, 0.05))
for seed in range(40):
    rows = some_rows(100, seed, length=1000)
    failed = set(driver.write(rows))
    found = driver.read(lengths_of(rows))
    assert found == {content: row for content, row in rows.items() if content not in failed}
    assert len(found) > 50
assert driver.failures["disk_full"]
assert taken_bytes(path) > 2 << 20
assert driver.tier.close()
"""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=3m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*unshare, "sh", "-c", mount]).returncode:
        pytest.skip("this machine lends no small disk")
    command = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    subprocess.run([*unshare, "sh", "-c", command, sys.executable, code], check=True)


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
    assert driver.tier.close()


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
    assert again.tier.close()

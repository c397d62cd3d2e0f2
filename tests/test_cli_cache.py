"""``kvconnect cache``, as an operator uses it on what nodes have left, and on what they use."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from kvconnect.cli import app
from kvconnect.errors import ConfigError
from kvconnect.offload.disk.table import ENTRY_BYTES, TRAILER_BYTES
from kvconnect.offload.record import HEADER_BYTES
from kvconnect.testing.tier_suite import some_rows
from tests.offload.disk_kit import NAMESPACE, open_driver, segment_files

ROWS = some_rows(100, 1, length=1000)
FACTS = {"stack": {"model": "some/model"}, "rank": 0}


@pytest.fixture
def cache(tmp_path):
    """Run ``kvconnect cache COMMAND --path ...``; what it prints. An error of ours is raised."""

    def run(*arguments, code=0):
        command, *others = map(str, arguments)
        result = CliRunner().invoke(app, ["cache", command, "--path", str(tmp_path), *others])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return json.loads(result.output) if "--json" in others else result.output

    return run


def keep(path, rows=ROWS, **settings):
    """Leave rows in a path; the folder they are in."""
    driver = open_driver(path, 8 << 20, 64 << 10, facts=FACTS, **settings)
    assert driver.write(rows) == ()
    assert driver.tier.close()
    return driver.tier.path


def test_ls_says_what_is_there(cache, tmp_path):
    assert "nothing is kept here" in cache("ls")
    folder = keep(tmp_path)
    other = keep(tmp_path, some_rows(7, 2, length=500), rank=3, world_size=4, namespace="b" * 64)
    (tmp_path / "something else").mkdir()
    text = cache("ls")
    assert folder.name in text
    assert "some/model" in text
    first, second = cache("ls", "--json")["folders"]
    assert first["name"] == folder.name
    assert first["namespace"] == NAMESPACE
    assert (first["model"], first["rank"], first["records"], first["segments"]) == ("some/model", 0, 100, 2)
    assert first["length_bytes"] == 100 * (1000 + HEADER_BYTES + ENTRY_BYTES) + 2 * TRAILER_BYTES
    assert first["holder"] == ""
    assert (second["name"], second["rank"], second["records"]) == (other.name, 3, 7)
    assert first["newest_s"] >= first["oldest_s"] > 1e9


def test_ls_names_the_process_that_uses_a_folder(cache, tmp_path):
    driver = open_driver(tmp_path)
    driver.write(ROWS)
    (found,) = cache("ls", "--json")["folders"]
    assert found["holder"] == str(os.getpid())
    assert found["records"] == 100
    assert driver.write(some_rows(5, 2)) == ()
    driver.tier.close()
    assert cache("ls", "--json")["folders"][0]["holder"] == ""


def test_verify_finds_nothing_wrong_in_what_is_right(cache, tmp_path):
    keep(tmp_path)
    (report,) = cache("verify", "--json")["folders"]
    assert (report["records"], report["wrong"]) == (100, [])
    assert "100 records are right" in cache("verify")


def test_verify_says_what_is_wrong_and_where(cache, tmp_path):
    folder = keep(tmp_path)
    foreign = keep(tmp_path, some_rows(3, 2, length=1000), namespace="b" * 64)
    first, second = sorted(folder.glob("*.kv"))
    length = HEADER_BYTES + 1000
    data = bytearray(first.read_bytes())
    data[3 * length + HEADER_BYTES + 17] ^= 1
    data[5 * length + 3] ^= 1
    data[7 * length : 8 * length] = next(foreign.glob("*.kv")).read_bytes()[:length]
    first.write_bytes(data)
    count = (len(data) - TRAILER_BYTES) // (length + ENTRY_BYTES)
    rest = (100 - count) * length
    second.write_bytes(second.read_bytes()[: rest - 1])
    result = cache("verify", "--name", folder.name[:6], "--json", code=1)
    (report,) = result["folders"]
    content = list(ROWS)[3]
    assert [(one["file"], one["offset"]) for one in report["wrong"]] == [
        (first.name, 3 * length),
        (first.name, 5 * length),
        (first.name, 7 * length),
        (second.name, rest - length),
    ]
    assert content[1].hex() in report["wrong"][0]["text"]
    assert "b" * 64 in report["wrong"][2]["text"]
    assert report["records"] == 96
    text = cache("verify", code=1)
    assert f"{first}, byte {3 * length}" in text
    assert f"{folder.name}: 96 records are right" in text
    assert f"{foreign.name}: 3 records are right" in text


def test_verify_sees_a_damaged_table(cache, tmp_path):
    folder = keep(tmp_path)
    first = min(folder.glob("*.kv"))
    data = bytearray(first.read_bytes())
    data[-TRAILER_BYTES - 10] ^= 1
    first.write_bytes(data)
    (report,) = cache("verify", "--json", code=1)["folders"]
    assert report["records"] == 100
    ((file, text),) = [(one["file"], one["text"]) for one in report["wrong"]]
    assert (file, text) == (first.name, "the table of the records is damaged")
    assert cache("ls", "--json")["folders"][0]["records"] == 100


def test_clear_removes_what_it_is_told_to(cache, tmp_path):
    keep(tmp_path)
    other = keep(tmp_path, namespace="b" * 64)
    with pytest.raises(ConfigError, match="either --name or --all"):
        cache("clear")
    with pytest.raises(ConfigError, match="--name is 'c'; in .* there are"):
        cache("clear", "--name", "c")
    assert cache("clear", "--name", "0123", "--json")["removed"] == [f"{NAMESPACE[:32]}-rank0"]
    assert [path.name for path in tmp_path.iterdir()] == [other.name]
    assert "removed" in cache("clear", "--all")
    assert not list(tmp_path.iterdir())
    assert "nothing is kept" in cache("clear", "--all")


def test_clear_leaves_alone_what_a_process_uses(cache, tmp_path):
    keep(tmp_path, namespace="b" * 64)
    driver = open_driver(tmp_path)
    driver.write(ROWS)
    with pytest.raises(ConfigError, match=f"used by process {os.getpid()}"):
        cache("clear", "--all")
    assert len(list(tmp_path.iterdir())) == 2
    assert len(segment_files(driver.tier)) == 1
    cache("clear", "--name", "bbbb")
    driver.tier.close()
    cache("clear", "--all")
    assert not list(tmp_path.iterdir())


def test_clear_says_what_is_in_its_way(cache, tmp_path):
    folder = keep(tmp_path)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be removed"):
        cache("clear", "--all")
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_path_that_is_not_there_is_refused(cache, tmp_path, command):
    with pytest.raises(ConfigError, match="--path is"):
        cache(command, "--path", tmp_path / "nowhere")

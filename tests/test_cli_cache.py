"""``kvconnect cache``, as an operator uses it on what nodes have left, and on what they use."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from kvconnect.cli import app
from kvconnect.errors import ConfigError
from kvconnect.offload.disk.folder import row_name
from kvconnect.offload.record import HEADER_BYTES
from tests.offload.disk_kit import NAMESPACE, open_driver, row_paths
from tests.offload.tier_suite import some_rows

ROWS = some_rows(100, 1, length=1000)


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
    driver = open_driver(path, 8 << 20, model="ModelClass", **settings)
    assert driver.write(rows) == ()
    assert driver.tier.close()
    return driver.tier.path


def test_ls_says_what_is_there(cache, tmp_path):
    assert "nothing is kept here" in cache("ls")
    folder = keep(tmp_path)
    more = some_rows(7, 2, length=500)
    other = keep(tmp_path, more, rank=3, world_size=4, namespace="b" * 64, label="/models/mine")
    (tmp_path / "something else").mkdir()
    text = cache("ls")
    assert folder.name in text
    assert "ModelClass\n" in text
    assert "/models/mine (ModelClass)" in text
    first, second = cache("ls", "--json")["folders"]
    assert first["name"] == folder.name
    assert first["namespace"] == NAMESPACE
    assert (first["model"], first["rank"], first["records"]) == ("ModelClass", 0, 100)
    assert first["length_bytes"] == 100 * (1000 + HEADER_BYTES)
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


def test_verify_says_what_is_wrong(cache, tmp_path):
    folder = keep(tmp_path)
    foreign = keep(tmp_path, some_rows(3, 2, length=1000), namespace="b" * 64)
    paths = [folder / row_name(content) for content in ROWS]
    flipped = bytearray(paths[3].read_bytes())
    flipped[HEADER_BYTES + 17] ^= 1
    paths[3].write_bytes(flipped)
    paths[5].write_bytes(b"x" + paths[5].read_bytes()[1:])
    paths[7].write_bytes(next(foreign.glob("*.kv")).read_bytes())
    paths[9].write_bytes(paths[9].read_bytes()[:-1])
    paths[11].write_bytes(paths[12].read_bytes())
    text = cache("verify", code=1)
    wrong = dict(line.split(": ", 1) for line in text.splitlines() if line.startswith(f"{folder}/"))
    assert wrong.keys() == {str(paths[index]) for index in (3, 5, 7, 9, 11)}
    assert list(ROWS)[3][1].hex() in wrong[str(paths[3])]
    assert wrong[str(paths[5])] == "no intact header"
    assert "b" * 64 in wrong[str(paths[7])]
    assert f"{folder.name}: 95 records are right" in text
    assert f"{foreign.name}: 3 records are right" in text
    assert cache("verify", "--name", "bbbb").startswith(f"{foreign.name}: 3 records are right")


def test_clear_removes_what_it_is_told_to(cache, tmp_path):
    keep(tmp_path)
    other = keep(tmp_path, namespace="b" * 64)
    with pytest.raises(ConfigError, match="either --name or --all"):
        cache("clear")
    with pytest.raises(ConfigError, match="--name is 'c'; in .* there are"):
        cache("clear", "--name", "c")
    assert cache("clear", "--name", "0123") == f"{NAMESPACE[:32]}-rank0: removed\n"
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
    assert len(row_paths(driver.tier)) == 100
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

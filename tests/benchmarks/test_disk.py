"""``python -m benchmarks disk`` measures what it says, in little."""

from __future__ import annotations

import json

import pytest

from benchmarks.disk import Options, bench_disk
from benchmarks.options import run_benchmark
from kvconnect.errors import ConfigError


def run(path, json_output=False, **settings):
    options = {"record_bytes": (64 << 10, 1 << 20), "total_bytes": 4 << 20, "records": 500}
    options |= {"path": str(path), "repeat": 1}
    run_benchmark("disk", bench_disk, Options(**options | settings), json_output=json_output)


def test_every_figure_is_there(tmp_path, capsys):
    run(tmp_path, json_output=True)
    small, large, recovery = map(json.loads, capsys.readouterr().out.splitlines())
    assert [small["record_bytes"], large["record_bytes"]] == [64 << 10, 1 << 20]
    assert small["total_bytes"] == large["total_bytes"] == 4 << 20
    assert all(
        value > 0 for found in (small, large, recovery) for value in found.values() if value != found["bench"]
    )
    assert recovery["records"] == 500
    assert not list(tmp_path.iterdir())
    run(tmp_path)
    assert "disk recovery" in capsys.readouterr().out


def test_a_folder_that_is_not_there_or_too_small_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--path is"):
        run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="bytes free; this takes"):
        run(tmp_path, total_bytes=1 << 50)

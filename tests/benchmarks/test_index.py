"""The benchmark of the index runs, and says what it measured."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.index import bench_index
from kvconnect.errors import ConfigError


def test_every_kind_of_call_is_timed():
    done = CliRunner().invoke(
        app, ["index", "--contents", "65536", "--policy", "lru", "--repeat", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    results = [json.loads(line) for line in done.output.splitlines()]
    assert {(result["policy"], result["contents"]) for result in results} == {("lru", 65536)}
    calls = {(result["call"], result["keys"]) for result in results}
    assert {("lookup", 8192), ("eviction", 8192), ("reserve", 1), ("commit", 1)} <= calls
    assert all(0 < result["median_us"] <= result["worst_us"] for result in results)


def test_a_policy_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="the policy is 'fifo', accepted: lru, arc"):
        bench_index(sizes=(65536,), policies=("fifo",), repeat=1, json_output=True)

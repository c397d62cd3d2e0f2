"""The benchmark of the index runs, and says what it measured."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from benchmarks.__main__ import make_app


def test_every_kind_of_call_is_timed():
    command = ["index", "--contents", "65536", "--repeat", "2", "--json"]
    done = CliRunner().invoke(make_app(command), command)
    assert done.exit_code == 0, done.output
    results = [json.loads(line) for line in done.output.splitlines()]
    assert {result["contents"] for result in results} == {65536}
    calls = {(result["call"], result["keys"]) for result in results}
    assert {("lookup", 8192), ("eviction", 8192), ("reserve", 1), ("commit", 1)} <= calls
    assert all(0 < result["median_us"] <= result["worst_us"] for result in results)

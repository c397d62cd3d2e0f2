"""The long measurements, kept short: that they run, and that they notice what they are for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import pair_load


def bench(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True, timeout=110
    )
    return (
        done.returncode,
        [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")],
        done,
    )


@pytest.mark.parametrize("model", ["sliding", "hybrid"])
def test_a_soak_leaves_nothing_over(model):
    code, (report,), done = bench(
        "soak", "--engine", "nixl", "--model", model, "--prompts", "60", "--concurrency", "8"
    )
    assert code == 0, done.stdout + done.stderr
    assert (report["answered"], report["wrong"], report["left_over"]) == (60, 0, {})
    assert report["received"] >= 55
    assert report["kv_bytes"] > 0


def test_a_soak_notices_blocks_that_stay(monkeypatch):
    class Child:
        name, url = "prefill", "http://nowhere"

    rest = {"leases": 0, "sendings": 0, "loads": 0}
    for blocks, connector in (
        ({"free": 9, "held": 1, "total": 10}, rest),
        ({"free": 9, "held": 0, "total": 10}, rest),
        ({"free": 10, "held": 0, "total": 10}, {**rest, "leases": 1}),
    ):
        state = {"blocks": blocks, "connector": connector}
        monkeypatch.setattr(pair_load, "fetch_json", lambda url, state=state: state)
        monkeypatch.setattr(pair_load, "_REST_TIMEOUT_S", 0.0)
        assert pair_load._left_over(Child()) == state
    good = {"blocks": {"free": 10, "held": 0, "total": 10}, "connector": rest}
    monkeypatch.setattr(pair_load, "fetch_json", lambda url: good)
    assert pair_load._left_over(Child()) is None


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_an_idle_pair_costs_next_to_nothing(engine):
    code, (report,), done = bench("idle", "--engine", engine, "--seconds", "4")
    assert code == 0, done.stdout + done.stderr
    # The aim is 0.05 of a core over 30 s. A progress thread would take a whole one.
    assert max(report["more_than_alone"].values()) < 0.2

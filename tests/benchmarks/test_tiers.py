"""The benchmarks of host memory and disk: wrong bytes fail them, and prompts are found where they are."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch

from benchmarks import offload, returning
from benchmarks.harness import run_benchmark
from benchmarks.loops import DecodeLoop
from benchmarks.returning import drop_pages, resident_share

DECODE = offload.Options("cpu", decode=True, rounds=1, seconds=0.01, context=32, batch=2)


def test_the_check_sees_a_wrong_byte():
    case = offload.Case("cpu", 256, 2, 3)
    copier = case.copier()
    rows = case.rows["scattered"]
    assert case.verified(copier, rows)
    restore = copier.restore

    def spoil(copies, after=None):
        ticket = restore(copies, after)
        page = case.cache.tensors["layer1"].tensor[case.target[2]].view(torch.uint8)
        page[7, 0, 3] ^= 1
        return ticket

    copier.restore = spoil
    assert not case.verified(copier, rows)


def test_wrong_bytes_fail_the_run(capsys, monkeypatch):
    monkeypatch.setattr(offload.Case, "verified", lambda self, copier, rows: False)
    options = offload.Options("cpu", page_bytes=(1024,), regions=3, blocks=(4,))
    assert run_benchmark("offload", offload.bench_offload, options, json_output=True) == 1
    assert not json.loads(capsys.readouterr().out.splitlines()[0])["verified"]


def test_a_step_longer_than_the_window_counts(capsys, monkeypatch):
    step = DecodeLoop.step

    def slow(loop, *args):
        time.sleep(0.4)
        return step(loop, *args)

    monkeypatch.setattr(DecodeLoop, "step", slow)
    assert run_benchmark("offload", offload.bench_offload, DECODE, json_output=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["flow"] for one in lines] == ["out", "back", "both"]
    for one in lines:
        assert 0 < one["tokens_per_s_with"] <= 2 / 0.4
        assert one["ratio"] > 0


def test_every_prompt_is_found_on_every_way(capsys, tmp_path):
    options = returning.Options(prompt_tokens=200, prompts=3, batched_tokens=64, disk_path=tmp_path)
    assert run_benchmark("returning", returning.bench_returning, options, json_output=True) == 0
    report = json.loads(capsys.readouterr().out)
    ways = {way["way"]: way for way in report["ways"]}
    assert list(ways) == ["recomputed", "computed, and kept", "own prefix cache", "CPU tier", "disk tier"]
    assert [way["cached_tokens"] for way in ways.values()] == [0, 0, 192, 192, 192]
    assert ways["disk tier"]["as_recomputed"] == 3
    assert report["kv_bytes"] == 200 * options.size.token_bytes


def test_pages_of_files_are_dropped(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one").write_bytes(os.urandom(4 << 20))
    (tmp_path / "empty").write_bytes(b"")
    before = resident_share(tmp_path)
    if before is None:
        pytest.skip("this system does not say what it has in memory")
    assert before > 0.9
    drop_pages(tmp_path)
    after = resident_share(tmp_path)
    assert after is not None
    assert after <= before

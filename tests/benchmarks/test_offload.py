"""``python -m benchmarks offload``: tiny runs of it on this machine's processor."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks.node.loops import DecodeLoop
from benchmarks.offload.copies import Case
from benchmarks.offload.options import Options
from benchmarks.offload.runner import bench_offload
from benchmarks.options import run_benchmark
from kvconnect.errors import ConfigError


def run(capsys, json_output=True, **given):
    settings = {
        "device": "cpu",
        "page_bytes": (1024,),
        "regions": 3,
        "blocks": (4,),
    }
    options = Options(**{**settings, **given})
    code = run_benchmark("offload", bench_offload, options, json_output=json_output)
    return code, capsys.readouterr().out


def test_both_directions_are_measured_and_checked(capsys):
    code, out = run(capsys, page_bytes=(1024, 192))
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(one["page_bytes"], one["rows"]) for one in lines] == [
        (1024, "scattered"),
        (1024, "adjacent"),
        (192, "scattered"),
        (192, "adjacent"),
    ]
    for one in lines:
        assert one["verified"]
        assert one["total_bytes"] == one["page_bytes"] * 3 * 4
        for name in ("contiguous_out", "contiguous_back", "out_host_us", "back_host_us"):
            assert one[name] > 0


def test_wrong_bytes_fail_the_run(capsys, monkeypatch):
    monkeypatch.setattr(Case, "verified", lambda self, copier, rows: False)
    code, out = run(capsys)
    assert code == 1
    assert not json.loads(out.splitlines()[0])["verified"]


def test_the_check_sees_a_wrong_byte():
    case = Case("cpu", 256, 2, 3)
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


def test_a_table_is_printed_for_people(capsys):
    code, out = run(capsys, json_output=False)
    assert code == 0
    assert "contiguous_out" in out
    assert "offload, device cpu, page_bytes 1024" in out


def test_decode_steps_beside_copies(capsys):
    options = Options("cpu", decode=True, rounds=1, seconds=0.2, context=32, batch=2)
    assert run_benchmark("offload", bench_offload, options, json_output=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["flow"] for one in lines] == ["out", "back", "both"]
    for one in lines:
        assert one["tokens_per_s_with"] > 0
        assert one["ratio"] > 0


def test_a_step_longer_than_the_window_counts(capsys, monkeypatch):
    step = DecodeLoop.step

    def slow(loop, *args):
        time.sleep(0.4)
        return step(loop, *args)

    monkeypatch.setattr(DecodeLoop, "step", slow)
    options = Options("cpu", decode=True, rounds=1, seconds=0.01, context=32, batch=2)
    assert run_benchmark("offload", bench_offload, options, json_output=True) == 0
    for line in capsys.readouterr().out.splitlines():
        assert 0 < json.loads(line)["tokens_per_s_with"] <= 2 / 0.4


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"device": "tpu"}, "device is 'tpu'; accepted: cpu, cuda"),
        ({"page_bytes": (100,)}, "page_bytes is 100; accepted: multiples of 64"),
    ],
)
def test_options_that_are_not_accepted(capsys, given, text):
    with pytest.raises(ConfigError, match=text):
        run(capsys, **given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": "70b"}, "model is '70b'; accepted: 8b, tiny"),
        ({"rounds": 0}, "rounds is 0, it must be at least 1"),
        ({"seconds": 0.0}, "seconds is 0.0, it must be more than 0"),
        ({"gb_per_s": -1.0}, "gb_per_s is -1.0, it must be at least 0"),
    ],
)
def test_decode_options_that_are_not_accepted(given, text):
    with pytest.raises(ConfigError, match=text):
        Options("cpu", **given)


def test_decode_options_of_a_device_that_does_not_exist():
    with pytest.raises(ConfigError, match="device is 'tpu'; accepted: cpu, cuda"):
        Options("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(capsys):
    with pytest.raises(ConfigError, match="torch sees no CUDA device here"):
        run(capsys, device="cuda")

"""The benchmark of prompts that are sent while they are computed runs, and says what happened."""

from __future__ import annotations

import json

import pytest

from benchmarks import streaming
from benchmarks.options import run_benchmark
from benchmarks.streaming import Options, bench_streaming

OPTIONS = Options(
    engine="nixl",
    lengths=(600, 50),
    prompts=2,
    batched_tokens=64,
    min_tokens=200,
    extra={"slot_bytes": 1 << 20},
)


def test_long_prompts_leave_early_and_short_ones_do_not(capsys):
    assert run_benchmark("streaming", bench_streaming, OPTIONS, json_output=True) == 0
    long, short = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (long["tokens"], short["tokens"]) == (600, 50)
    assert long["early"] > 0.3
    assert short["early"] == 0
    for case in (long, short):
        assert case["wrong"] == 0
        assert 0 < case["alone_s"] < 60
        assert case["least"] <= case["ratio"] <= case["most"]


@pytest.mark.parametrize("json_output", [True, False])
def test_an_answer_that_differs_is_counted_and_fails(capsys, monkeypatch, json_output):
    answers = iter([[1]] * 5 + [[1], [2], [1], [1], [1], [1]] * 9)
    monkeypatch.setattr(streaming, "_start", lambda *_: streaming._Side("p", "r"))
    monkeypatch.setattr(streaming, "read_metrics", lambda url: {})
    monkeypatch.setattr(streaming, "ask", lambda *_, **__: next(answers))
    monkeypatch.setattr(streaming, "tokens_of", lambda answer: answer)
    assert run_benchmark("streaming", bench_streaming, OPTIONS, json_output=json_output) == 1
    assert "wrong" in capsys.readouterr().out

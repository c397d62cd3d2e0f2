"""The benchmark of transfers: its figures agree, wrong bytes and children that fail are noticed."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import process, transfer
from benchmarks.cache import BenchCache, CacheShape, Layout, Layouts
from benchmarks.harness import run_benchmark
from benchmarks.process import ChildPair, ChildProcess, StepFailed
from tests.benchmarks.sides import PairHere

TINY = transfer.Options(
    engines=("memory",),
    page_bytes=(1024,),
    blocks=(3,),
    regions=2,
    requests=4,
    in_flight=(1, 2),
    repeat=2,
    timeout_s=20.0,
    batch_bytes=1 << 16,
)
SIDES = "tests.benchmarks.sides"


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.setattr(transfer, "ChildPair", PairHere)


@pytest.fixture
def pair():
    with PairHere(transfer.WORKER_SIDE, {}, 20.0) as made:
        yield made


def open_rounds(pair):
    ((case,),) = TINY.cases("memory")
    rounds = transfer.PairRounds(pair, TINY, case)
    rounds.draw(3, 2)
    return rounds


@pytest.mark.parametrize(
    ("layouts", "page_bytes"),
    [("nhd16:nhd16", 4096), ("nhd:hnd", 16384), ("hnd4:nhd4", 2048), ("nhd1:hnd1", 24)],
)
def test_the_figures_of_every_case_agree(layouts, page_bytes):
    options = replace(TINY, layouts=(Layouts.parse(layouts),), page_bytes=(page_bytes,), blocks=(1, 3))
    limit = transfer.measure_limit(options, "memory")
    (cases,) = options.cases(limit.engine)
    timings = list(transfer.measure_pairs(options, cases, limit))
    assert [
        (one["blocks"], one["requests_in_flight"], one["requests"], one["samples"]) for one in timings
    ] == [(1, 1, 1, 8), (1, 2, 4, 2), (3, 1, 1, 8), (3, 2, 4, 2)]
    for one in timings:
        assert one["total_bytes"] == one["requests"] * one["blocks"] * page_bytes * 2
        assert one["gb_per_s"] == pytest.approx(one["total_bytes"] / one["seconds"] / 1e9)
        assert one["of_contiguous"] == pytest.approx(one["gb_per_s"] / limit.contiguous_gb_per_s)
        assert 0 < one["best_seconds"] <= one["seconds"]
        assert one["copies"] >= 1


def test_protocols_can_take_turns(monkeypatch):
    protocols = ("UCX", "auto", "UCX")
    options = replace(
        TINY, protocols=protocols, blocks=(2,), in_flight=(1,), in_turn=True, repeat=3, requests=2
    )
    (cases,) = options.cases("nixl")
    turns = []
    take_round = transfer.PairRounds.round

    def noted(self, *arguments):
        turns.append(self._case.protocol)
        return take_round(self, *arguments)

    monkeypatch.setattr(transfer.PairRounds, "round", noted)
    timings = list(transfer.measure_pairs(options, cases, None))
    assert [(one["protocol"], one["samples"]) for one in timings] == [("UCX", 6), ("auto", 6)]
    assert turns[-12:] == ["UCX", "auto"] * 6
    # Between CPUs auto is shared memory.
    assert timings[1]["lane"] == "shared_memory"


def test_the_limit_reaches_every_byte():
    with PairHere(transfer.ENGINE_SIDE, {}, 20.0) as pair:
        _, target = pair.both("open", *[(TINY, "memory", "cpu")] * 2)
        pair.prefill.ask("connect", target)
        pair.prefill.side._buffer.random_()
        pair.prefill.ask("contiguous", target.max_bytes)
        assert torch.equal(pair.prefill.side._buffer, pair.decode.side._buffer)


@pytest.mark.parametrize(
    ("device", "engine", "protocol"),
    [("cpu", "nixl", "UCX"), ("cpu", "mooncake", "tcp"), ("cpu", "memory", "auto"), ("cuda", "nixl", "auto")],
)
def test_an_engine_carries_the_bytes_where_no_protocol_is_named(device, engine, protocol):
    ((case,),) = replace(TINY, device=device).cases(engine)
    assert case.protocol == protocol


# --- what it notices ------------------------------------------------------------------------------


def test_wrong_and_missing_bytes_are_noticed(pair):
    rounds = open_rounds(pair)
    result = rounds.round(3, 4, 2)
    rounds.check(result, 2)
    cache = pair.decode.side.cache
    page = cache.tensors["layer1"].tensor[cache.slots[1][2]].view(torch.uint8)
    page[5, 0, 7] ^= 1
    with pytest.raises(StepFailed, match="1 of 12 pages do not hold the bytes that were sent"):
        rounds.check(result, 2)
    page[5, 0, 7] ^= 1
    first, second = cache.slots[0][:2]
    tensor = cache.tensors["layer0"].tensor
    tensor[[first, second]] = tensor[[second, first]]
    with pytest.raises(StepFailed, match="2 of 12 pages"):
        rounds.check(result, 2)
    pair.decode.ask("clear")
    with pytest.raises(StepFailed, match="12 of 12 pages"):
        rounds.check(result, 2)


def test_a_load_that_fails_says_why(pair):
    rounds = open_rounds(pair)
    pair.prefill.side.cache.slots = [slot[:2] for slot in pair.prefill.side.cache.slots]
    with pytest.raises(StepFailed, match="request round1-[01] was not loaded: .+"):
        rounds.round(3, 2, 2)


def test_digests_see_tokens_and_not_layouts():
    shapes = [CacheShape(2, 9, 2, 4, Layout("nhd", 4)), CacheShape(2, 6, 2, 4, Layout("hnd", 8))]
    nhd, hnd = (BenchCache(shape, "cpu", seed) for shape, seed in zip(shapes, (1, 2), strict=True))
    nhd.slots, hnd.slots = [(3, 1, 8, 4)], [(5, 2)]
    for name in nhd.tensors:
        ours, theirs = nhd.tensors[name].tensor, hnd.tensors[name].tensor
        for token in range(16):
            for head in range(2):
                theirs[(5, 2)[token // 8], head, token % 8] = ours[(3, 1, 8, 4)[token // 4], token % 4, head]
    assert np.array_equal(nhd.digests([0], 8), hnd.digests([0], 8))
    before = hnd.digests([0], 8)
    hnd.tensors["layer1"].tensor.view(torch.uint8)[2, 1, 7, 3] ^= 0x80
    assert (hnd.digests([0], 8) != before).tolist() == [[[False, False], [False, True]]]


def test_a_failure_is_shown_and_the_rest_goes_on(monkeypatch, capsys):
    def measure_limit(options, engine):
        if engine == "nixl":
            raise transfer.EngineUnusable("no library")
        if engine == "mooncake":
            raise StepFailed("too slow")
        return transfer.EngineLimit(engine, "cpu", 1, 1.0, None)

    def measure_pairs(options, cases, limit):
        tried.append((cases[0].engine, cases[0].protocol, limit is not None))
        raise StepFailed("decode: the process ended")
        yield

    tried = []
    monkeypatch.setattr(transfer, "measure_limit", measure_limit)
    monkeypatch.setattr(transfer, "measure_pairs", measure_pairs)
    options = replace(TINY, engines=("nixl", "mooncake", "memory"), protocols=("tcp", "auto"))
    assert run_benchmark("transfer", transfer.bench_transfer, options, json_output=True) == 1
    assert tried == [
        (engine, protocol, engine == "memory")
        for engine in ("mooncake", "memory")
        for protocol in ("tcp", "auto")
    ]
    shown = capsys.readouterr()
    errors = [json.loads(line)["error"] for line in shown.out.splitlines() if "error" in line]
    assert errors == ["no library", "too slow", *["decode: the process ended"] * 4]
    assert "protocol auto, layouts nhd16:nhd16, page_bytes 1024: decode: the process ended" in shown.err


# --- children that fail ---------------------------------------------------------------------------


def test_the_environment_is_the_childrens_own(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "all")
    variables = replace(TINY, environment=("A=b=c", "UCX_TLS", "EMPTY=")).variables
    assert variables == {"A": "b=c", "UCX_TLS": None, "EMPTY": ""}
    child = ChildProcess("child", f"{SIDES}:Failing", variables, 20.0)
    assert child.ask("variables", ("A", "UCX_TLS")) == ["b=c", None]
    child.end(20.0)
    assert (os.environ.get("A"), os.environ["UCX_TLS"]) == (None, "all")


@pytest.mark.parametrize(
    ("side", "step", "says"),
    [
        ("Failing", "die", "decode: the process ended with code 3 in step 'die'"),
        ("Failing", "hang", r"decode: step 'hang' took more than 0.5 s"),
        ("Failing", "refuse", "decode: step 'refuse' failed: ConfigError: no such thing"),
        ("Failing", "stumble", "(?s)decode: step 'stumble' failed: Traceback.*KeyError: 'missing'"),
        ("Unmade", "refuse", "decode: step 'refuse' failed: ConfigError: there is no cache"),
        ("Missing", "refuse", "(?s)failed: Traceback.*Missing"),
    ],
)
def test_a_child_that_fails_ends_the_pair(monkeypatch, side, step, says):
    monkeypatch.setattr(process, "_GRACE_S", 0.5)
    pair = ChildPair(f"{SIDES}:{side}", {}, 60.0)
    children = [one._child for one in (pair.prefill, pair.decode)]
    assert [child.exit_code() for child in children] == [None, None]
    if step == "hang":
        # Once it has started, so that its start is not what is timed.
        pair.decode.ask("variables", ())
        pair.decode._timeout_s = 0.5
    with pytest.raises(StepFailed, match=says), pair:
        pair.decode.ask(step)
    assert all(child.exit_code() is not None for child in children)


def test_the_end_of_the_other_child_is_told_too():
    pair = ChildPair(f"{SIDES}:Failing", {}, 60.0)
    with pytest.raises(StepFailed, match="prefill: the process ended with code 3 in step 'die'"):
        pair.prefill.ask("die")
    with pytest.raises(StepFailed, match="no such thing; prefill: the process ended with code 3$"), pair:
        pair.decode.ask("refuse")

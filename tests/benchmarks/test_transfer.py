"""The benchmark of transfers, kept tiny: its numbers, what it notices, and children that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from benchmarks.options import parse_environment, parse_extra, run_benchmark
from benchmarks.transfer import pair as pairs
from benchmarks.transfer import process
from benchmarks.transfer.cache import BenchCache
from benchmarks.transfer.cases import CacheShape, EngineLimit, Layout, Layouts
from benchmarks.transfer.limit import EngineSide
from benchmarks.transfer.options import Options
from benchmarks.transfer.process import ChildPair, ChildProcess, StepFailed
from benchmarks.transfer.side import WorkerSide
from kvconnect.errors import ConfigError
from tests.benchmarks.sides_here import PairHere

CPUS = ("cpu", "cpu")
TINY = Options(
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


class WorkersHere(PairHere):
    """Both sides in this process."""

    sides: ClassVar = {pairs.WORKER_SIDE: WorkerSide, pairs.ENGINE_SIDE: EngineSide}


@pytest.fixture
def pair():
    with WorkersHere(pairs.WORKER_SIDE, {}, 20.0) as made:
        yield made


def open_rounds(pair, options):
    return pairs.PairRounds(pair, options, next(options.pairs("memory")), CPUS)


# --- the numbers ----------------------------------------------------------------------------------


def bench(*arguments):
    command = [sys.executable, "-m", "benchmarks", "transfer", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done


def test_the_command_measures_in_two_processes():
    code, (engine, *timings), done = bench(
        *("--engine", "nixl", "--page-bytes", "1024", "--blocks", "3"),
        *("--regions", "2", "--requests", "4", "--in-flight", "1", "--in-flight", "2", "--repeat", "2"),
        *("--batch-bytes", "65536"),
    )
    assert code == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert (engine["bench"], engine["engine"]) == ("engine", "nixl")
    assert [(one["requests_in_flight"], one["requests"], one["samples"]) for one in timings] == [
        (1, 1, 8),
        (2, 4, 2),
    ]
    for one in timings:
        assert one["verified"] is True
        assert one["protocol"] == "UCX"
        assert one["lane"]
        assert one["total_bytes"] == one["requests"] * 1024 * 3 * 2
        assert one["copies"] == 1
        assert 0 < one["best_seconds"] <= one["seconds"] < 20
        assert one["engine_contiguous_gb_per_s"] == engine["contiguous_gb_per_s"] > 0
        assert one["peer_copy_gb_per_s"] is None


@pytest.mark.parametrize(
    ("layouts", "page_bytes"),
    [("nhd16:nhd16", 4096), ("nhd:hnd", 16384), ("hnd4:nhd4", 2048), ("nhd1:hnd1", 24)],
)
def test_every_case_of_a_pair_is_measured_and_right(monkeypatch, layouts, page_bytes):
    monkeypatch.setattr(pairs, "ChildPair", WorkersHere)
    options = replace(TINY, layouts=(Layouts.parse(layouts),), page_bytes=(page_bytes,), blocks=(1, 3))
    limit = pairs.measure_limit(options, "memory", CPUS)
    timings = list(pairs.measure_pairs(options, list(options.pairs(limit.engine)), CPUS, limit))
    assert [(one["blocks"], one["requests_in_flight"]) for one in timings] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    for one in timings:
        assert one["total_bytes"] == one["requests"] * one["blocks"] * page_bytes * 2
        assert one["gb_per_s"] == pytest.approx(one["total_bytes"] / one["seconds"] / 1e9, rel=0.01, abs=1e-3)
        assert one["of_contiguous"] == pytest.approx(one["gb_per_s"] / limit.contiguous_gb_per_s, abs=2e-3)


def test_protocols_can_take_turns(monkeypatch):
    monkeypatch.setattr(pairs, "ChildPair", WorkersHere)
    protocols = ("UCX", "auto", "UCX")
    options = replace(
        TINY, protocols=protocols, blocks=(2,), in_flight=(1,), in_turn=True, repeat=3, requests=2
    )
    (cases,) = options.pairs_at_once("nixl")
    assert [case.protocol for case in cases] == ["UCX", "auto"]
    turns = []
    take_round = pairs.PairRounds.round

    def noted(self, *arguments):
        turns.append(self._case.protocol)
        return take_round(self, *arguments)

    monkeypatch.setattr(pairs.PairRounds, "round", noted)
    timings = list(pairs.measure_pairs(options, cases, CPUS, None))
    assert [(one["protocol"], one["samples"]) for one in timings] == [("UCX", 6), ("auto", 6)]
    assert turns[-12:] == ["UCX", "auto"] * 6


def test_the_limit_reaches_every_byte(monkeypatch):
    made = []

    class Kept(WorkersHere):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(pairs, "ChildPair", Kept)
    limit = pairs.measure_limit(TINY, "memory", CPUS)
    (pair,) = made
    pair.prefill.side._buffer.random_()
    pair.prefill.ask("contiguous", limit.batch_bytes)
    assert torch.equal(pair.prefill.side._buffer, pair.decode.side._buffer)
    WorkersHere.__exit__(pair)


@pytest.mark.parametrize(
    ("device", "engine", "protocol"),
    [
        ("cpu", "nixl", "UCX"),
        ("cpu", "mooncake", "tcp"),
        ("cpu", "memory", "auto"),
        ("cuda", "nixl", "auto"),
        ("cuda", "mooncake", "auto"),
    ],
)
def test_an_engine_carries_the_bytes_where_no_protocol_is_named(device, engine, protocol):
    options = replace(TINY, device=device, page_bytes=(1024, 2048))
    assert [(case.page_bytes, case.protocol) for case in options.pairs(engine)] == [
        (1024, protocol),
        (2048, protocol),
    ]


def test_between_cpus_auto_measures_shared_memory():
    code, (_, timing), done = bench(
        *("--engine", "nixl", "--protocol", "auto", "--page-bytes", "1024", "--blocks", "3"),
        *("--regions", "2", "--requests", "4", "--in-flight", "2", "--repeat", "1", "--batch-bytes", "65536"),
    )
    assert code == 0, done.stdout + done.stderr
    assert (timing["protocol"], timing["lane"], timing["verified"]) == ("auto", "shared_memory", True)


# --- what it notices ------------------------------------------------------------------------------


def test_wrong_bytes_are_noticed(pair):
    rounds = open_rounds(pair, TINY)
    rounds.draw(3, 2)
    result = rounds.round(3, 4, 2)
    rounds.check(result, 2)
    cache = pair.decode.side.cache
    page = cache.tensors["layer1"].tensor[cache.slots[1][2]].view(torch.uint8)
    page[5, 0, 7] ^= 1
    with pytest.raises(StepFailed, match="1 of 12 pages do not hold the bytes that were sent"):
        rounds.check(result, 2)
    page[5, 0, 7] ^= 1
    rounds.check(result, 2)
    first, second = cache.slots[0][:2]
    tensor = cache.tensors["layer0"].tensor
    tensor[[first, second]] = tensor[[second, first]]
    with pytest.raises(StepFailed, match="2 of 12 pages"):
        rounds.check(result, 2)


def test_what_was_there_before_does_not_pass(pair):
    rounds = open_rounds(pair, TINY)
    rounds.draw(3, 2)
    result = rounds.round(3, 2, 2)
    pair.decode.ask("clear")
    with pytest.raises(StepFailed, match="12 of 12 pages"):
        rounds.check(result, 2)


def test_a_load_that_fails_says_why(pair):
    rounds = open_rounds(pair, TINY)
    rounds.draw(3, 2)
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
    assert before.shape == (1, 2, 2)
    hnd.tensors["layer1"].tensor.view(torch.uint8)[2, 1, 7, 3] ^= 0x80
    assert (hnd.digests([0], 8) != before).tolist() == [[[False, False], [False, True]]]


def test_requests_have_blocks_of_their_own():
    cache = BenchCache(CacheShape(1, 32, 1, 2, Layout("nhd", 4)), "cpu", None)
    cache.draw(5, 6, seed=3)
    drawn = [block for slot in cache.slots for block in slot]
    assert [len(slot) for slot in cache.slots] == [6] * 5
    assert len(set(drawn)) == 30
    assert all(0 < block < 32 for block in drawn)
    assert drawn != sorted(drawn)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"engines": ("nope",)}, "engine is 'nope': accepted: auto"),
        ({"device": "tpu"}, "device is 'tpu'; accepted: cpu, cuda"),
        ({"page_bytes": (1000,)}, "page_bytes is 1000; accepted: multiples of 128"),
        ({"layouts": (Layouts.parse("nhd16:hnd32"),)}, "blocks is 3: its 48 tokens do not fill blocks of 32"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"extra": {"num_slot": 3}}, "num_slot"),
        ({"blocks": (1 << 30,)}, "MiB are available"),
        ({"batch_bytes": 1}, "batch_bytes is 1"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(changes, names):
    with pytest.raises(ConfigError, match=names):
        replace(TINY, **changes)


@pytest.mark.parametrize("text", ["nhd", "nhd:ndh", "nhd16:hnd24", "nhd0:nhd", "a:b:c"])
def test_layouts_that_cannot_be_used_are_refused(text):
    with pytest.raises(ConfigError, match="layouts is"):
        Layouts.parse(text)


def test_the_environment_is_the_childrens_own(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "all")
    assert parse_environment(["A=b=c", "UCX_TLS", "EMPTY="]) == {"A": "b=c", "UCX_TLS": None, "EMPTY": ""}
    child = ChildProcess("child", "tests.benchmarks.failing_sides:Failing", {"A": "b", "UCX_TLS": None}, 20.0)
    assert child.ask("variables", ("A", "UCX_TLS")) == ["b", None]
    child.quit()
    child.end(time.monotonic() + 20)
    assert (os.environ.get("A"), os.environ["UCX_TLS"]) == (None, "all")
    with pytest.raises(ConfigError, match="extra is"):
        parse_extra("[1]")


# --- children that fail ---------------------------------------------------------------------------


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
    pair = ChildPair(f"tests.benchmarks.failing_sides:{side}", {}, 60.0)
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
    pair = ChildPair("tests.benchmarks.failing_sides:Failing", {}, 60.0)
    with pytest.raises(StepFailed, match="prefill: the process ended with code 3 in step 'die'"):
        pair.prefill.ask("die")
    with pytest.raises(StepFailed, match="no such thing; prefill: the process ended with code 3$"), pair:
        pair.decode.ask("refuse")


def test_a_failure_is_shown_and_the_rest_goes_on(monkeypatch, capsys):
    def measure_limit(options, engine, devices):
        if engine == "nixl":
            raise pairs.EngineUnusable("no library")
        if engine == "mooncake":
            raise StepFailed("too slow")
        return EngineLimit(engine, "cpu", 1, 1.0, None)

    def measure_pairs(options, cases, devices, limit):
        (case,) = cases
        tried.append((case.engine, case.protocol, limit is not None))
        raise StepFailed("decode: the process ended")
        yield

    tried = []
    monkeypatch.setattr(pairs, "measure_limit", measure_limit)
    monkeypatch.setattr(pairs, "measure_pairs", measure_pairs)
    options = replace(TINY, engines=("nixl", "mooncake", "memory"), protocols=("tcp", "auto"))
    assert run_benchmark("transfer", pairs.bench_transfer, options, json_output=True) == 1
    assert tried == [
        (engine, protocol, engine == "memory")
        for engine in ("mooncake", "memory")
        for protocol in ("tcp", "auto")
    ]
    shown = capsys.readouterr()
    errors = [json.loads(line)["error"] for line in shown.out.splitlines() if "error" in line]
    assert errors == ["no library", "too slow", *["decode: the process ended"] * 4]
    assert "not measured: engine nixl: no library" in shown.err
    assert "protocol auto, layouts nhd16:nhd16, page_bytes 1024: decode: the process ended" in shown.err


def test_the_command_says_what_failed_and_exits_with_1():
    code, lines, done = bench("--engine", "nixl", "--extra", '{"engine_options": {"nope": 1}}')
    assert code == 1
    assert [list(line) for line in lines] == [["bench", "engine", "error"]]
    assert "engine_options has ['nope']" in done.stderr
    assert "Traceback" not in done.stderr

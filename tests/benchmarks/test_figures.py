"""The figures of the benchmarks are honest: wrong bytes fail them, and what they time does its work."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from benchmarks import offload, transfer
from benchmarks.process import ChildPair, StepFailed


class Here:
    """A side in this process, asked as a child is."""

    def __init__(self, side):
        module, _, name = side.partition(":")
        self.side = getattr(import_module(module), name)()

    def begin(self, step, *arguments):
        self.value = getattr(self.side, step)(*arguments)

    def answer(self):
        return self.value

    def ask(self, step, *arguments):
        self.begin(step, *arguments)
        return self.answer()


class PairHere(ChildPair):
    """Both sides in this process: their caches can be looked at and changed."""

    def __init__(self, side, timeout_s):
        self.prefill, self.decode = Here(side), Here(side)

    def __exit__(self, *_):
        for child in (self.decode, self.prefill):
            child.side.ends.close()


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.setattr(transfer, "ChildPair", PairHere)


def tiny(**more):
    given = {"regions": 2, "requests": 4, "in_flight": [1, 2], "repeat": 2, "batch_bytes": 1 << 16, **more}
    return transfer.Options(engine=["memory"], page_bytes=[1024], blocks=[3], timeout_s=20.0, **given)


def test_the_figures_of_a_transfer_agree():
    options = tiny()
    limit = transfer.measure_limit(options, "memory")
    (case,) = options.cases(limit.engine)
    found = list(transfer.measure_pairs(options, case, limit))
    assert [(one["requests_in_flight"], one["requests"], one["samples"]) for one in found] == [
        (1, 1, 8),
        (2, 4, 2),
    ]
    for one in found:
        assert one["total_bytes"] == one["requests"] * 3 * 1024 * 2
        assert one["gb_per_s"] == pytest.approx(one["total_bytes"] / one["seconds"] / 1e9)
        assert one["of_contiguous"] == pytest.approx(one["gb_per_s"] / limit.contiguous_gb_per_s)
        assert 0 < one["best_seconds"] <= one["seconds"]
        assert one["copies"] >= 1


def test_the_limit_of_an_engine_reaches_every_byte():
    with PairHere(transfer.ENGINE_SIDE, 20.0) as pair:
        _, target = pair.both("open", *[(tiny(), "memory", "cpu")] * 2)
        pair.prefill.ask("connect", target)
        pair.prefill.side._buffer.random_()
        pair.prefill.ask("contiguous", target.max_bytes)
        assert torch.equal(pair.prefill.side._buffer, pair.decode.side._buffer)


def test_wrong_and_missing_bytes_fail_a_transfer():
    options = tiny()
    (case,) = options.cases("memory")
    with PairHere(transfer.WORKER_SIDE, 20.0) as pair:
        rounds = transfer.PairRounds(pair, options, case)
        rounds.draw(3, 2)
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
        pair.prefill.side.cache.slots = [slot[:2] for slot in pair.prefill.side.cache.slots]
        with pytest.raises(StepFailed, match="request round2-[01] was not loaded: .+"):
            rounds.round(3, 2, 2)


def test_wrong_bytes_fail_the_copies_of_offload():
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

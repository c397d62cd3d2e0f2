"""Ranks of P and ranks of D that divide a model's heads in different ways."""

from __future__ import annotations

import pytest

from kvconnect.transfer.orders import Load, Orders
from tests.transfer.kernels import SlowKernels
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, same_blocks

MODEL = Model({"full": 3})
SHAPE = same_blocks(4)


def make_ranks(prefill_ranks, decode_ranks):
    return Ranks(MODEL, SHAPE, SHAPE, prefill_ranks, decode_ranks)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2), (4, 2), (1, 4), (4, 1)])
def test_ranks_that_divide_heads_differently(prefill_ranks, decode_ranks):
    ranks = make_ranks(prefill_ranks, decode_ranks)
    truth = ranks.prefilled("a", 11)
    blocks = ranks.fetched("a", 11)
    before = [worker.cache.outside(blocks) for worker in ranks.decode]
    ranks.settle()
    for worker, kept in zip(ranks.decode, before, strict=True):
        assert worker.cache.differences(truth, blocks) == []
        assert all((kept[name] == now).all() for name, now in worker.cache.outside(blocks).items())
        assert (worker.received, worker.failed) == (["a"], {})
    assert [worker.sent for worker in ranks.prefill] == [["a"]] * prefill_ranks
    ranks.assert_idle()


def test_a_rank_is_served_once_while_another_is_still_to_come():
    ranks = make_ranks(1, 2)
    (prefill,), (first, second) = ranks.prefill, ranks.decode
    truth = ranks.prefilled("a", 11)
    blocks = ranks.fetched("a", 11)

    def step():
        for _ in range(6):
            prefill.step(ranks.clock.now)
            first.step(ranks.clock.now)

    step()
    assert first.received == ["a"]
    assert not prefill.sent, "rank 1 has not come yet"
    again = Load("b", "handle-a", "P", "h", prefill.channel.port, 11, tuple(blocks.values()))
    first.order(Orders(loads=(again,)))
    step()
    assert first.failed == {"b": "this rank has had this request"}
    ranks.settle()
    assert second.received == ["a"]
    assert second.cache.differences(truth, blocks) == []
    assert prefill.sent == ["a"]
    ranks.assert_idle()


@pytest.mark.parametrize("how", ["quiescent", "not quiescent", "death", "silence"])
def test_a_request_that_one_rank_fails_is_not_reported_while_another_rank_s_chunk_is_unpacked(how):
    ranks = make_ranks(2, 1)
    (decode,) = ranks.decode
    good, bad = ranks.prefill
    if how in ("quiescent", "not quiescent"):
        bad.engine.fail_next(quiescent=how == "quiescent", error="the link is down")
    else:
        bad.engine.hold()
    with SlowKernels("target") as kernels:
        ranks.prefilled("a", 11)
        ranks.fetched("a", 11)
        ranks.settle(6)
        assert kernels.pending
        if how == "death":
            ranks.network.kill(bad.channel.port)
        if how == "silence":
            ranks.network.cut(bad.channel.port, decode.channel.port)
            ranks.run(12)
        ranks.settle()
        assert not decode.received
        while kernels.finish():
            ranks.settle()
        assert decode.received == ["a"]
        assert "a" in decode.failed
    reported = {name: decode.cache.bytes_of(name).copy() for name in decode.cache.tensors}
    bad.engine.release()
    bad.engine.land_late()
    ranks.run(110, step_s=1)
    assert all((decode.cache.bytes_of(name) == then).all() for name, then in reported.items())
    assert decode.received == ["a"]
    decode.assert_idle()
    good.assert_idle()
    truth = ranks.prefilled("b", 11)
    if how != "death":
        ranks.network.mend(bad.channel.port, decode.channel.port)
        blocks = ranks.fetched("b", 11)
        ranks.settle()
        assert decode.cache.differences(truth, blocks) == []
        ranks.assert_idle()

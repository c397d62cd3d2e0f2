"""A prefill node that stops: no new lease; what is held may be fetched for a while, then all are told."""

from __future__ import annotations

from kvconnect.config import ExtraConfig
from kvconnect.prefill.prefill_side import STOPPING
from kvconnect.transfer.orders import Orders
from tests.prefill.prefills import Prefill
from tests.transfer.pair import D_IDS, P_IDS, Pair


def draining(**config):
    pair = Pair(ExtraConfig(**config))
    ended = []
    drain = pair.prefill.transfers.quiesce
    return pair, ended, lambda: drain(lambda: ended.append(pair.clock.now), STOPPING, pair.config.drain_s)


def test_with_nothing_held_it_is_over_at_once():
    pair, ended, drain = draining()
    drain()
    pair.run(0.1)
    assert len(ended) == 1
    pair.run(40, step_s=1)
    assert len(ended) == 1


def test_what_is_held_can_still_be_fetched_and_nothing_new_is():
    pair, ended, drain = draining()
    pair.hold("a", P_IDS)
    pair.run(0.1)
    drain()
    pair.hold("b", (20,))
    pair.run(5)
    assert pair.prefill.sent == ["b"], "its blocks are free at once"
    assert not ended
    pair.load("a", D_IDS)
    pair.run(0.5)
    assert pair.landed()
    assert ended
    pair.load("b", (40,))
    pair.run(0.2)
    assert "the prefill node is stopping" in pair.decode.failed["b"]
    pair.assert_idle()


def test_whoever_waits_is_told_when_the_time_is_over():
    pair, ended, drain = draining(drain_s=3.0)
    pair.prefill.engine.hold()
    pair.start()
    pair.hold("b", (20,))
    pair.prefill.order(Orders(expected=("handle-c",)))
    pair.load("c", (41,))
    pair.run(1)
    drain()
    pair.run(2.5)
    assert not pair.decode.failed
    pair.run(1)
    assert "stopping" in pair.decode.failed["a"]
    assert "stopping" in pair.decode.failed["c"]
    assert sorted(pair.prefill.sent) == ["a", "b"]
    assert len(ended) == 1


def test_a_fetch_that_is_under_way_may_end():
    pair, ended, drain = draining(drain_s=3.0)
    pair.prefill.engine.hold()
    pair.start()
    pair.run(1)
    drain()
    pair.run(1)
    assert not ended
    pair.prefill.engine.release()
    pair.run(0.5)
    assert pair.landed()
    assert ended
    pair.assert_idle()


def test_a_prefill_that_is_being_sent_when_it_ends_is_held_until_that_is_over():
    """Its blocks are not free: kernels and the engine read them."""
    pair, ended, drain = draining()
    prefill = Prefill(pair, P_IDS, 12)
    pair.load("a", D_IDS)
    pair.run(0.2)
    prefill.to(8)
    pair.run(0.2)
    pair.prefill.engine.hold()
    drain()
    prefill.hold()
    pair.run(0.2)
    assert pair.prefill.sent == []
    pair.prefill.engine.release()
    pair.run(0.5)
    assert prefill.landed(D_IDS)
    assert ended
    pair.assert_idle()

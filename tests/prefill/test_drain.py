"""A prefill node that stops, or whose pages go away for a while: no new lease, and whoever waits is told why.

What is held may be fetched for a while before it stops; before it sleeps nothing is read any more.
"""

from __future__ import annotations

from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import Hello
from kvconnect.prefill.prefill_side import ASLEEP, STOPPING
from kvconnect.transfer.orders import Orders
from tests.prefill.prefills import Prefill
from tests.transfer.pair import D_IDS, OTHER, P_IDS, Pair


def drain(pair):
    """Have P stop; when it was told that nothing is left."""
    told = []
    pair.prefill.transfers.quiesce(lambda: told.append(pair.clock.now), STOPPING, pair.config.drain_s)
    return told


def sleeping(pair):
    """Have P sleep; what it is told once nothing of it touches pages."""
    told = []
    pair.prefill.transfers.quiesce(lambda: told.append(0), ASLEEP, 0.0)
    return told


def goes_on(pair):
    """P is awake, and hands over."""
    pair.start("z", *OTHER)
    pair.run(1)
    assert pair.landed(*OTHER)
    assert "z" in pair.decode.received
    pair.assert_idle()


def test_with_nothing_held_it_is_over_at_once(pair):
    ended = drain(pair)
    pair.run(0.1)
    assert len(ended) == 1
    pair.run(40, step_s=1)
    assert len(ended) == 1


def test_what_is_held_can_still_be_fetched_and_nothing_new_is(pair):
    pair.hold("a", P_IDS)
    pair.run(0.1)
    ended = drain(pair)
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
    pair = Pair(ExtraConfig(drain_s=3.0))
    pair.prefill.engine.hold()
    pair.start()
    pair.hold("b", (20,))
    pair.prefill.order(Orders(expected=("handle-c",)))
    pair.load("c", (41,))
    pair.run(1)
    ended = drain(pair)
    pair.run(2.5)
    assert not pair.decode.failed
    pair.run(1)
    assert "stopping" in pair.decode.failed["a"]
    assert "stopping" in pair.decode.failed["c"]
    assert sorted(pair.prefill.sent) == ["a", "b"]
    assert len(ended) == 1


def test_a_fetch_that_is_under_way_may_end(pair):
    pair.prefill.engine.hold()
    pair.start()
    pair.run(1)
    ended = drain(pair)
    pair.run(1)
    assert not ended
    pair.prefill.engine.release()
    pair.run(0.5)
    assert pair.landed()
    assert ended
    pair.assert_idle()


def test_a_prefill_that_is_being_sent_when_it_ends_is_held_until_that_is_over(pair):
    """Its blocks are not free: kernels and the engine read them."""
    prefill = Prefill(pair, P_IDS, 12)
    pair.load("a", D_IDS)
    pair.run(0.2)
    prefill.to(8)
    pair.run(0.2)
    pair.prefill.engine.hold()
    ended = drain(pair)
    prefill.hold()
    pair.run(0.2)
    assert pair.prefill.sent == []
    pair.prefill.engine.release()
    pair.run(0.5)
    assert prefill.landed(D_IDS)
    assert ended
    pair.assert_idle()


# --- sleep ----------------------------------------------------------------------------------------


def test_what_is_held_is_given_up_and_whoever_asks_is_told_why(pair):
    pair.start()
    pair.run(0.5)
    assert pair.landed()
    pair.hold("b", P_IDS)
    pair.run(0.1)
    told = sleeping(pair)
    pair.run(0.1)
    assert told == [0]
    assert "b" in pair.prefill.sent
    assert not pair.prefill.transfers.prefill.leases
    pair.load("b", OTHER[1])
    pair.run(0.2)
    assert ASLEEP.text in pair.decode.failed["b"], "and not only when the time for early fetches is over"
    pair.prefill.transfers.wake()
    pair.run(0.1)
    goes_on(pair)
    assert len(pair.network.heard(Hello)) == 1, "its peers stay connected"


def test_what_is_being_sent_is_cut_short(pair):
    pair.prefill.engine.hold()
    pair.start()
    pair.run(0.5)
    assert pair.prefill.transfers.prefill.sender.sendings
    told = sleeping(pair)
    pair.run(0.5)
    assert told == [0]
    assert not pair.prefill.transfers.prefill.sender.sendings
    assert ASLEEP.text in pair.decode.failed["a"]
    pair.prefill.engine.release()
    pair.prefill.transfers.wake()
    goes_on(pair)


def test_a_prefill_that_is_streamed_is_void_and_computed_anew_after_it(pair):
    prefill = Prefill(pair, P_IDS, 12)
    pair.load("a", D_IDS)
    pair.run(0.2)
    prefill.to(8)
    pair.run(0.2)
    told = sleeping(pair)
    pair.run(0.5)
    assert told == [0]
    assert ASLEEP.text in pair.decode.failed["a"]
    prefill.noise()
    pair.prefill.transfers.wake()
    prefill.lose((11, 12, 13))
    prefill.to(8)
    prefill.hold()
    pair.run(0.2)
    assert pair.prefill.sent == ["a"], "D has given it back"
    goes_on(pair)


def test_a_prefill_that_is_announced_meanwhile_is_refused_and_one_after_it_is_not(pair):
    told = sleeping(pair)
    pair.prefill.order(Orders(expected=("handle-a",)))
    pair.load("a", D_IDS)
    pair.run(0.5)
    assert told == [0]
    assert ASLEEP.text in pair.decode.failed["a"]
    pair.prefill.transfers.wake()
    goes_on(pair)


def test_it_may_sleep_twice_and_wake_twice(pair):
    for _ in range(2):
        first = sleeping(pair)
        pair.run(0.1)
        again = sleeping(pair)
        pair.run(0.1)
        assert (first, again) == ([0], [0])
        for _ in range(2):
            pair.prefill.transfers.wake()
        goes_on(pair)
        pair.decode.storage.zero_()
        pair.decode.results.clear()

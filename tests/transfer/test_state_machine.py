"""Records with a table of legal moves: what is not in the table changes nothing, and is counted."""

from __future__ import annotations

import random

import pytest

from kvconnect.decode.loads import LoadRecord, RankFetch, RankFetchState
from kvconnect.engine.lanes import Traffic
from kvconnect.errors import IllegalTransition
from kvconnect.metrics import Metrics, count_error
from kvconnect.outcome import Cause
from kvconnect.prefill.calibration import ProbeOutbox
from kvconnect.prefill.leases import Lease
from kvconnect.prefill.sender import Sending
from kvconnect.transfer.breaker import Breaker
from kvconnect.transfer.orders import Load
from tests.transfer.pair import Pair


def loading():
    return LoadRecord(Load("r", "h", ("P", "x", 1), 4, ()), 0.0, 1.0, lambda: True, lambda load: None, None)


def test_the_first_reason_is_kept():
    load, sending = loading(), Sending(("in:1", 1), None, ProbeOutbox(0, 0, 0, Traffic()), 1.0, 0.0)
    sending.stop("first", again=True)
    for fail in (load.fail, sending.stop):
        fail("first")
        fail("second")
    assert (load.error, sending.error, sending.again) == ("first", "first", True)


def test_illegal_moves_are_counted_apart_from_other_errors():
    metrics = Metrics()
    record = RankFetch(loading(), 0)
    record.move(RankFetchState.ASKED)
    with pytest.raises(IllegalTransition, match="rank 0: asked, so it cannot become: landed") as illegal:
        record.move(RankFetchState.LANDED)
    assert record.state is RankFetchState.ASKED
    count_error(metrics, illegal.value, "a request")
    count_error(metrics, KeyError(1), "a request")
    assert metrics.failures.values() == {("illegal_move",): 1, ("internal",): 1}


def test_an_illegal_move_of_one_request_keeps_no_other_from_landing(pair):
    """A bug of ours, planted: the record of one request cannot take what happens to it."""
    pair.prefill.engine.hold()
    pair.start()
    pair.start("b", (11, 12), (31, 32), run_s=0.2)
    (broken,) = pair.decode.transfers.decode.loads["a"].fetches.values()
    broken.move = lambda after: (_ for _ in ()).throw(IllegalTransition("x"))
    pair.release(run_s=1)
    assert pair.decode.received == ["b"]
    assert pair.landed((11, 12), (31, 32))
    assert pair.decode.count("failures", reason="illegal_move") > 0
    del broken.move
    pair.run(pair.config.load_timeout_s + 1, step_s=1)
    assert sorted(pair.decode.received) == ["a", "b"]
    assert "did not arrive within" in pair.decode.failed["a"]
    pair.assert_idle(pair.config.quarantine_s + 1, step_s=1)


def test_an_error_over_a_lease_keeps_no_other_from_ending(monkeypatch):
    pair = Pair()
    pair.hold("a", (1,))
    pair.hold("b", (2,))
    pair.run(1)
    broken = pair.prefill.transfers.prefill.leases["handle-a"]
    monkeypatch.setattr(Lease, "satisfied", property(lambda lease: lease is broken and 1 / 0))
    pair.run(31, step_s=1)
    assert pair.prefill.sent == ["b"]
    assert pair.prefill.count("failures", reason="internal") >= 1


def test_a_peer_that_cannot_be_reached_is_left_alone_for_ever_longer_until_it_is_met():
    breaker, chance, now = Breaker(), random.Random(1), 100.0
    for turn in (*range(12), 0):
        if not turn:
            breaker.met()
            assert breaker.may_try(now)
        breaker.failed(Cause.LOST("nothing listens"), 10.0, chance, now)
        longest = min(10.0, 0.25 * 2**turn)
        assert longest / 2 <= breaker.retry_at - now <= longest
        assert not breaker.may_try(now)
        assert "it was tried just now: nothing listens" in breaker.refusal(now).text
        now = breaker.retry_at
        assert breaker.may_try(now)
        assert breaker.refusal(now) is None, "whoever comes next may try"
        breaker.tried()
        assert not breaker.may_try(now), "one at a time"
        assert breaker.refusal(now) is None, "a load waits for what comes of it"

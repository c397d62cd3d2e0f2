"""Fetches, refusals and orders that overtake each other, where both sides know a handle beforehand."""

from __future__ import annotations

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.outcome import Cause
from kvconnect.peer.messages import Fetch, Renew
from kvconnect.prefill.pending_fetches import PendingFetch
from kvconnect.transfer.orders import Await, LetGo, Orders, Withdraw
from tests.transfer.pair import D_IDS, P_IDS, Pair

HANDLE = "handle-a"


def expect(pair, handle=HANDLE):
    pair.prefill.order(Orders(expected=(handle,)))


def withdraw(pair, handle=HANDLE, reason="the prefill was aborted"):
    pair.prefill.order(Orders(withdrawn=(Withdraw(handle, Cause.PREFILL_ENDED(reason)),)))


def let_go(pair, handle=HANDLE, engine_id="P", worker=None):
    order = LetGo(handle, (engine_id, "h", pair.prefill.channel.port))
    (worker or pair.decode).order(Orders(let_go=(order,)))


def test_a_transfer_that_is_held_with_another_prompt_is_not_fetched(pair):
    ours, theirs = (f"transfer:{prompt * 32}:t1" for prompt in "ab")
    pair.hold("now", P_IDS, theirs)
    pair.load("a", D_IDS, ours, run_s=ExtraConfig().early_fetch_s / 2)
    assert not pair.decode.received, "one id may be of several prompts"
    pair.run(ExtraConfig().early_fetch_s)
    assert "its prompt for the same transfer id is another one" in pair.decode.failed["a"]
    assert pair.decode.count("failures", reason="not_held") == 1


@pytest.mark.parametrize("first", ["expect", "fetch"])
def test_a_fetch_waits_for_a_prefill_that_is_under_way_longer_than_for_an_unknown_one(pair, first):
    if first == "expect":
        expect(pair)
    pair.load("a", D_IDS)
    pair.run(1)
    if first == "fetch":
        expect(pair)
    pair.run(ExtraConfig().early_fetch_s * 5)
    assert not pair.decode.received
    pair.hold("a", P_IDS)
    pair.run()
    assert pair.landed()
    assert (pair.decode.failed, pair.prefill.sent) == ({}, ["a"])
    pair.assert_idle()


def test_the_wait_for_a_prefill_ends_with_the_time_of_the_load(pair):
    expect(pair)
    pair.load("a", D_IDS)
    pair.run(ExtraConfig().load_timeout_s + 1, step_s=0.5)
    assert pair.decode.received == ["a"]
    assert pair.decode.failed
    assert not pair.prefill.transfers.prefill.pending.fetches
    withdraw(pair)
    pair.run(ExtraConfig().early_fetch_s + 1)
    pair.assert_idle()


def test_waiting_for_a_prefill_does_not_keep_the_prefill_node_awake(pair):
    """A thread that polls takes the processor from the prefill that it waits for."""
    expect(pair)
    pair.load("a", D_IDS)
    pair.settle()
    assert not pair.prefill.transfers.prefill.has_work
    assert pair.prefill.transfers.step(pair.clock.now) > 1
    done = []
    pair.hold("a", P_IDS, ready=lambda: bool(done))
    pair.settle()
    assert pair.prefill.transfers.prefill.has_work, "nobody wakes it when the device is done"
    assert not pair.prefill.transfers.prefill.book.expected
    done.append(True)
    pair.settle()
    assert pair.decode.received == ["a"]


@pytest.mark.parametrize("fetched_before", [True, False])
def test_a_withdrawn_prefill_fails_its_fetches_at_once_with_the_reason(pair, fetched_before):
    expect(pair)
    if fetched_before:
        pair.load("a", D_IDS)
        pair.run(1)
    withdraw(pair, reason="no KV comes under this handle: the prefill was aborted, or failed")
    if not fetched_before:
        pair.run()
        pair.load("a", D_IDS)
    pair.run(0.05)
    assert "the prefill was aborted" in pair.decode.failed["a"]
    pair.assert_idle()


def test_a_handle_may_be_used_again_once_it_is_over(pair):
    for source, target in (((5, 6), (21, 3)), ((7, 8), (30, 31))):
        expect(pair)
        pair.load("a", target, handle=HANDLE)
        pair.run(7)
        pair.hold("a", source, handle=HANDLE)
        pair.run()
        assert pair.landed(source, target)
    withdraw(pair)
    pair.run()
    expect(pair)
    pair.load("again", (33,), handle=HANDLE)
    pair.run(7)
    assert not pair.decode.failed
    withdraw(pair)
    pair.run()
    assert "again" in pair.decode.failed
    pair.assert_idle()


def test_one_step_may_withdraw_expect_and_hold_a_handle(pair):
    expect(pair)
    pair.load("a", D_IDS)
    pair.run(1)
    withdrawn = (Withdraw(HANDLE, Cause.PREFILL_ENDED("aborted")),)
    pair.prefill.order(Orders(withdrawn=withdrawn, expected=(HANDLE,)))
    pair.run(8)
    assert not pair.decode.received, "it is expected anew"
    pair.hold("a", P_IDS)
    pair.run()
    assert pair.landed()
    pair.assert_idle()


def test_letting_go_before_anything_is_known_is_remembered_for_a_while(pair):
    let_go(pair)
    pair.run(1)
    expect(pair)
    pair.run(20)
    pair.hold("a", P_IDS)
    pair.run()
    assert pair.prefill.sent == ["a"]
    let_go(pair, "made up")
    pair.run(1)
    assert pair.prefill.transfers.prefill.book.released
    pair.run(ExtraConfig().early_fetch_s)
    pair.assert_idle()


def test_a_second_engine_cannot_let_go_of_what_the_first_let_go_of():
    pair = Pair()
    book = pair.prefill.transfers.prefill.book
    for engine_id, consumers in (("D", 2), ("X", 1)):
        book.release_early(HANDLE, (engine_id, "1", 0), consumers, 0.0)
    lease = book.expect(HANDLE)
    assert (lease.owner, lease.consumers, lease.finished) == ("D", 2, {("D", "1", 0)})


def waits(pair):
    order = Await(HANDLE, ("P", "h", pair.prefill.channel.port), reports=True)
    pair.decode.order(Orders(awaited=(order,)))


@pytest.mark.parametrize("who", ["D", "X"])
def test_a_release_lapses_though_its_handle_is_renewed_meanwhile(pair, who):
    pair.load("z", (40,), handle="another", run_s=1)
    let_go(pair, worker=pair.decode if who == "D" else pair.add("X"))
    pair.run(3)
    waits(pair)
    pair.run(3)
    expect(pair)
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, run_s=1)
    assert pair.landed()
    assert "a" not in pair.decode.failed


def test_renewals_of_unknown_handles_displace_no_release_and_are_bounded():
    book = Pair(ExtraConfig(max_leases=2)).prefill.transfers.prefill.book
    book.release_early("mine", ("D", "1", 0), 1, 0.0)
    for name in ("a", "b", "c", "mine"):
        book.watch(name, "link")
    assert (list(book.released), list(book.watched)) == (["mine"], ["b", "c"])


def test_who_waits_longer_than_releases_are_remembered_is_told_at_once(pair):
    waits(pair)
    pair.run(ExtraConfig().early_fetch_s - 0.1)
    book = pair.prefill.transfers.prefill.book
    assert list(book.watched) == [HANDLE]
    pair.network.lose(Renew)
    pair.run(5)
    pair.hold("a", P_IDS)
    pair.run(0.1)
    assert [name for results in pair.decode.results for name in results.settled] == [HANDLE]


def test_fetches_of_a_link_that_is_measured_are_looked_at_and_those_of_others_not():
    pending = Pair().prefill.transfers.prefill.pending
    assert pending.admit(PendingFetch("link", Fetch(1, HANDLE, 20, 1, 30.0), 0.0), 0.0) is None
    pending.touch_link("another")
    assert not pending.touched
    pending.touch_link("link")
    assert [early.key for early in pending.take_touched()] == [("link", 1)]


@pytest.mark.parametrize("num_tokens", [11, 13])
def test_a_fetch_of_another_number_of_tokens_than_is_held_is_refused(pair, num_tokens):
    """In the parallel flow nobody has told D how many there are."""
    expect(pair)
    pair.load("a", D_IDS, num_tokens=num_tokens)
    pair.run(6)
    pair.hold("a", P_IDS)
    pair.run(0.1)
    assert pair.decode.failed == {
        "a": f"the prefill node holds 12 tokens of it, and the decode node's prompt needs {num_tokens}"
    }
    assert not pair.decode.storage.any()
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


def test_two_requests_under_one_handle_are_not_mixed_up(pair):
    pair.hold("a", P_IDS, handle=HANDLE)
    pair.hold("b", (7, 8, 10), handle=HANDLE)
    pair.run()
    assert pair.prefill.sent == ["b"], "it is freed, and the first goes on"
    assert pair.prefill.count("failures", reason="handle_in_use") == 1
    pair.load("a", D_IDS, handle=HANDLE)
    pair.run()
    assert pair.landed()
    assert pair.prefill.sent == ["b", "a"]
    pair.assert_idle()


def test_what_waits_is_bounded():
    pair = Pair(ExtraConfig(max_leases=2))
    for n in range(4):
        expect(pair, f"h{n}")
        pair.load(f"r{n}", (n + 1,), handle=f"h{n}")
        let_go(pair, f"other{n}")
    pair.run(0.1)
    book, fetches = pair.prefill.transfers.prefill.book, pair.prefill.transfers.prefill.pending.fetches
    assert (len(book.expected), len(fetches), len(book.released)) == (2, 2, 2)
    assert pair.prefill.count("failures", reason="max_leases") == 2
    assert sum("fetches wait at the prefill node already" in why for why in pair.decode.failed.values()) == 2
    for n in range(4):
        withdraw(pair, f"h{n}")
    # Loads that fail let go of handles that nobody knows: these are forgotten in turn.
    pair.run(2 * ExtraConfig().early_fetch_s + 1)
    assert len(pair.decode.received) == 4
    pair.assert_idle()


def test_what_the_scheduler_half_met_is_counted_once():
    pair = Pair()
    pair.prefill.order(Orders(failures=("transfer_id", "transfer_id")))
    pair.run()
    assert pair.prefill.count("failures", reason="transfer_id") == 2

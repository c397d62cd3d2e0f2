"""One connector of two parts: who is asked, who is told, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.halves.worker_half import WorkerHalf
from kvconnect.peer.handles import Claims
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import (
    Load,
    OffloadOrders,
    OffloadReport,
    Orders,
    Restore,
    Results,
    RowCopies,
    Seek,
    Store,
)
from kvconnect.transfer.stack import Computed, StateBlock, Step
from tests.halves.test_scheduler_half import HANDLES, connector
from tests.offload.half_kit import Kind, Req, Stack
from tests.offload.worker_kit import Rig

FULL = (Kind(4),)


def remote(num_tokens):
    """What a prefill node says of a request that it holds."""
    claims = Claims("P", "epoch", "name", num_tokens, "10.0.0.2", 5600, expires_at=0)
    return {"do_remote_prefill": True, "kvconnect_handle": HANDLES.make(claims)}


def both(role="kv_both"):
    """A half of both parts over a stack that has stored 64 tokens."""
    stack = Stack(FULL, 8, num_blocks=400, local=False, lag=0.0, cancels=0.0)
    stack.add("first", range(64))
    stack.run(everything=True)
    transfer = connector(role, [kind.spec() for kind in FULL], num_blocks=400)
    stack.half.host.draft = transfer.draft
    half = SchedulerHalf(transfer.draft, transfer.prefill, transfer.decode, transfer.pulls, stack.half)
    half.build_orders()
    return stack, half


def request_of(stack, name, tokens, params=None):
    request = stack.add(name, tokens, params=params)
    stack.waiting.remove(request)
    return request


IDS = (list(range(1, 17)),)


def test_a_request_of_no_peer_is_restored():
    stack, half = both()
    request = request_of(stack, "again", range(64))
    half.new_request(request)
    assert half.prefill_tokens(request) == 64
    assert half.matched_tokens(request, 0) == (56, True)
    assert half.is_restored("again")
    assert half.sources("again", 56) == {"host": 56}
    half.update_after_alloc(request, IDS, 56)
    orders = half.build_orders()
    assert not orders.loads
    assert [restore.request_id for restore in orders.offload.restores] == ["again"]
    half.update_results(Results(received=("again",)))
    assert half.is_restored("again"), "asked once more when it goes on, after its load was reported"
    half.update_after_alloc(request, IDS, 0)
    assert half.request_finished(request, IDS, delivered=True) == (False, None)
    assert not half.is_restored("again")
    half.build_orders()
    assert not any(half.state().values())


def test_a_request_that_a_peer_holds_is_fetched_and_then_kept():
    stack, half = both()
    request = request_of(stack, "fetched", range(64), remote(64))
    half.new_request(request)
    assert half.matched_tokens(request, 0) == (64, True)
    assert not half.is_restored("fetched")
    assert half.sources("fetched", 64) == {"peer": 64}
    half.update_after_alloc(request, IDS, 64)
    orders = half.build_orders()
    assert [load.request_id for load in orders.loads] == ["fetched"]
    assert not orders.offload
    half.update_results(Results(received=("fetched",)))
    half.update_after_alloc(request, IDS, 0)
    stack.half.host.index.clear()
    half.launched(Step([Computed("fetched", 64, IDS)]))
    (store,) = half.build_orders().offload.stores
    assert store.copies.block_ids == tuple(IDS[0])
    # It lost its blocks: its handle is spent, but what was kept of it is not.
    stack.half.update_results(Results(offload=(OffloadReport(0, done={store.job: ()}),)))
    half.preempted("fetched")
    stack.clock.now += 1
    assert half.matched_tokens(request, 0) == (56, True)
    assert half.is_restored("fetched")
    half.request_finished(request, ([],), delivered=False)
    half.build_orders()
    assert not any(half.state().values())


def test_a_promise_of_the_tiers_ends_where_a_peer_is_asked():
    stack, half = both()
    request = request_of(stack, "r", range(64), remote(64))
    half.new_request(request)
    half.decode, decode = None, half.decode
    assert half.matched_tokens(request, 0) == (56, True)
    assert half.is_restored("r")
    half.decode = decode
    assert half.matched_tokens(request, 0) == (64, True)
    assert not half.is_restored("r")
    assert not stack.half.offers("r")
    assert stack.half.host.index.counts()[0].pinned == 0


def test_reasons_to_count_of_both_parts_go_with_the_orders():
    stack, half = both()
    request = request_of(stack, "r", range(64), {"max_offload_tokens": "all"})
    half.new_request(request)
    # Once by the stack of the test, once by the half.
    assert half.build_orders().failures == ("offload_parameters_refused",) * 2
    assert not half.build_orders()


def test_without_an_engine_or_without_offload():
    _, half = both()
    nothing = SchedulerHalf()
    assert nothing.matched_tokens(object(), 0) == (0, False)
    assert not nothing.build_orders()
    only_transfer = SchedulerHalf(half.draft, half.prefill, half.decode)
    only_offload = SchedulerHalf(offload=half.offload)
    for mine in (only_transfer, only_offload):
        request = Req("r", range(64))
        mine.new_request(request, reads=False)
        assert mine.prefill_tokens(request) == 64
        assert mine.matched_tokens(request, 0) == (0, False)
        mine.update_after_alloc(request, IDS, 0)
        mine.launched(Step([Computed("r", 64, IDS)], [StateBlock("r", 0, 64, 3)]))
        mine.overwritten({5})
        mine.preempted("r")
        assert mine.checkpoints(request) == ()
        assert mine.sources("r", 0) == {}
        assert mine.request_finished(request, ([],), delivered=True) == (False, None)
        mine.update_results(Results())
        mine.build_orders()
        mine.drain()
        mine.reset()
        mine.take_events()
        assert not any(mine.state().values())
    assert only_transfer.due == {}
    assert not only_transfer.pending
    assert only_offload.pending


@dataclass
class Part:
    """Stands for a worker part of either kind."""

    next: Results = field(default_factory=Results)
    calls: list = field(default_factory=list)
    engine_name: str = "memory"

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))

        return call

    def results(self):
        given, self.next = self.next, Results()
        return given

    def changes(self, more=None):
        return more

    def state(self):
        return {"open": 0}


def test_orders_reach_the_part_that_they_are_for():
    transfer, offload = Part(), Part()
    half = WorkerHalf(transfer, offload)
    tiers = OffloadOrders(seeks=(Seek(1, "store", 0, (b"x",)),))
    given = Orders(aborted=("r",), failures=("why",), offload=tiers)
    half.before_step(given)
    assert offload.calls == [("before_step", tiers), ("start", tiers)]
    assert transfer.calls == [("before_step", given), ("start", Orders(aborted=("r",), failures=("why",)))]
    half.after_zeroing(given)
    half.before_step(Orders(aborted=("r",)))
    assert len(offload.calls) == 2
    assert transfer.calls[-1] == ("start", Orders(aborted=("r",)))
    assert half.state() == {"open": 0, "offload_open": 0}


def test_without_a_transfer_part_somebody_still_counts():
    offload = Part()
    half = WorkerHalf(None, offload)
    half.before_step(Orders(failures=("why",)))
    assert offload.calls == [("count_failures", ("why",))]
    assert (half.address(), half.drain()) == (None, True)


def test_results_of_both_parts_come_back_once():
    report = OffloadReport(0, done={3: ()})
    transfer = Part(Results(sent=("a",), received=("b", "c"), failed={"c": "late"}))
    offload = Part(Results(received=("d", "e"), failed={"e": "copy"}, offload=(report,)))
    half = WorkerHalf(transfer, offload)
    assert half.results() == Results(("a",), ("b", "c", "d", "e"), {"c": "late", "e": "copy"}, (report,))
    assert not half.results()
    transfer.next = Results(sent=("f",))
    assert half.results() == Results(sent=("f",))
    assert not WorkerHalf(None, offload).results()
    assert not WorkerHalf(transfer, None).results()


def test_of_a_request_that_both_parts_wait_for_the_earlier_count_is_due():
    stack, half = both("kv_producer")
    request = request_of(stack, "r", range(64), {"do_remote_decode": True})
    half.new_request(request)
    half.update_after_alloc(request, IDS, 0)
    assert half.prefill.due == {"r": 64}
    assert half.due["r"] == half.offload.due["r"] < 64
    assert half.due.keys() >= half.offload.due.keys()


@pytest.mark.parametrize("zeroes_loads", [False, True])
def test_what_is_ordered_begins_before_the_launch_behind_the_snapshot_of_its_own_orders(zeroes_loads):
    """A block may be stored for one request and filled for another with one step's orders.

    And a launch takes as long as the prefill before it, where that fills the device's queue. Only what the
    step zeroes has to wait for that.
    """

    class Noting(Part):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def __getattr__(self, name):
            return lambda *args: done.append((self.part, name))

    done = []
    half = WorkerHalf(Noting("transfer"), Noting("offload"))
    store = Store(1, RowCopies(0, (5,), (0,)), (b"x",))
    restore = Restore("r", (RowCopies(0, (5,), (1,)),))
    load = Load("l", "h", ("P", "x", 1), 4, (GroupBlocks(0, 0, (5,)),))
    offload = OffloadOrders(stores=(store,), restores=(restore,))
    orders = Orders(loads=(load,), offload=offload, zeroes_loads=zeroes_loads)
    half.before_step(orders)
    done.append("launch")
    half.after_zeroing(orders)
    begun = [("offload", "start"), ("transfer", "start")]
    snapshot = [("transfer", "before_step"), ("offload", "before_step")]
    assert done == snapshot + (["launch", *begun] if zeroes_loads else [*begun, "launch"])


@pytest.mark.parametrize("zeroes_loads", [False, True])
def test_a_restore_waits_for_its_step_only_where_that_zeroes_its_blocks(zeroes_loads):
    rig, given, stage = Rig(), [], ["before the step"]
    copier, half = rig.worker._copier, WorkerHalf(None, rig.worker)
    restore = copier.restore
    copier.mark = lambda: stage[-1]
    copier.restore = lambda copies, after: given.append(after) or restore(copies)
    order = Restore("r", (RowCopies(0, (1,), (0,)),))
    orders = Orders(zeroes_loads=zeroes_loads, offload=OffloadOrders(restores=(order,)))
    half.before_step(orders)
    stage.append("after its launch")
    half.after_zeroing(orders)
    rig.until(lambda: "r" in rig.received)
    assert given == ["after its launch" if zeroes_loads else "before the step"]
    rig.worker.close()

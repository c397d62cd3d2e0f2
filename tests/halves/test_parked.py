"""KV of requests that wait for blocks: loaded into rows of host memory, and restored from there."""

from __future__ import annotations

import msgspec
import pytest

from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import ExtraConfig, OffloadConfig, TransferConfig
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.outcome import Cause, Outcome
from kvconnect.peer.handles import Claims, Handles
from kvconnect.transfer.orders import OffloadReport, Results
from kvconnect.transfer.stack import StackTraits
from tests.halves.test_scheduler_half import Request
from tests.offload.half_kit import Kind

HANDLES = Handles(b"secret")
FULL, HYBRID = (Kind(4),), (Kind(4), Kind(4, window=6), Kind(4, is_state=True))
RANKS, WAIT_S = 2, 1.0
BLOCKS = [1, 2, 3, 4]


class Node:
    """A decode node's scheduler half; its workers are the test."""

    def __init__(self, kinds=FULL, rows=40, share=0.5, parks=True):
        self.now = 0.0
        groups = tuple(kind.spec() for kind in kinds)
        offload = OffloadConfig(
            cpu_bytes=rows * 64 * len(kinds),
            shares=[1 / len(kinds)] * len(kinds),
            park_share=share,
            park_after_s=WAIT_S,
        )
        extra = ExtraConfig(insecure=True, offload=offload)
        config = TransferConfig(kv_role="kv_consumer", engine_id="D", kv_connector_extra_config=extra)
        kept = KeptBlocks(
            groups,
            HitRequirements.of(groups, range(len(groups)), 4),
            hashes=lambda request, tokens: (),
            row_bytes=dict.fromkeys(range(len(groups)), 64),
            num_ranks=RANKS,
            clock=lambda: self.now,
            parks=parks,
        )
        self.half = build_scheduler_half(
            config,
            KVCacheConfig(100, groups),
            StackTraits(clock=lambda: self.now),
            directory=(RankAddress(0, "10.0.0.1", 5600),),
            trust=Trust(HANDLES),
            kept=kept,
        )

    def arrive(self, name="r", num_tokens=16, handle="", **more):
        claims = Claims("P", "epoch", handle or name, num_tokens, "10.0.0.2", 5600, expires_at=0)
        held = num_tokens + self.half.decode._stack.held_back
        params = {"do_remote_prefill": True, "kvconnect_handle": HANDLES.make(claims), **more}
        request = Request(name, held, params)
        self.half.new_request(request)
        return request

    def orders(self, after_s=0.0):
        self.now += after_s
        return self.half.build_orders()

    def report(self, load, *, ranks=range(RANKS), failed=False):
        for rank in ranks:
            parked = {park.job: park.names if failed and rank else () for park in load.parks}
            self.half.update_results(Results(offload=(OffloadReport(rank, done=parked),)))

    def parked(self, name="r", num_tokens=16):
        """A request whose KV is in host memory."""
        request = self.arrive(name, num_tokens)
        (load,) = self.orders(WAIT_S).loads
        self.report(load)
        self.orders()
        return request, load

    def admit(self, request, num_tokens=16):
        """A request gets blocks, and so many tokens of what it was offered."""
        self.half.update_after_alloc(request, [BLOCKS], num_tokens)

    def end(self, request, *, received=True):
        """A request is loaded or computed, and generated; nothing is left of it."""
        if received:
            self.half.update_results(Results(received=(request.request_id,)))
        self.half.request_finished(request, [BLOCKS], delivered=True)
        self.assert_idle()

    def assert_idle(self):
        self.orders()
        assert not any(self.half.state().values())
        rows = self.half.offload.host.index.counts()
        assert not any(counts.held for counts in rows.values())


def rows_of(load):
    return {group.group: [row - 1 for row in group.block_ids if row] for group in load.groups}


@pytest.mark.parametrize("kinds", [FULL, HYBRID])
def test_a_request_that_waits_is_loaded_into_rows_and_restored_from_there(kinds):
    node = Node(kinds)
    request = node.arrive()
    assert node.orders().awaited
    assert node.half.matched_tokens(request, 0) == (16, True)
    assert not node.orders(WAIT_S / 2).loads
    (load,) = node.orders(WAIT_S / 2).loads
    assert not load.refusal
    assert [park.rows for park in load.parks] == [tuple(rows) for rows in rows_of(load).values()]
    assert node.half.matched_tokens(request, 0) == (None, False), "on its way"
    node.report(load, ranks=[0])
    assert node.half.matched_tokens(request, 0) == (None, False), "not all ranks have it"
    node.report(load, ranks=[1])
    assert node.half.matched_tokens(request, 4) == (12, True), "beyond the local prefix"
    # Positions before the prefix, and those that no later token sees, have no block to fill.
    ids = [[90, 11, 12, 13], [0, 0, 22, 23], [0, 0, 0, 33]][: len(kinds)]
    node.half.update_after_alloc(request, ids, 12)
    orders = node.orders()
    assert not orders.loads
    assert not orders.let_go
    (restore,) = orders.offload.restores
    rows = rows_of(load)
    expected = {0: (tuple(ids[0][1:]), tuple(rows[0][1:]))}
    if kinds is HYBRID:
        assert load.groups[1].block_ids[-2:] == tuple(row + 1 for row in rows[1][-2:])
        expected[1] = ((22, 23), tuple(rows[1][-2:]))
        expected[2] = ((33,), tuple(rows[2]))
    assert {copy.group: (copy.block_ids, copy.rows) for copy in restore.copies} == expected
    node.half.update_results(Results(received=("r",)))
    node.half.update_after_alloc(request, ids, 0)
    node.half.request_finished(request, ids, delivered=True)
    node.assert_idle()


def test_a_request_that_gets_blocks_in_time_is_loaded_into_them():
    node = Node()
    request = node.arrive()
    node.orders(WAIT_S / 2)
    assert node.half.matched_tokens(request, 0) == (16, True)
    node.admit(request)
    (load,) = node.orders(WAIT_S).loads
    assert not load.parks
    node.end(request)


def outcome(load, *, ok=True):
    reason = None if ok else Cause.OUT_OF_REACH("gone")
    moved = 160 if ok else 0
    return Outcome(
        load.request_id, "P", ("h", 1), "lease", 16, moved, 0.1, "tcp", reason, ("ours", "theirs"), "abc"
    )


def receipt_of(node, request):
    node.half.update_results(Results(received=(request.request_id,)))
    node.admit(request, 0)
    _, params = node.half.request_finished(request, [BLOCKS], delivered=True)
    node.assert_idle()
    receipt = params["kvconnect_receipt"]
    assert sum(receipt["tokens"].values()) == receipt["prompt_tokens"]
    return receipt


def test_a_receipt_has_what_was_moved_into_host_memory():
    node = Node()
    request = node.arrive(kvconnect_receipt=True)
    (load,) = node.orders(WAIT_S).loads
    assert load.wants_outcome
    node.half.update_results(Results(outcomes=(outcome(load),)))
    node.report(load)
    node.half.matched_tokens(request, 0)
    node.admit(request)
    assert not node.orders(after_s=0.5).loads
    receipt = receipt_of(node, request)
    (part,) = receipt["loads"]
    assert receipt["tokens"]["peer"] == part["tokens"] == 16
    assert {name: part[name] for name in ("origin", "ended", "bytes", "us", "by", "address", "digest")} == {
        "origin": "peer",
        "ended": "loaded",
        "bytes": 160,
        "us": 500_000,
        "by": "lease",
        "address": "10.0.0.2:5600",
        "digest": "abc",
    }


def test_a_receipt_has_a_load_into_host_memory_that_failed_and_the_one_after_it():
    node = Node()
    request = node.arrive(kvconnect_receipt=True)
    (load,) = node.orders(WAIT_S).loads
    node.half.update_results(Results(outcomes=(outcome(load, ok=False),)))
    node.report(load, failed=True)
    node.orders()
    node.half.matched_tokens(request, 0)
    node.admit(request)
    (again,) = node.orders().loads
    assert not again.parks
    node.half.update_results(Results(outcomes=(outcome(again),)))
    parts = receipt_of(node, request)["loads"]
    assert [(part["ended"], part.get("bytes", 0)) for part in parts] == [
        ("peer_out_of_reach", 0),
        ("loaded", 160),
    ]


def test_what_cannot_be_parked_waits_at_the_prefill_node():
    node = Node()
    request = node.arrive()
    (load,) = node.orders(WAIT_S).loads
    node.report(load, failed=True)
    orders = node.orders(WAIT_S)
    assert [awaited.handle for awaited in orders.awaited] == [load.handle]
    assert not orders.loads, "tried once"
    assert not node.half.offload.host.index.counts()[0].held
    assert node.half.matched_tokens(request, 0) == (16, True)
    node.admit(request)
    (again,) = node.orders().loads
    assert (again.handle, again.refusal, again.parks) == (load.handle, None, ())
    node.end(request)


def test_what_does_not_fit_into_its_share_of_host_memory_waits_and_is_counted_once():
    node = Node(rows=16, share=0.5)
    first, _ = node.parked("first")
    node.parked("second")
    node.arrive("third")
    orders = node.orders(WAIT_S)
    assert not orders.loads
    assert orders.failures == ("park_rows_short",)
    assert not node.orders(WAIT_S).failures
    # As soon as rows are free it is parked.
    node.half.request_finished(first, [[]], delivered=False)
    (load,) = node.orders().loads
    assert load.request_id == "third"


def test_some_are_parked_at_a_time_the_oldest_first():
    node = Node(rows=1000, share=1.0)
    for number in range(9):
        node.arrive(f"r{number}")
    loads = node.orders(WAIT_S).loads
    assert [load.request_id for load in loads] == ["r0", "r1", "r2", "r3"]
    assert not node.orders().loads
    node.report(loads[1])
    assert [load.request_id for load in node.orders().loads] == ["r4"]


@pytest.mark.parametrize("reports_first", [True, False])
def test_a_client_that_leaves_frees_rows_once_nothing_writes_to_them(reports_first):
    node = Node()
    request = node.arrive()
    (load,) = node.orders(WAIT_S).loads
    if reports_first:
        node.report(load)
        node.orders()
    node.half.request_finished(request, [[]], delivered=False)
    orders = node.orders()
    assert orders.aborted == (() if reports_first else ("r",))
    assert not orders.let_go, "the load's end releases the handle"
    if not reports_first:
        assert node.half.offload.host.index.counts()[0].held == 4
        node.report(load, failed=True)
    node.assert_idle()


def test_requests_of_one_handle_are_parked_once():
    node = Node()
    first, second = node.arrive("first", handle="n"), node.arrive("second", handle="n")
    (load,) = node.orders(WAIT_S).loads
    node.report(load)
    node.half.request_finished(first, [[]], delivered=False)
    assert not node.orders().aborted
    assert node.half.matched_tokens(second, 0) == (16, True)
    node.admit(second)
    assert node.orders().offload.restores
    node.end(second)


def test_what_is_parked_is_dropped_with_the_caches_and_computed():
    node = Node()
    ready, _ = node.parked("ready")
    moving = node.arrive("moving")
    (load,) = node.orders(WAIT_S).loads
    node.half.reset()
    orders = node.orders()
    assert orders.aborted == ("moving",)
    assert orders.failures.count(Cause.REPLACED.value) == 2
    for request in (ready, moving):
        assert node.half.matched_tokens(request, 0) == (0, False)
        node.admit(request, 0)
    node.report(load)
    for request in (ready, moving):
        node.half.request_finished(request, [BLOCKS], delivered=True)
    node.assert_idle()


def test_a_failed_restore_fails_the_request_and_frees_the_rows():
    node = Node()
    request, _ = node.parked()
    node.half.matched_tokens(request, 0)
    node.admit(request)
    assert node.orders().offload.restores
    node.half.update_results(Results(received=("r",), failed={"r": Cause.RESTORE("a copy failed")}))
    assert node.orders().failures == ("offload_restore_failed",)
    assert node.half.matched_tokens(request, 0) == (0, False), "computed, where the policy says so"
    node.half.request_finished(request, [[]], delivered=False)
    node.assert_idle()


def test_a_prompt_that_is_cached_here_meanwhile_needs_no_restore():
    node = Node()
    request, _ = node.parked()
    assert node.half.matched_tokens(request, 16) == (0, False)
    node.admit(request, 0)
    node.end(request, received=False)


def test_a_prefill_under_way_is_parked_when_it_is_there():
    node = Node()
    share = node.half.decode.share(node.arrive())
    share.remote = msgspec.structs.replace(share.remote, is_announced=True)
    orders = node.orders(WAIT_S)
    assert not orders.loads
    assert [awaited.reports for awaited in orders.awaited] == [True]
    assert not node.orders(WAIT_S).awaited, "asked once"
    node.half.update_results(Results(settled=(share.remote.handle,)))
    assert node.orders().loads


@pytest.mark.parametrize("changes", [{"parks": False}, {"share": 0.0}])
def test_without_rows_for_it_nothing_is_parked(changes):
    node = Node(**changes)
    node.arrive()
    assert not node.orders(WAIT_S).loads

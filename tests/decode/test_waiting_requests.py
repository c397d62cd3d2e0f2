"""What P holds for a request that waits for blocks on D: kept from the moment that D's scheduler knows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvconnect.cache.specs import AttentionSpec, KVCacheGroup
from kvconnect.config import ExtraConfig
from kvconnect.outcome import Cause
from kvconnect.peer.channel import LinkLost
from kvconnect.peer.handles import Claims
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import Message, Release, Renew
from kvconnect.transfer.orders import Await, Orders, Withdraw
from tests.halves.test_scheduler_half import HANDLES, Request, connector
from tests.transfer.pair import BLOCK_TOKENS, Pair

LEASE_S = 4.0


class Queue:
    """D's real scheduler half before D's real worker; P holds one block for each of its requests."""

    def __init__(self, **changes: Any) -> None:
        extra = ExtraConfig(**{"insecure": True, "lease_s": LEASE_S, "lease_max_s": 100.0, **changes})
        self.pair = Pair(extra)
        self.renewed_at: list[float] = []
        self.pair.network.taps.append(self._note)
        group = KVCacheGroup(("layer0",), AttentionSpec(BLOCK_TOKENS, 2, 4, torch.float16))
        self.half = connector("kv_consumer", (group,), num_blocks=50)

    def _note(self, message: Message) -> tuple[Message]:
        if isinstance(message, Renew):
            self.renewed_at.append(self.pair.clock.now)
        return (message,)

    def shortest_pause(self) -> float:
        """Between two renewals, in seconds."""
        pairs = zip(self.renewed_at, self.renewed_at[1:], strict=False)
        return round(min(later - earlier for earlier, later in pairs), 6)

    def params(self, name: str, port: int | None = None) -> dict[str, Any]:
        port = port or self.pair.prefill.channel.port
        handle = HANDLES.make(Claims("P", "e", name, BLOCK_TOKENS, "127.0.0.1", port, 0.0))
        return {"do_remote_prefill": True, "kvconnect_handle": handle}

    def arrive(self, name: str, block: int | None, hears: bool = True) -> Request:
        """P holds a block for a request, which comes to D."""
        request = Request(name, BLOCK_TOKENS, self.params(name))
        if block is not None:
            self.pair.hold(name, (block,), request.kv_transfer_params["kvconnect_handle"])
        if hears:
            self.half.new_request(request)
        return request

    def admit(self, request: Request, block: int) -> None:
        assert self.half.matched_tokens(request, 0) == (BLOCK_TOKENS, True)
        self.half.update_after_alloc(request, ([block],), BLOCK_TOKENS)

    def run(self, seconds: float, step_s: float = 0.05) -> None:
        """D's scheduler steps with its worker."""
        end = self.pair.clock.now + seconds
        while self.pair.clock.now < end:
            self.step()
            self.pair.run(step_s)
        self.step()

    def step(self) -> None:
        worker = self.pair.decode
        for results in worker.results[getattr(self, "_seen", 0) :]:
            self.half.update_results(results)
        self._seen = len(worker.results)
        if orders := self.half.build_orders():
            worker.order(orders)

    @property
    def renewals(self) -> list[Renew]:
        return self.pair.network.heard(Renew)


def test_requests_that_queue_for_longer_than_a_lease_are_loaded():
    queue = Queue()
    requests = [queue.arrive(f"r{number}", 1 + number) for number in range(20)]
    for number, request in enumerate(requests):
        queue.run(4.5)
        queue.admit(request, 21 + number)
    queue.run(1)
    assert queue.pair.decode.failed == {}
    assert len(queue.pair.decode.received) == 20
    assert queue.pair.landed(tuple(range(1, 21)), tuple(range(21, 41)))
    assert len(queue.renewed_at) >= 20
    assert queue.shortest_pause() >= 1.0
    queue.run(2)
    queue.pair.assert_idle()


def test_a_peer_that_was_met_by_its_address_is_asked_to_renew_where_no_more_are_remembered():
    queue = Queue(warm_peers=("127.0.0.1:1", "nobody:1"), max_peers=2)
    queue.run(0.5)
    request = queue.arrive("a", 3)
    queue.run(2 * LEASE_S)
    assert queue.renewed_at
    queue.admit(request, 5)
    queue.run(0.5)
    assert queue.pair.landed((3,), (5,))


def test_requests_that_come_one_by_one_cost_no_message_each():
    queue = Queue()
    for number in range(19):
        queue.arrive(f"r{number}", 1 + number)
        queue.run(0.2)
    queue.run(1)
    assert queue.shortest_pause() >= 1.0
    assert len(queue.renewals[-1].handles) >= 14


@pytest.mark.parametrize("ends", ["aborted", "computed here"])
def test_a_request_that_is_not_loaded_lets_go(ends):
    queue = Queue()
    request = queue.arrive("a", 5)
    queue.run(6)
    if ends == "computed here":
        queue.half.update_after_alloc(request, ([7],), 0)
    queue.half.request_finished(request, ([],), delivered=False)
    queue.run(0.5)
    assert len(queue.pair.network.heard(Release)) == 1
    assert queue.pair.prefill.sent == ["a"]
    count = len(queue.renewals)
    queue.run(10)
    assert len(queue.renewals) == count
    assert not queue.pair.decode.transfers.decode.renewals.awaited
    queue.pair.assert_idle()


def test_requests_of_one_handle_keep_it_while_one_of_them_is_undecided():
    queue = Queue()
    requests = [Request(f"a{number}", BLOCK_TOKENS, queue.params("a")) for number in range(2)]
    queue.pair.hold("a", (5,), requests[0].kv_transfer_params["kvconnect_handle"])
    for request in requests:
        queue.half.new_request(request)
    queue.run(5)
    queue.half.request_finished(requests[0], ([],), delivered=False)
    queue.run(6)
    queue.admit(requests[1], 7)
    queue.run(0.5)
    assert queue.pair.decode.failed == {}
    assert queue.pair.landed((5,), (7,))


def test_nobody_keeps_for_longer_than_the_longest_time_and_the_load_fails_with_that_reason():
    queue = Queue(lease_max_s=9.0)
    request = queue.arrive("a", 5)
    queue.run(12)
    assert queue.pair.prefill.sent == ["a"]
    count = len(queue.renewals)
    queue.run(5)
    assert len(queue.renewals) == count, "what is over is not renewed"
    queue.admit(request, 7)
    queue.run(0.2)
    assert "it was held for 9 s, which is lease_max_s" in queue.pair.decode.failed["a"]
    queue.run(2)
    queue.pair.assert_idle()


def test_a_prefill_node_that_dies_meanwhile_fails_its_own_requests_when_they_are_loaded_and_no_others():
    queue = Queue()
    other = queue.pair.add("Q")
    handle = HANDLES.make(Claims("Q", "e", "b", BLOCK_TOKENS, "127.0.0.1", other.channel.port, 0.0))
    lost = Request("b", BLOCK_TOKENS, {"do_remote_prefill": True, "kvconnect_handle": handle})
    queue.pair.hold("b", (6,), handle, worker=other)
    queue.half.new_request(lost)
    kept = queue.arrive("a", 5)
    queue.run(3)
    queue.pair.network.kill(other.channel.port)
    queue.pair.others.remove(other)
    queue.run(20)
    queue.admit(lost, 8)
    queue.admit(kept, 7)
    queue.run(10)
    assert list(queue.pair.decode.failed) == ["b"]
    assert queue.pair.landed((5,), (7,))


def test_a_connection_that_breaks_meanwhile_is_made_again():
    queue = Queue(peer_timeout_s=1.0, lease_s=8.0)
    request = queue.arrive("a", 5)
    queue.run(3)
    key = ("P", "127.0.0.1", queue.pair.prefill.channel.port)
    (link,) = queue.pair.decode.transfers.decode.peers.peers[key].links.values()
    queue.pair.decode.transfers.decode.receive(LinkLost(link.name, PeerLoss.LINK_LOST), queue.pair.clock.now)
    queue.run(20)
    queue.admit(request, 7)
    queue.run(1)
    assert queue.pair.decode.failed == {}
    assert queue.pair.landed((5,), (7,))


def test_a_handle_that_p_never_hears_of_is_asked_for_no_longer_than_an_early_fetch():
    queue = Queue(early_fetch_s=3.0)
    request = queue.arrive("a", None)
    queue.run(6)
    count = len(queue.renewals)
    assert count
    queue.run(10)
    assert len(queue.renewals) == count
    queue.admit(request, 7)
    queue.run(0.2)
    assert "no request is held under this handle" in queue.pair.decode.failed["a"]


def test_waiting_requests_make_no_more_connections_than_peers_are_remembered():
    queue = Queue(max_peers=2)
    for number in range(10):
        params = queue.params("a", 4000 + number)
        queue.half.new_request(Request(f"r{number}", BLOCK_TOKENS, params))
    queue.run(3)
    assert len(queue.pair.decode.transfers.decode.peers) <= 2


def asked_for(queue: Queue, expected: bool = True) -> Pair:
    """D has asked P about a transfer that is announced, and P is computing it, or has not heard of it."""
    pair = queue.pair
    if expected:
        pair.prefill.order(Orders(expected=("transfer:t",)))
    order = Await("transfer:t", ("", "127.0.0.1", pair.prefill.channel.port), reports=True)
    pair.decode.order(Orders(awaited=(order,)))
    pair.run(0.2)
    return pair


def settled(pair: Pair) -> list[str]:
    return [handle for results in pair.decode.results for handle in results.settled]


@pytest.mark.parametrize("expected", [True, False])
def test_p_says_at_once_that_it_holds_what_it_was_asked_for_before(expected):
    pair = asked_for(Queue(), expected)
    assert settled(pair) == []
    pair.hold("t", (5,), "transfer:t")
    pair.run(0.1)
    assert settled(pair) == ["transfer:t"]
    pair.run(9)
    assert pair.prefill.count("failures", reason="lease_expired") == 0
    pair.load("t", (7,), "transfer:t", engine_id="", host="127.0.0.1", run_s=1)
    assert settled(pair) == ["transfer:t"], "it is reported once"
    assert pair.landed((5,), (7,))
    pair.assert_idle()


def test_p_says_at_once_that_nothing_comes_of_a_prefill():
    pair = asked_for(Queue())
    pair.prefill.order(Orders(withdrawn=(Withdraw("transfer:t", Cause.PREFILL_ENDED("it was aborted")),)))
    pair.run(0.1)
    assert settled(pair) == ["transfer:t"]
    pair.load("t", (7,), "transfer:t", engine_id="", host="127.0.0.1", run_s=0.1)
    assert "it was aborted" in pair.decode.failed["t"]


def test_a_prefill_that_is_under_way_is_waited_for_and_one_that_is_not_known_is_not():
    known, unknown = asked_for(Queue(early_fetch_s=3.0)), asked_for(Queue(early_fetch_s=3.0), expected=False)
    for pair in (known, unknown):
        pair.run(20)
    assert settled(known) == []
    assert settled(unknown) == ["transfer:t"]


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_peer_that_says_nothing_any_more_settles_what_it_was_asked_for(how):
    pair = asked_for(Queue(peer_timeout_s=3.0))
    if how == "silent":
        pair.cut()
    else:
        pair.network.kill(pair.prefill.channel.port)
    pair.run(15)
    assert settled(pair) == ["transfer:t"]


def test_a_prefill_that_never_ends_is_waited_for_as_long_as_a_lease_may_last():
    pair = asked_for(Queue(lease_max_s=20.0))
    pair.run(19)
    assert settled(pair) == []
    pair.run(3)
    assert settled(pair) == ["transfer:t"]
    pair.load("t", (7,), "transfer:t", engine_id="", host="127.0.0.1", run_s=0.1)
    assert "its prefill was not complete within 20 s, which is lease_max_s" in pair.decode.failed["t"]

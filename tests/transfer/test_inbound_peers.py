"""Connections that peers open to a worker, where it serves them and where it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.peer.messages import PROTOCOL_VERSION, FindPrefix, Hello, PrefixFound
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.inbound_peers import NO_PREFILL, InboundPeers
from kvconnect.transfer.orders import Await, Load, Orders
from kvconnect.transfer.parts import Timers, TransferContext
from tests.transfer.pair import D_IDS, FakeWorker, Pair


def test_inbound_peers_that_all_were_in_use_make_room_once_they_are_not():
    links = [f"in:{number}" for number in range(10)]
    config, metrics, timers = ExtraConfig(max_peers=4), Metrics(), Timers(print)
    peers = InboundPeers(TransferContext(config, None, None, None, metrics, None, timers))
    in_use = set(links)
    peers.service = SimpleNamespace(links_in_use=lambda: in_use, met=lambda link: None)
    for link in links:
        peers._handle(link, SimpleNamespace(), Hello(PROTOCOL_VERSION, None), 0.0)
    assert len(peers) == 10
    in_use.clear()
    peers._handle("in:new", SimpleNamespace(), Hello(PROTOCOL_VERSION, None), 0.0)
    assert [link for link, _ in peers] == [*links[7:], "in:new"]


def test_nodes_of_one_role_each_build_no_part_of_the_other_and_hand_over():
    pair = Pair(are_apart=True)
    assert pair.prefill.transfers.decode is None
    assert pair.decode.transfers.prefill is None
    pair.start("a", run_s=1)
    assert pair.decode.received == ["a"]
    assert pair.landed()
    pair.decode.transfers.replace_weights({"files": "new"})
    pair.prefill.transfers.replace_weights({"files": "new"})
    pair.start("b")
    pair.run(60, step_s=1.0)
    assert not pair.decode.failed
    pair.assert_idle()


@pytest.fixture
def asked():
    """A node that only decodes, and one that takes it for a prefill node."""
    pair = Pair(are_apart=True)
    asking = FakeWorker("E", 60, pair.network, pair.config, role="kv_consumer")
    pair.others.append(asking)
    return pair, asking


def test_a_node_that_only_decodes_refuses_a_fetch_at_once(asked):
    pair, asking = asked
    load = Load("a", "handle-a", ("D", "h", pair.decode.channel.port), 12, (GroupBlocks(0, 0, D_IDS),))
    asking.order(Orders(loads=(load,)))
    pair.run(1)
    assert asking.failed == {"a": NO_PREFILL.text}
    pair.assert_idle()


def test_a_node_that_only_decodes_keeps_nothing_for_a_request_that_waits(asked):
    pair, asking = asked
    waits = Await("handle-a", ("D", "h", pair.decode.channel.port), reports=True)
    asking.order(Orders(awaited=(waits,)))
    pair.run(1)
    assert [handle for results in asking.results for handle in results.settled] == ["handle-a"]


def test_a_node_that_only_decodes_refuses_what_a_tool_or_a_stranger_asks(asked):
    pair, _ = asked
    message = FindPrefix(7, Prefix(Naming("sha", 4), 0, (b"a",)), 4)
    sent = []
    inbound = SimpleNamespace(session=SimpleNamespace(send=sent.append))
    pair.decode.transfers.inbound_peers.service.serve("in:1", inbound, message, 0.0)
    assert sent == [PrefixFound(7, error=NO_PREFILL)]

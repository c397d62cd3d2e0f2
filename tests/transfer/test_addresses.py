"""Peers that name addresses which are not theirs: nobody is connected to them."""

from __future__ import annotations

import msgspec
import pytest

from kvconnect.addresses import RankAddress
from kvconnect.config import ExtraConfig
from kvconnect.engine.adapter import card_host
from kvconnect.engine.mooncake import MooncakeCard
from kvconnect.engine.nixl_library import NixlCard, own_identity
from kvconnect.peer.allow_list import same_host
from kvconnect.peer.messages import Hello, Welcome
from tests.transfer.pair import Pair
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, same_blocks

SHAPE = same_blocks(4)


def lying_ranks(host, **extra):
    """Two ranks on either side; P says that its rank 1 listens at ``host``. What D's ranks connect to."""
    ranks = Ranks(Model({"full": 2}), SHAPE, SHAPE, 2, 2, config=ExtraConfig(**extra))
    said = RankAddress(1, host, ranks.prefill[1].channel.port)
    ranks.network.change(Welcome, directory=(ranks.directory[0], said))
    connected = []
    for worker in ranks.decode:
        open_link = worker.channel.connect

        def connect(link, host, port, open_link=open_link):
            connected.append(host)
            open_link(link, host, port)

        worker.channel.connect = connect
    ranks.prefilled("a", 9)
    ranks.fetched("a", 9)
    ranks.settle(40)
    return ranks, connected


def test_a_peer_cannot_send_us_to_another_host_for_its_other_ranks():
    ranks, connected = lying_ranks("198.51.100.7")
    assert set(connected) == {"h"}
    for worker in ranks.decode:
        assert "its rank 1 listens at 198.51.100.7:" in worker.failed["a"]
        assert "allow_peers" in worker.failed["a"]
        assert worker.count("failures", reason="peer_not_trusted") == 1


@pytest.mark.parametrize(("host", "allowed"), [("h", ()), ("198.51.100.7", ("h", "198.51.100.0/24"))])
def test_ranks_on_the_same_host_and_on_those_that_are_listed_are_met(host, allowed):
    ranks, connected = lying_ranks(host, allow_peers=allowed)
    assert set(connected) == {"h", host}
    assert [worker.received for worker in ranks.decode] == [["a"]] * 2
    ranks.assert_idle()


def lying_card(host, **extra):
    """D's engine card names ``host``; its connection comes from 127.0.0.1. The hosts that P connects to."""
    pair = Pair(ExtraConfig(**extra))
    card = msgspec.msgpack.decode(pair.decode.engine.card())
    forged = msgspec.msgpack.encode({**card, "host": host})

    ours = pair.decode.local.introduction
    pair.network.change(Hello, introduction=msgspec.structs.replace(ours, engine_card=forged))
    connect, connected = pair.prefill.engine.connect, []
    pair.prefill.engine.connect = lambda peer, card: (connected.append(card_host(card)), connect(peer, card))
    pair.start(run_s=0)
    return pair, connected


def test_a_peer_cannot_have_kv_sent_to_another_host():
    pair, connected = lying_card("198.51.100.7")
    assert connected == []
    assert "at 127.0.0.1 is at host 198.51.100.7; accepted: the address that" in pair.decode.failed["a"]
    assert "allow_peers" in pair.decode.failed["a"]
    assert pair.prefill.count("failures", reason="peer_not_trusted") == 1
    pair.assert_idle(60)


@pytest.mark.parametrize(
    ("host", "allowed"), [("127.0.0.1", ()), ("localhost", ()), ("198.51.100.7", ("h", "198.51.100.7:14600"))]
)
def test_kv_is_sent_where_a_peer_comes_from_and_to_hosts_that_are_listed(host, allowed):
    pair, connected = lying_card(host, allow_peers=allowed)
    assert connected == [host]
    assert pair.landed()
    pair.assert_idle()


@pytest.mark.parametrize(
    ("card", "host"),
    [
        (msgspec.msgpack.encode(MooncakeCard("10.0.0.2:15003", "tcp")), "10.0.0.2"),
        (msgspec.msgpack.encode(MooncakeCard("[2001:db8::2]:15003", "tcp")), "2001:db8::2"),
        (msgspec.msgpack.encode({"host": "10.0.0.2"}), "10.0.0.2"),
        (msgspec.msgpack.encode(NixlCard(b"of the library", [], own_identity())), ""),
        (msgspec.msgpack.encode({"session": 5}), ""),
        (b"\xc1", ""),
        (b"", ""),
    ],
)
def test_the_host_of_a_card(card, host):
    assert card_host(card) == host


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:0db8:0::1", True),
        ("localhost", "127.0.0.1", True),
        ("localhost", "::1", True),
        ("Node-A", "node-a", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "10.0.0.1/8", False),
        ("node-a", "10.0.0.1", False),
        ("127.0.0.1", "10.0.0.1", False),
    ],
)
def test_same_host(one, other, same):
    assert same_host(one, other) == same_host(other, one) == same

"""Peers that die, fall silent, come back or are met before anybody asks: known without any traffic."""

from __future__ import annotations

from kvconnect.config import ExtraConfig
from kvconnect.outcome import Cause
from kvconnect.peer.channel import LinkLost
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import Alive, Hello, StillAlive
from tests.transfer.pair import D_IDS, OTHER, P_IDS, FakeWorker, Pair, quarantined


def met(**config):
    """A pair that has worked together, and is idle."""
    pair = Pair(ExtraConfig(**config))
    pair.start(run_s=0.5)
    assert pair.landed()
    return pair


def restart(pair):
    """P is gone, and another process serves at its address."""
    port = pair.prefill.channel.port
    pair.network.kill(port)
    pair.run(1)
    pair.prefill = FakeWorker("P2", pair.prefill_blocks, pair.network, pair.config)
    pair.network._channels[port] = pair.prefill.channel
    pair.prefill.channel.port = port


def test_an_idle_peer_costs_a_few_messages_in_ten_seconds():
    pair = met()
    before = len(pair.network.said)
    pair.run(10)
    said = pair.network.said[before:]
    assert {type(message) for message in said} == {Alive, StillAlive}
    assert len(said) <= 8


def test_a_peer_that_was_never_met_costs_nothing():
    pair = Pair()
    pair.run(30, step_s=1)
    assert not pair.network.said


def breaker_of(pair):
    (peer,) = pair.decode.transfers.decode.peers.peers.values()
    return peer.breaker


def run_until_breaker_is(pair, state):
    for _ in range(1000):
        pair.run(0.05)
        breaker = breaker_of(pair)
        if breaker.failures and breaker.is_probing == (state == "probing"):
            return
    raise AssertionError(f"the breaker never was {state}")


def test_a_dead_peer_is_known_before_the_next_request_which_fails_at_once():
    pair = met()
    pair.cut(run_s=25)
    run_until_breaker_is(pair, "probing")
    run_until_breaker_is(pair, "open")
    pair.start("b", *OTHER, run_s=0.05)
    assert "out of reach" in pair.decode.failed["b"]
    assert "did not answer the greeting" in pair.decode.failed["b"]


def test_loads_that_come_while_a_peer_is_tried_again_wait_for_what_comes_of_it():
    pair = met()
    pair.cut(run_s=25)
    run_until_breaker_is(pair, "open")
    run_until_breaker_is(pair, "probing")
    for number in range(3):
        pair.load(f"r{number}", (40 + number,))
    pair.run(0.2)
    assert not pair.decode.failed
    run_until_breaker_is(pair, "open")
    assert len(pair.decode.failed) == 3


def test_a_peer_that_stays_dead_is_tried_ever_more_rarely_and_in_the_end_not_at_all():
    pair = met()
    pair.cut()
    pair.run(60, step_s=0.25)
    before = len(pair.network.heard(Hello))
    pair.run(60, step_s=0.25)
    assert 3 <= len(pair.network.heard(Hello)) - before <= 13
    pair.run(300, step_s=1)
    before = len(pair.network.heard(Hello))
    pair.run(60, step_s=1)
    assert len(pair.network.heard(Hello)) == before


def test_a_restarted_peer_is_fetched_from_under_its_new_name():
    pair = met()
    restart(pair)
    pair.hold("b", OTHER[0])
    pair.load("b", OTHER[1], engine_id="P2", run_s=0.2)
    assert pair.decode.failed == {}
    assert pair.landed(*OTHER)


def test_a_late_answer_that_the_port_is_closed_ends_the_quarantine():
    """The process was torn down just when its port was looked at: the next attempt shows that it is gone."""
    pair = Pair()
    pair.stall(1)
    decode = pair.decode.transfers.decode
    (name,) = decode.peers.links
    decode.receive(LinkLost(name, PeerLoss.LINK_LOST), pair.clock.now)
    pair.network.kill(pair.prefill.channel.port)
    pair.run(0.5)
    assert pair.decode.received == ["a"]
    assert quarantined(pair.decode.landing) == 2
    pair.run(1.5)
    assert pair.decode.landing.taken == 0


def test_warm_peers_are_met_before_anybody_asks_and_used_under_their_name():
    pair = Pair(ExtraConfig(warm_peers=("h:1",)))
    assert pair.prefill.channel.port == 1
    pair.run(0.2)
    assert len(pair.network.heard(Hello)) >= 1
    hellos = len(pair.network.heard(Hello))
    pair.start(run_s=0.2)
    assert pair.landed()
    assert len(pair.network.heard(Hello)) == hellos
    pair.run(20, step_s=1)
    assert len(pair.network.heard(Hello)) == hellos
    pair.assert_idle()


def test_sources_are_met_in_advance_too_and_a_node_never_meets_itself():
    sources = ("h:1", "h:2", "own:3")
    pair = Pair(ExtraConfig(host="own", port=3, sources=sources))
    pair.run(0.2)
    assert sorted(pair.decode.transfers.decode.peers.peers) == [("", "h", 1), ("", "h", 2)]


def test_more_warm_peers_than_are_remembered_are_not_met_again_and_again():
    pair = Pair(ExtraConfig(max_peers=1, sources=("h:1", "h:2", "h:3")))
    pair.run(1)
    # Where nobody listens it is tried now and then, and whoever does is met once.
    assert len(pair.network.heard(Hello)) < 20
    assert len(pair.decode.transfers.decode.peers.peers) == 3


def test_a_warm_peer_that_came_back_under_another_name_is_met_again():
    pair = Pair(ExtraConfig(warm_peers=("h:1",)))
    pair.start(run_s=0.5)
    assert pair.landed(P_IDS, D_IDS)
    restart(pair)
    pair.run(12)
    hellos = len(pair.network.heard(Hello))
    pair.hold("b", OTHER[0])
    pair.load("b", OTHER[1], engine_id="P2", run_s=0.2)
    assert pair.landed(*OTHER)
    assert len(pair.network.heard(Hello)) == hellos


def test_a_load_that_comes_to_nothing_when_its_turn_comes_is_reported_in_the_same_step(monkeypatch):
    pair = Pair()
    # The connection breaks between the order and its turn: nothing is left that would wake anybody.
    reasons = iter([None, Cause.OUT_OF_REACH("the peer is out of reach")])
    monkeypatch.setattr(pair.decode.transfers.decode.peers, "refusal", lambda key, now: next(reasons))
    pair.load("a", D_IDS)
    pair.decode.step(pair.clock.now)
    assert pair.decode.failed == {"a": "the peer is out of reach"}

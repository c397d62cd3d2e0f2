"""Questions to a worker that serves: over real sockets, without a greeting, and without a trace of it."""

from __future__ import annotations

import json
import math
import secrets
import time

import msgspec
import pytest

from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import PeerError
from kvconnect.halves import worker_half as connector
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.peer.asking import ask
from kvconnect.peer.description import TOPIC, Description, read_answer
from kvconnect.peer.keyring import SharedKeys
from kvconnect.peer.messages import PROTOCOL_VERSION, CacheMeaning, Question
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.timeline import Moment
from kvconnect.tools.inspect_runner import look, run_inspect
from kvconnect.transfer.orders import Hold, Orders
from kvconnect.transfer.parts import Timers
from kvconnect.transfer.topics import Topics
from tests.identities import named
from tests.ports import free_port
from tests.transfer.pair import HEADS, PlainCache

SECRET = secrets.token_urlsafe(32)


@pytest.fixture
def worker(monkeypatch):
    """A worker that serves, with a shared key."""
    monkeypatch.setenv("KVCONNECT_KEY", SECRET)
    given = {"engine": "memory", "port": free_port(), "num_slots": 2, "slot_bytes": 1 << 16}
    config = parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": given})
    cache = PlainCache(8)
    sent = SentCache(cache.described, CacheMeaning(named(weights="1f"), HEADS, 1))
    made = TransferWorker(config, RankTraits(sent=sent))
    yield made
    made.close()


def asked(worker, topic=TOPIC, secret=SECRET, **changes):
    extra = msgspec.structs.replace(worker._config.extra, **changes)
    return ask(extra, SharedKeys(secret, "here"), ("127.0.0.1", worker.address().port), topic, Description)


def test_a_worker_describes_itself(worker):
    before = time.time()
    reply = asked(worker)
    told = reply.value
    assert before <= reply.asked_at <= told.clock_s <= reply.answered_at
    assert (told.protocol, told.role) == (PROTOCOL_VERSION, "kv_both")
    assert told.lane == "memory of this process"
    assert told.versions["python"]
    assert told.introduction.meaning.identity.weights == {"files": "1f"}
    assert told.introduction.table.regions == worker.local.introduction.table.regions
    assert worker.state()["inbound_peers"] == 0, "who asks is no peer"


def test_who_asks_has_no_file_read_on_the_transfer_thread(worker, monkeypatch):
    def read():
        raise AssertionError("while peers are served")

    monkeypatch.setattr(connector, "package_versions", read)
    assert asked(worker).value.versions["python"]


def test_weights_that_were_replaced_are_told(worker):
    worker.replace_weights({"files": "2e"})
    deadline = time.monotonic() + 5
    while asked(worker).value.introduction.meaning.identity.weights != {"files": "2e"}:
        assert time.monotonic() < deadline


def test_a_topic_that_is_not_known_is_an_error_that_names_those_that_are(worker):
    with pytest.raises(PeerError, match=f"topic is 'rumours', accepted: .*{TOPIC}"):
        asked(worker, "rumours")


def test_another_key_learns_nothing(worker):
    with pytest.raises(PeerError, match="different keys|does not admit our public key"):
        asked(worker, secret=secrets.token_urlsafe(32))


def test_an_address_without_a_listener_is_named(worker):
    port = free_port()
    with pytest.raises(PeerError, match=f"nothing listens at 127.0.0.1:{port}"):
        ask(worker._config.extra, SharedKeys(SECRET, "here"), ("127.0.0.1", port), TOPIC, Description)


def test_a_listener_that_says_nothing_costs_the_time_of_a_peer(worker):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        extra = msgspec.structs.replace(worker._config.extra, peer_timeout_s=0.1)
        with pytest.raises(PeerError, match="did not answer within 0.1 s"):
            ask(extra, SharedKeys(SECRET, "here"), deaf.getsockname(), TOPIC, Description)


def test_another_protocol_is_described_and_not_read(worker):
    told = msgspec.structs.replace(asked(worker).value, protocol=PROTOCOL_VERSION + 1)
    told = read_answer(msgspec.msgpack.encode(told), Description)
    with pytest.raises(PeerError, match=f"protocol version is {PROTOCOL_VERSION + 1}"):
        _ = told.introduction


def fail(error: Exception) -> None:
    raise error


def test_an_answer_is_bounded_and_an_error_is_one_too():
    topics = Topics(1 << 16, Timers(fail))
    topics.add("long", lambda argument: bytes(1 << 16))
    topics.add("wrong", lambda argument: bytes(int(argument)))
    assert "65536 bytes" in topics.answer(Question(1, "long")).error
    assert "ValueError" in topics.answer(Question(2, "wrong", "x")).error
    assert topics.answer(Question(3, "wrong", "2")).data == bytes(2)


def test_questions_take_their_turns_and_only_so_many_wait():
    timers, replies = Timers(fail), []
    topics = Topics(1 << 16, timers)
    topics.add("state", lambda argument: b"")
    assert timers.next_at() == math.inf
    for number in range(100):
        topics.ask(Question(number, "state"), replies.append, 10.0)
    first, *refused = replies
    assert (first.number, first.error) == (0, "")
    assert {reply.number for reply in refused} == set(range(65, 100))
    assert all("wait" in reply.error for reply in refused)
    replies.clear()
    now = 10.0
    while timers.next_at() < math.inf:
        assert timers.next_at() > now
        assert not timers.run(now)
        now = timers.next_at()
        assert timers.run(now)
    assert [reply.number for reply in replies] == list(range(1, 65))
    assert now >= 10.0 + 64 * 0.05 - 1e-6


def test_what_a_worker_holds_is_read_over_the_side_channel(worker, capsys):
    groups = (GroupBlocks(0, 0, (1, 2)),)
    holds = tuple(Hold(f"r{number}", f"h{number}", 2, groups, 0) for number in range(600))
    worker.start(Orders(step=0, holds=holds))
    worker._tiers = lambda: {"host": {"records": 3}}
    address = ("127.0.0.1", worker.address().port)
    extra, keyring = worker._config.extra, SharedKeys(SECRET, "here")
    described, found = look(extra, keyring, address, whole=True)
    assert (described.role, found.engine_id, found.rank) == ("kv_both", worker._config.engine_id, 0)
    assert found.counts["leases"] == 600
    assert [lease["request_id"] for lease in found.leases] == [hold.request_id for hold in holds]
    assert found.tiers == {"host": {"records": 3}}
    assert [one["direction"] for one in found.slots] == ["receive", "send"]
    assert Moment.HELD in {one["moment"] for one in found.latest}
    assert len(look(extra, keyring, address, whole=False)[1].leases) < 600, "one page"
    assert run_inspect([":".join(map(str, address))], extra, watch=False, json_output=True) == 0
    assert len(json.loads(capsys.readouterr().out)["holds"]["leases"]) == 600

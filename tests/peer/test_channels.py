"""One contract for channels: the in-memory network and ZeroMQ pass the same tests."""

from __future__ import annotations

import socket
import time

import pytest
import zmq

from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.channel import Frame, LinkLost
from kvconnect.peer.keyring import SharedKeys
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.zmq_channel import ZmqChannel
from tests.peer.keys import node_keys
from tests.peer.memory_network import MemoryNetwork

LIMIT = 1 << 20


@pytest.fixture(params=["memory", "insecure", "shared", "node"])
def make_channel(request, tmp_path):
    network = MemoryNetwork(time.monotonic)
    made = []
    keyrings = {
        "insecure": lambda: None,
        "shared": lambda: SharedKeys("a secret that both of them have", "a test"),
        "node": lambda: node_keys(tmp_path, "one", "two")[len(made) % 2],
    }

    def make():
        if request.param == "memory":
            channel = network.channel()
        else:
            channel = zmq_channel(keyring=keyrings[request.param]())
        made.append(channel)
        return channel

    yield make
    # Twice is allowed.
    for channel in (*made, *made):
        channel.close()


def arrivals(channel, count, timeout_s=5.0):
    seen = []
    deadline = time.monotonic() + timeout_s
    while len(seen) < count and time.monotonic() < deadline:
        channel.wait(0.05)
        seen += channel.receive()
    return seen


def test_frames_keep_their_order_and_can_be_answered(make_channel):
    server, client = make_channel(), make_channel()
    client.connect("p", "127.0.0.1", server.port)
    for n in range(100):
        assert client.send("p", b"%d" % n)
    seen = arrivals(server, 100)
    assert [frame.data for frame in seen] == [b"%d" % n for n in range(100)]
    (link,) = {frame.link for frame in seen}
    assert link.startswith("in:")
    assert {frame.host for frame in seen} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert server.send(link, b"answer")
    assert arrivals(client, 1) == [Frame("p", b"answer")]


def test_two_links_to_one_peer_are_two_conversations(make_channel):
    server, client = make_channel(), make_channel()
    for name in ("one", "two"):
        client.connect(name, "127.0.0.1", server.port)
        client.send(name, name.encode())
    links = {frame.data: frame.link for frame in arrivals(server, 2)}
    server.send(links[b"two"], b"only two")
    assert arrivals(client, 1) == [Frame("two", b"only two")]


def test_a_port_that_nobody_listens_on_is_refused(make_channel):
    client, gone = make_channel(), make_channel()
    port = gone.port
    gone.close()
    client.connect("p", "127.0.0.1", port)
    client.send("p", b"x")
    assert LinkLost("p", PeerLoss.PROCESS_GONE) in arrivals(client, 1)


@pytest.mark.parametrize("sleep_s", [0.0, 0.3])
def test_what_a_peer_said_before_it_ended_is_heard(make_channel, sleep_s):
    server, client = make_channel(), make_channel()
    client.connect("p", "127.0.0.1", server.port)
    client.send("p", b"x")
    (frame,) = arrivals(server, 1)
    client.receive()
    said = [b"%d" % n for n in range(3)]
    for data in said:
        assert server.send(frame.link, data)
    server.close()
    time.sleep(sleep_s)
    assert arrivals(client, 4) == [*(Frame("p", data) for data in said), LinkLost("p", PeerLoss.PROCESS_GONE)]


def test_dropped_links_are_silent(make_channel):
    server, client = make_channel(), make_channel()
    client.connect("p", "127.0.0.1", server.port)
    client.send("p", b"x")
    (frame,) = arrivals(server, 1)
    client.drop("p")
    client.drop("p")
    server.send(frame.link, b"late")
    assert arrivals(client, 1, timeout_s=0.3) == []


def zmq_channel(keyring=None, port=0, allowed=(), count=lambda reason: None, **limits):
    extra = ExtraConfig(**{"max_message_bytes": LIMIT, "peer_timeout_s": 5, **limits})
    return ZmqChannel(extra, port, keyring, AllowList(allowed), count)


@pytest.fixture
def channels():
    made = []

    def make(keyring=None, **more):
        counted = []
        channel = zmq_channel(keyring, count=counted.append, **{"handshake_timeout_s": 1, **more})
        channel.counted = counted
        made.append(channel)
        return channel

    yield make
    for channel in made:
        channel.close()


def test_wake_ends_a_wait(channels):
    channel = channels()
    channel.wake()
    start = time.monotonic()
    channel.wait(10)
    assert time.monotonic() - start < 5
    channel.receive()


def test_messages_beyond_the_limit_do_not_arrive(channels):
    server, client = channels(max_message_bytes=1000), channels()
    client.connect("p", "127.0.0.1", server.port)
    client.send("p", bytes(2000))
    assert arrivals(server, 1, timeout_s=0.5) == []


def test_a_message_of_several_parts_is_dropped(channels):
    server = channels()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{server.port}")
    dealer.send_multipart([b"a", b"b"])
    dealer.send(b"one")
    assert [frame.data for frame in arrivals(server, 1)] == [b"one"]
    dealer.close(0)
    context.term()


def test_a_message_of_an_old_zeromq_is_dropped_and_all_others_arrive(channels):
    server, client = channels(), channels()
    client.connect("p", "127.0.0.1", server.port)
    client.send("p", b"before")
    old = b"\xff" + bytes(8) + b"\x7f" + b"\x01\x05" + b"\x00\x00"
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(old + b"\x00\x01x" * 3)
        # All of them lie there when the server looks.
        time.sleep(0.3)
        client.send("p", b"after")
        time.sleep(0.1)
        assert [frame.data for frame in arrivals(server, 2)] == [b"before", b"after"]
    assert server.counted == ["peer_message"] * 3


def test_a_port_that_is_taken_is_a_config_error(channels):
    first = channels()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{first.port}"):
        channels(port=first.port)


def test_an_address_that_cannot_be_connected_to_is_a_lost_link(channels):
    channel = channels()
    channel.connect("p", "no such host", 1)
    assert not channel.send("p", b"x")
    (lost,) = channel.receive()
    assert (lost.link, lost.loss) == ("p", PeerLoss.LINK_LOST)
    assert "no connection can be made" in lost.reason


def test_answers_come_through_a_flood(channels):
    server, client = channels(), channels()
    client.connect("p", "127.0.0.1", server.port)
    client.send("p", b"x")
    (frame,) = arrivals(server, 1)
    flood = zmq.Context()
    dealer = flood.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{client.port}")
    for _ in range(2000):
        dealer.send(b"junk")
    time.sleep(0.3)
    server.send(frame.link, b"answer")
    time.sleep(0.3)
    assert Frame("p", b"answer") in client.receive()
    dealer.close(0)
    flood.term()

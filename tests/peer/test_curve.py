"""Who may speak over the side channel: wrong keys, no keys, half a handshake, and far too many of them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from kvconnect.peer.channel import Frame, LinkLost
from kvconnect.peer.keyring import SharedKeys, new_key_pair
from kvconnect.peer.loss import PeerLoss
from tests.peer.keys import introduce, make_folder, node_keys
from tests.peer.test_channels import arrivals, zmq_channel
from tests.peer.test_channels import channels as channels

OURS = SharedKeys("a secret that both of them have", "ours")
THEIRS = SharedKeys("a secret that only one of them has", "theirs")


def run_both(server, client):
    """Serve both ends until a frame has arrived, or the client knows that its link is lost."""
    seen, frames = [], []
    deadline = time.monotonic() + 5
    while not (seen or frames) and time.monotonic() < deadline:
        frames += server.receive()
        seen += client.receive()
        client.wait(0.01)
    return seen, frames


def say(server, client, data=b"hello"):
    """Connect, and send a frame."""
    client.connect("p", "127.0.0.1", server.port)
    client.send("p", data)
    return run_both(server, client)


def serve_until(server, is_true):
    """Take what comes until something is true, or for some seconds."""
    end = time.monotonic() + 5
    while not is_true() and time.monotonic() < end:
        server.receive()
        server.wait(0.05)


@pytest.mark.parametrize(
    ("server_keys", "client_keys", "cause"),
    [
        (OURS, THEIRS, "different keys"),
        (OURS, None, "encrypts|different keys"),
        (None, OURS, "encrypts|different keys"),
    ],
)
def test_a_handshake_that_cannot_succeed_ends_at_once_with_its_cause(
    channels, server_keys, client_keys, cause, caplog
):
    server, client = channels(server_keys), channels(client_keys)
    began = time.monotonic()
    seen, frames = say(server, client)
    assert time.monotonic() - began < 2
    (lost,) = seen
    assert (lost.link, lost.loss) == ("p", PeerLoss.LINK_LOST)
    assert any(word in lost.reason for word in cause.split("|")), lost.reason
    assert ("insecure" if client_keys is None else "shared key") in lost.reason
    assert frames == [], "nothing of a stranger reaches a session"
    serve_until(server, lambda: server.counted)
    # Where neither side understands the other, chance decides who leaves first.
    assert set(server.counted) <= {"handshake_refused", "handshake_incomplete"} != set()
    if None not in (server_keys, client_keys):
        assert "handshake_refused" in server.counted
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == ("handshake_refused" in server.counted), "once, however often it comes again"


def test_a_client_whose_key_is_not_known_is_told_so_and_can_be_added(channels, tmp_path, caplog):
    server_keys, client_keys = node_keys(tmp_path, "one", "two")
    os.unlink(tmp_path / "one" / "peers" / "two.json")
    server, client = channels(server_keys), channels(client_keys)
    seen, frames = say(server, client)
    assert "does not admit our public key" in seen[0].reason
    assert frames == []
    assert server.counted[0] == "client_not_admitted"
    assert client_keys.client.public.hex() in caplog.text, "what an operator has to add"
    introduce(tmp_path / "one", "two", client_keys.client.public.hex())
    _, frames = say(server, client)
    assert [frame.data for frame in frames] == [b"hello"]


def test_a_server_that_is_not_who_it_should_be_is_not_spoken_to(channels, tmp_path):
    _, client_keys = node_keys(tmp_path, "one", "two")
    make_folder(tmp_path / "impostor")
    introduce(tmp_path / "impostor", "two", client_keys.client.public.hex())
    (impostor_keys,) = node_keys(tmp_path, "impostor")
    impostor, client = channels(impostor_keys), channels(client_keys)
    seen, frames = say(impostor, client)
    assert "different keys" in seen[0].reason
    assert frames == []


def test_a_peer_whose_key_is_not_known_is_not_connected_to(channels, tmp_path):
    _, client_keys = node_keys(tmp_path, "one", "two")
    client = channels(client_keys)
    client.connect("p", "192.0.2.1", 5600)
    assert not client.send("p", b"x")
    (lost,) = client.receive()
    assert "no public key is known of a peer at 192.0.2.1:5600" in lost.reason


def test_a_peer_that_is_not_allowed_is_not_connected_to(channels):
    server = channels(OURS)
    client = channels(OURS, allowed=[f"127.0.0.1:{server.port + 1}"])
    client.connect("p", "127.0.0.1", server.port)
    assert client.receive() == [
        LinkLost("p", PeerLoss.LINK_LOST, f"allow_peers does not have 127.0.0.1:{server.port}")
    ]
    server.wait(0.2)
    assert server.receive() == []


def test_after_an_interruption_the_handshake_is_made_anew(channels):
    server, client = channels(OURS), channels(OURS)
    for said in (b"one", b"two"):
        _, frames = say(server, client, said)
        assert [frame.data for frame in frames] == [said]
        guard = server._authenticator
        assert [guard._is_ours(descriptor, shut=True) for descriptor in guard._open] == [True]
        seen, _ = run_both(server, client)
        assert seen == [LinkLost("p", PeerLoss.LINK_LOST, "")], "not gone: the port is open"


# --- strangers ------------------------------------------------------------------------------------


def still_works(channels, server):
    """An honest peer is served."""
    client = channels(OURS)
    client.connect("p", "127.0.0.1", server.port)
    client.send("p", b"honest")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for frame in server.receive():
            if isinstance(frame, Frame):
                assert frame.data == b"honest", "nothing of a stranger reaches a session"
                assert server.send(frame.link, b"served")
        if Frame("p", b"served") in client.receive():
            return True
        client.wait(0.01)
    return False


ZMTP_1 = b"\x01\x00" + b"\x06\x00hello"
ZMTP_2 = b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + b"\x00\x05hello"
NULL_3 = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04\x05\x05READY\x00\x05hello"
CURVE_3 = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)


SPOKEN = {
    "zmtp 1": ZMTP_1,
    "zmtp 2": ZMTP_2,
    "null": NULL_3,
    "no hello": CURVE_3 + b"\x00\x05hello",
    "false hello": CURVE_3 + b"\x04\xc8\x05HELLO" + bytes(194),
    "huge": CURVE_3 + b"\x06" + struct.pack(">Q", 1 << 40),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100),
    "nothing": b"",
}


def test_no_frame_of_a_stranger_arrives_whatever_protocol_it_speaks(channels):
    server = channels(OURS)
    with contextlib.ExitStack() as strangers:
        for protocol, spoken in SPOKEN.items():
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            stranger.sendall(spoken)
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                assert server.receive() == [], protocol
                server.wait(0.02)
        # All of them are connected still.
        assert still_works(channels, server)


@settings(max_examples=15)
@given(st.binary(max_size=300), st.sampled_from([b"", CURVE_3[:12], CURVE_3]))
def test_no_bytes_of_a_stranger_arrive(data, before):
    server = zmq_channel(OURS, handshake_timeout_s=1)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(before + data)
        for _ in range(5):
            server.wait(0.01)
            assert server.receive() == []
    server.close()


def test_whoever_knows_only_the_public_key_is_not_admitted(channels):
    server, context = channels(OURS), zmq.Context()
    dealer, pair = context.socket(zmq.DEALER), new_key_pair()
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.curve_serverkey = z85.encode(OURS.server.public)
    dealer.curve_publickey, dealer.curve_secretkey = z85.encode(pair.public), z85.encode(pair.secret)
    dealer.connect(f"tcp://127.0.0.1:{server.port}")
    dealer.send(b"let me in")
    assert arrivals(server, 1, timeout_s=0.5) == []
    assert "client_not_admitted" in server.counted
    dealer.close()
    context.term()


def test_half_a_handshake_is_closed_when_its_time_is_over(channels):
    server = channels(OURS, handshake_timeout_s=0.3)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.settimeout(5)
        slow.sendall(CURVE_3[:20])
        began = time.monotonic()
        while slow.recv(4096):
            server.receive()
        assert 1 < time.monotonic() - began < 3


def test_too_many_connections_are_closed_and_those_there_before_go_on(channels):
    server, first = channels(OURS, max_peers=5, handshake_timeout_s=30), channels(OURS)
    _, frames = say(server, first, b"one")
    assert [frame.data for frame in frames] == [b"one"]
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    serve_until(server, lambda: server.counted.count("max_connections") >= 41)
    assert server.counted.count("max_connections") >= 41
    open_ = 0
    for stranger in strangers:
        stranger.settimeout(0.05)
        try:
            while stranger.recv(4096):
                pass
        except TimeoutError:
            open_ += 1
        except ConnectionError:
            pass
    assert open_ <= 19
    first.send("p", b"two")
    _, frames = run_both(server, first)
    assert [frame.data for frame in frames] == [b"two"]
    for stranger in strangers:
        stranger.close()
    serve_until(server, lambda: len(server._authenticator._open) <= 1)
    assert still_works(channels, server), "there is room again"


def test_strangers_that_come_and_go_leave_nothing_behind(channels):
    server = channels(OURS, max_peers=250)
    most = (
        len(os.listdir("/proc/self/fd")) + 10
    )  # of 300; other threads of this process open some of their own
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(NULL_3)
        server.receive()
    serve_until(server, lambda: len(os.listdir("/proc/self/fd")) <= most and not server._authenticator._open)
    assert len(os.listdir("/proc/self/fd")) <= most
    assert len(server._authenticator._open) == 0
    assert still_works(channels, server)

"""The side channel over ZeroMQ, encrypted and authenticated with CURVE.

One ROUTER socket serves the connections that peers open, and one DEALER each connection that this worker
opens. ZeroMQ reconnects by itself, which would hide the loss of a peer. So each DEALER is monitored: a lost
connection is reported, with whether the peer's port is closed now, and with the reason if it is known.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvconnect.addresses import join_address
from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.channel import Arrival, Frame, LinkLost
from kvconnect.peer.keyring import Keyring
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.probe import PROBE_INTERVAL_S, PortProbe
from kvconnect.peer.zap_authenticator import ZapAuthenticator

logger = logging.getLogger(__name__)

_MOST_ARRIVALS = 256
"""Frames taken per call, so that a flood cannot keep the owner from its other work."""

_MOST_SOCKETS = 16_384
_HIGH_WATER_MARK = 10_000
_CONNECTIONS_PER_PEER = 4
_HEARTBEAT_MS = 2_000
_RECONNECT_MS = 100
"""ZeroMQ reconnects no sooner than this. Frames after a reconnect belong to a new session and are dropped."""
_HANDSHAKE_EVENTS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
}
_LOST_EVENTS = {zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CLOSED, *_HANDSHAKE_EVENTS}
_OTHER_MECHANISM = 0x11000002
"""ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, a constant that some versions of pyzmq lack."""


@dataclass
class _Link:
    """A connection that this worker opened. ``probe`` is set while it is lost and not reported yet.

    ``doubtful`` are frames that may have been sent before or after the loss.
    """

    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    host: str
    port: int
    probe: PortProbe | None = None
    reason: str = ""
    doubtful: list[Arrival] = field(default_factory=list)


class ZmqChannel:
    """A ``Channel`` over TCP.

    Args:
        extra: where to listen, and the limits. A connection is lost after ``peer_timeout_s`` without a ZeroMQ
            heartbeat. It is closed if its handshake takes ``handshake_timeout_s`` and another second: the
            session times out earlier, with the better message.
        keyring: the keys of this node and its peers; None for neither authentication nor encryption.
        allowed: the addresses to connect to; empty for all.
        count: called with the reason whenever a peer is refused or a message is dropped.

    Raises ``ConfigError``: the address cannot be listened on.
    """

    def __init__(
        self,
        extra: ExtraConfig,
        port: int,
        keyring: Keyring | None,
        allowed: AllowList,
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._context = zmq.Context(io_threads=1)
        # A monitored connection takes three sockets; ZeroMQ's default permits some 340 connections.
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self._limits = extra
        self._keyring = keyring
        self._allowed = allowed
        self._router = self._socket(zmq.ROUTER)
        # To send to a peer that has left is an error; by default ZeroMQ drops the frame silently.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._authenticator = ZapAuthenticator(
            self._context,
            self._router,
            keyring,
            max_connections=_CONNECTIONS_PER_PEER * extra.max_peers,
            count=count,
        )
        address = f"tcp://{join_address(extra.listens_at, port or '*')}"
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self._authenticator.close()
            self._router.close()
            self._context.term()
            raise ConfigError(
                "kv_connector_extra_config.host or bind, and port: cannot listen on "
                f"{extra.listens_at}:{port}: {error}"
            ) from error
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._authenticator.port = self.port
        self._links: dict[str, _Link] = {}
        self._stillborn: dict[str, str] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        for readable in (self._router, self._wake_read, *self._authenticator.sockets):
            self._poller.register(readable, zmq.POLLIN)
        self._received_at = time.monotonic()
        self._closed = False
        self._wake_lock = threading.Lock()

    def connect(self, link: str, host: str, port: int) -> None:
        """As ``Channel``. An address that is not allowed or has no known key is reported as lost."""
        self.drop(link)
        refusal = self._refusal(host, port)
        if refusal:
            self._stillborn[link] = refusal
            return
        dealer = monitor = None
        try:
            dealer = self._socket(zmq.DEALER)
            dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
            if self._keyring is not None:
                dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keyring.client.secret)
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keyring.client.public)
                dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keyring.server_key(host, port) or b"")
            monitor = dealer.get_monitor_socket(sum(_LOST_EVENTS))
            dealer.connect(f"tcp://{join_address(host, port)}")
        except zmq.ZMQError as error:
            self._stillborn[link] = f"no connection can be made: {error}"
            if dealer is not None:
                dealer.disable_monitor()
                dealer.close()
            if monitor is not None:
                monitor.close()
            return
        self._links[link] = _Link(dealer, monitor, host, port)
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def send(self, link: str, data: bytes) -> bool:
        try:
            if link in self._links:
                if self._links[link].probe is None:
                    self._links[link].dealer.send(data, zmq.NOBLOCK)
            elif link.startswith("in:"):
                self._router.send_multipart([bytes.fromhex(link[3:]), data], zmq.NOBLOCK)
            else:
                return False
        except zmq.ZMQError as error:
            logger.debug("side channel: a frame of %d bytes for %s was dropped: %s", len(data), link, error)
            return False
        return True

    def drop(self, link: str) -> None:
        self._stillborn.pop(link, None)
        dropped = self._links.pop(link, None)
        if dropped is None:
            return
        self._poller.unregister(dropped.monitor)
        self._poller.unregister(dropped.dealer)
        if dropped.probe is not None:
            dropped.probe.close()
        dropped.dealer.disable_monitor()
        dropped.monitor.close()
        dropped.dealer.close()

    def receive(self) -> list[Arrival]:
        arrived: list[Arrival] = [
            LinkLost(link, PeerLoss.LINK_LOST, reason) for link, reason in self._stillborn.items()
        ]
        self._stillborn.clear()
        now = time.monotonic()
        stood_still, self._received_at = now - self._received_at > _RECONNECT_MS / 2000, now
        # One poll for all sockets: a poll per socket would take most of the time of this method.
        ready = {readable for readable, _ in self._poller.poll(0)}
        if not ready.isdisjoint(self._authenticator.sockets):
            self._authenticator.serve()
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 1 << 16)
        # Links that this worker opened come first, each with its own bound, so that no flood delays them.
        for name, link in list(self._links.items()):
            if link.dealer in ready:
                # Frames after a loss may belong to a new session of the peer: see ``_RECONNECT_MS``.
                is_doubtful = link.probe is not None or (stood_still and link.monitor in ready)
                self._drain_dealer(name, link, link.doubtful if is_doubtful else arrived)
                del link.doubtful[_MOST_ARRIVALS:]
            if link.monitor in ready or link.probe is not None:
                lost = self._lost(name, link)
                if lost is not None:
                    # A process that is gone sent these frames before the loss: often its last ``Written``.
                    arrived += link.doubtful if lost.loss is PeerLoss.PROCESS_GONE else ()
                    arrived.append(lost)
                    link.doubtful.clear()
        if self._router in ready:
            self._drain_router(arrived)
        return arrived

    def wait(self, timeout_s: float) -> None:
        if self._stillborn:
            return
        if any(link.probe is not None for link in self._links.values()):
            timeout_s = min(timeout_s, PROBE_INTERVAL_S)
        self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))

    def wake(self) -> None:
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Close all sockets; frames that are not sent yet get 200 ms."""
        if self._closed:
            return
        with self._wake_lock:
            # After this no other thread writes to the pipe, whose number may soon be another file's.
            self._closed = True
        for link in list(self._links):
            self.drop(link)
        self._authenticator.close()
        self._router.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 200)
        made.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        made.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        limits = self._limits
        made.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
        made.setsockopt(zmq.HANDSHAKE_IVL, int(limits.handshake_timeout_s * 1000) + 1000)
        made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(int(limits.peer_timeout_s * 1000), 2 * _HEARTBEAT_MS))
        made.setsockopt(zmq.IPV6, 1)
        return made

    def _refusal(self, host: str, port: int) -> str:
        if self._allowed and not self._allowed.allows(host, port):
            return f"allow_peers does not have {host}:{port}"
        if self._keyring is not None and self._keyring.server_key(host, port) is None:
            return (
                f"no public key is known of a peer at {host}:{port}; `kvconnect keys add` takes one "
                f"({self._keyring.describe()})"
            )
        return ""

    def _drain_dealer(self, name: str, link: _Link, arrived: list[Arrival]) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_ARRIVALS):
                arrived.append(Frame(name, link.dealer.recv(zmq.NOBLOCK)))

    def _drain_router(self, arrived: list[Arrival]) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_ARRIVALS):
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                # No answer: the sender is no kvconnect worker, and may not be able to read frames.
                if len(parts) != 2:
                    self._authenticator.complain("peer_message", "a message of other than one part")
                    continue
                try:
                    host = str(parts[1].get("Peer-Address"))
                except zmq.ZMQError:
                    # ZeroMQ has no address of a peer whose ZMTP version is below 3.
                    self._authenticator.complain("peer_message", "a message of a peer without an address")
                    continue
                arrived.append(Frame(f"in:{parts[0].bytes.hex()}", parts[1].bytes, host))

    def _lost(self, name: str, link: _Link) -> LinkLost | None:
        """The loss of a connection, once the probe has shown whether the process is gone; None before."""
        now = time.monotonic()
        while link.monitor.poll(0):
            message = recv_monitor_message(link.monitor)
            link.probe = link.probe or PortProbe(link.host, link.port, now)
            if message["event"] in _HANDSHAKE_EVENTS and not link.reason:
                link.reason = self._cause(int(message["event"]), int(message["value"]))
        if link.probe is None:
            return None
        refused = link.probe.step(now)
        if refused is None and not link.reason:
            return None
        link.probe.close()
        link.probe = None
        if refused:
            return LinkLost(name, PeerLoss.PROCESS_GONE)
        return LinkLost(name, PeerLoss.LINK_LOST, link.reason)

    def _cause(self, event: int, value: int) -> str:
        """The most likely reason why a handshake failed."""
        ours = "this node is insecure" if self._keyring is None else f"ours is the {self._keyring.describe()}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"the peer does not admit our public key ({ours})"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _OTHER_MECHANISM:
            return f"only one of the two nodes encrypts its side channel ({ours})"
        return (
            "the handshake failed: most likely the two nodes have different keys, or only one of them has "
            f"any; compare `kvconnect keys show` on both ({ours})"
        )

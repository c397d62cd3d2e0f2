"""The side channel over ZeroMQ. The only file that imports zmq.

One ROUTER socket takes what peers send; one DEALER per connection that we open. ZeroMQ reconnects by
itself and would hide that a peer went away, so each DEALER is monitored: a lost connection is
reported, with whether the peer's port is closed now.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvconnect.errors import ConfigError
from kvconnect.peer.channel import Arrival, Frame, LinkLost

logger = logging.getLogger(__name__)

_MOST_ARRIVALS = 256
"""Frames taken per call, so that a flood cannot keep the owner from its other work."""

_MOST_SOCKETS = 16_384
_HIGH_WATER_MARK = 10_000
_PROBE_TIMEOUT_S = 0.05
_HEARTBEAT_MS = 2_000


class ZmqChannel:
    """A ``Channel`` over TCP.

    Args:
        host: the local address to listen on.
        port: the port to listen on; 0 takes a free one.
        max_message_bytes: ZeroMQ closes a connection that sends more.
        peer_timeout_s: silence on the TCP level after which a connection counts as lost.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, *, max_message_bytes: int, peer_timeout_s: float) -> None:
        self._context = zmq.Context(io_threads=1)
        # A monitored connection takes three; ZeroMQ's default would end at some 340 of them.
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self._max_message_bytes = max_message_bytes
        self._peer_timeout_ms = int(peer_timeout_s * 1000)
        self._router = self._socket(zmq.ROUTER)
        # A frame for a peer that left is an error to us, not silence.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        address = f"tcp://{_bracketed(host)}:{port if port else '*'}"
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self._router.close()
            self._context.term()
            raise ConfigError(
                f"kv_connector_extra_config.host and port: cannot listen on {host}:{port}: {error}"
            ) from error
        self._port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._endpoints: dict[str, tuple[str, int]] = {}
        self._stillborn: list[str] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._closed = False

    @property
    def port(self) -> int:
        """The port that peers connect to."""
        return self._port

    def connect(self, link: str, host: str, port: int) -> None:
        """Open a monitored connection under ``link``, in place of one of that name."""
        self.drop(link)
        try:
            dealer = self._socket(zmq.DEALER)
        except zmq.ZMQError as error:
            logger.warning("side channel: no socket for %s:%d: %s", host, port, error)
            self._stillborn.append(link)
            return
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED
        )
        try:
            dealer.connect(f"tcp://{_bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            logger.warning("side channel: cannot connect to %s:%d: %s", host, port, error)
            dealer.disable_monitor()
            monitor.close()
            dealer.close()
            self._stillborn.append(link)
            return
        self._dealers[link] = dealer
        self._monitors[link] = monitor
        self._endpoints[link] = (host, port)
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def send(self, link: str, data: bytes) -> bool:
        """Send without waiting."""
        try:
            if link in self._dealers:
                self._dealers[link].send(data, zmq.NOBLOCK)
            elif link.startswith("in:"):
                self._router.send_multipart([bytes.fromhex(link[3:]), data], zmq.NOBLOCK)
            else:
                return False
        except zmq.ZMQError as error:
            logger.debug("side channel: a frame of %d bytes for %s was dropped: %s", len(data), link, error)
            return False
        return True

    def drop(self, link: str) -> None:
        """Close a connection that we opened."""
        dealer = self._dealers.pop(link, None)
        if dealer is None:
            return
        monitor = self._monitors.pop(link)
        del self._endpoints[link]
        self._poller.unregister(monitor)
        self._poller.unregister(dealer)
        dealer.disable_monitor()
        monitor.close()
        dealer.close()

    def receive(self) -> list[Arrival]:
        """Frames and lost connections, at most a few hundred at a time."""
        arrived: list[Arrival] = [LinkLost(link, refused=False) for link in self._stillborn]
        self._stillborn.clear()
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        # Answers to our own questions first, and with room of their own: no flood from outside delays them.
        for link, dealer in list(self._dealers.items()):
            for _ in range(_MOST_ARRIVALS):
                try:
                    arrived.append(Frame(link, dealer.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
            if self._monitor_says_lost(link):
                arrived.append(LinkLost(link, refused=self._is_refused(link)))
        self._drain_router(arrived)
        return arrived

    def wait(self, timeout_s: float) -> None:
        """Sleep until a frame, a lost connection or ``wake``."""
        if self._stillborn:
            return
        self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))

    def wake(self) -> None:
        """End a ``wait``, from any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Close all sockets; frames not yet sent get a moment to leave."""
        if self._closed:
            return
        self._closed = True
        for link in list(self._dealers):
            self.drop(link)
        self._poller.unregister(self._router)
        self._router.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 200)
        made.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        made.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        made.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(self._peer_timeout_ms, 2 * _HEARTBEAT_MS))
        made.setsockopt(zmq.IPV6, 1)
        return made

    def _drain_router(self, arrived: list[Arrival]) -> None:
        for _ in range(_MOST_ARRIVALS):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 2:
                # Not one of ours: nobody to tell, since the sender may not even speak in frames.
                logger.warning("side channel: dropped a message of %d parts, expected 1", len(parts) - 1)
                continue
            arrived.append(Frame(f"in:{parts[0].hex()}", parts[1]))

    def _monitor_says_lost(self, link: str) -> bool:
        lost = False
        while self._monitors[link].poll(0):
            recv_monitor_message(self._monitors[link])
            lost = True
        return lost

    def _is_refused(self, link: str) -> bool:
        """Whether the peer's port is closed: then its process ended, and nothing of it writes any more."""
        host, port = self._endpoints[link]
        try:
            # A name may stand for many processes, and looking it up would take its time.
            ipaddress.ip_address(host)
        except ValueError:
            return False
        try:
            with socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

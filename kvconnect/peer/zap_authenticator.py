"""The guard of a listening socket: authenticates clients, bounds connections, counts refused clients.

The thread that owns the channel serves it, and with it pyzmq's authenticator, so that no other thread can
fail. While it is not served, no client is admitted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

import zmq
from zmq.auth import Authenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvconnect.peer.keyring import Keyring, fingerprint

logger = logging.getLogger(__name__)

_DOMAIN = "kvconnect"
_ADDRESS_AT = 3
"""The part of a ZAP request that has the client's address."""
_MOST_QUESTIONS = 256
_MOST_EVENTS = 1024
_RECOUNT_S = 1.0
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class ZapAuthenticator:
    """Guards a listening socket, whose ``port`` is set once it is bound.

    Without a ``keyring`` it admits all clients, unencrypted. Connections beyond ``max_connections`` are
    closed at once. ``count`` is called with the reason whenever a client is refused.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: zmq.Socket[bytes],
        keyring: Keyring | None,
        *,
        max_connections: int,
        count: Callable[[str], None],
    ) -> None:
        self._keyring = keyring
        self._listener = listener
        self._count = count
        self._max_connections = min(max_connections, _share_of_files())
        self.port = 0
        self._open: set[int] = set()
        self._recount_at = 0.0
        self._logged: set[str] = set()
        self._asking = b""
        self._keys: Authenticator | None = None
        if keyring is not None:
            self._keys = Authenticator(context)
            self._keys.configure_curve_callback(_DOMAIN, self)
            self._keys.start()
            listener.setsockopt(zmq.CURVE_SECRETKEY, keyring.server.secret)
            listener.setsockopt(zmq.CURVE_PUBLICKEY, keyring.server.public)
            listener.setsockopt(zmq.CURVE_SERVER, 1)
            listener.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            # Without an answer to its request ZeroMQ would admit every client.
            listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        name = f"inproc://kvconnect-zap-{id(self)}"
        listener.monitor(name, _EVENTS)
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        # Unbounded: at a bound ZeroMQ's I/O thread would block until this socket is read.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(name)
        # One of these becomes readable when ``serve`` must be called.
        self.sockets = (self._monitor,) if self._keys is None else (self._monitor, self._keys.zap_socket)

    def serve(self) -> None:
        """Answer pending ZAP requests, and process connection events. Never waits, raises nothing."""
        try:
            if self._keys is not None:
                self._answer(self._keys)
            self._watch()
        except zmq.ZMQError:
            logger.exception("internal error in the side channel's authenticator")

    def close(self) -> None:
        """Stop. No client is admitted after that."""
        self._listener.disable_monitor()
        self._monitor.close()
        if self._keys is not None:
            self._keys.stop()

    def _answer(self, keys: Authenticator) -> None:
        for _ in range(_MOST_QUESTIONS):
            try:
                request = keys.zap_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._asking = request[_ADDRESS_AT]
            # The coroutine waits for nothing, as ``callback`` is none: it needs no event loop.
            with contextlib.suppress(StopIteration):
                keys.handle_zap_message(request).send(None)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key, in Z85, may connect. Called by pyzmq's authenticator."""
        public = z85.decode(key)
        if self._keyring is not None and self._keyring.knows(public):
            return True
        self.complain(
            "client_not_admitted",
            f"a client at {self._asking.decode('ascii', 'replace')} with public key {public.hex()} "
            f"({fingerprint(public)}); if it is a node of yours, admit it with `kvconnect keys add`, or give "
            "both nodes the same key_file",
        )
        return False

    def _watch(self) -> None:
        for _ in range(_MOST_EVENTS):
            if not self._monitor.poll(0):
                return
            message = recv_monitor_message(self._monitor)
            event, value = int(message["event"]), int(message["value"])
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._open.discard(value)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.complain(
                    "handshake_refused",
                    "a client that has another key for this node, or is no kvconnect; compare `kvconnect "
                    "keys show` on both nodes",
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # A port scan, or a client that noticed first that the keys differ.
                self.complain("handshake_incomplete", "a client that left during the handshake", logging.INFO)

    def _accepted(self, descriptor: int) -> None:
        self._open.add(descriptor)
        if len(self._open) <= self._max_connections:
            return
        now = time.monotonic()
        if now >= self._recount_at:
            self._recount_at = now + _RECOUNT_S
            self._open = {known for known in self._open if self._is_ours(known)}
        if len(self._open) > self._max_connections:
            self._is_ours(descriptor, shut=True)
            self.complain(
                "max_connections",
                f"a client beyond {self._max_connections} connections; raise the limit of open files (ulimit "
                "-n), or use fewer nodes",
            )

    def _is_ours(self, descriptor: int, shut: bool = False) -> bool:
        """Whether a descriptor is a connection to ``port``; if so, and with ``shut``, shut it down.

        ZeroMQ owns the descriptor, and closes it once it sees the shutdown. It may have closed it already,
        and another file of this process may have the same number now.
        """
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            return False
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            return False
        with connection, contextlib.suppress(OSError):
            connection.getpeername()
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if connection.getsockname()[1] == self.port:
                if shut:
                    connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def complain(self, reason: str, who: str, level: int = logging.WARNING) -> None:
        """Count a refusal, and log the first one of each ``reason``."""
        self._count(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.log(
                level,
                "side channel: turned away %s (further ones are only counted, as %s)",
                who,
                reason,
            )


def _share_of_files() -> int:
    """The most connections: a quarter of the files that this process may open, and at least 64."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(64, soft // 4)

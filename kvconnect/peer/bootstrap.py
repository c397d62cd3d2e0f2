"""The HTTP endpoint from which a router in Mooncake's mode learns of a prefill node at its start.

``GET /query`` returns the same body each time, any other request an error. The endpoint owns a port and a
thread, and must not know the content of the body. It serves one client at a time, each with a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from kvconnect.errors import ConfigError

logger = logging.getLogger(__name__)

_CLIENT_S = 0.25
"""Deadline per client: a client that connects and sends no request delays the router by this much."""
_MOST_BYTES = 8192
_BACKLOG = 16


class Bootstrap:
    """Serves ``body``, JSON, until it is closed. Raises ``ConfigError``: the port cannot be bound."""

    def __init__(self, host: str, port: int, body: bytes) -> None:
        self._body = body
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"kv_connector_extra_config.bootstrap_port is {port}, and {host} cannot be listened on "
                f"there: {error.strerror or error}; accepted: a free port, and 0 for none"
            ) from error
        threading.Thread(target=self._serve, name="kvconnect-bootstrap", daemon=True).start()

    def close(self) -> None:
        """Stop serving. Idempotent; may be called from any thread."""
        with contextlib.suppress(OSError):
            # Wakes the thread from ``accept``, which closing the socket alone does not.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                # The client left before it was accepted, or this process has too many open files.
                time.sleep(0.1)
                continue
            with client, contextlib.suppress(OSError):
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        deadline, asked = time.monotonic() + _CLIENT_S, b""
        while b"\r\n\r\n" not in asked:
            client.settimeout(max(0.001, deadline - time.monotonic()))
            piece = client.recv(_MOST_BYTES)
            asked += piece
            if not piece or len(asked) > _MOST_BYTES or time.monotonic() > deadline:
                return
        is_known = asked.startswith(b"GET /query ")
        status, body = (b"200 OK", self._body) if is_known else (b"404 Not Found", b"{}")
        lines = b"HTTP/1.1 " + status, b"Content-Type: application/json", b"Connection: close"
        client.sendall(b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body]))

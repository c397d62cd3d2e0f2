"""A non-blocking probe whether a port is closed, which proves that its process has ended."""

from __future__ import annotations

import errno
import ipaddress
import socket

_ATTEMPTS_S = (0.0, 0.03, 0.1, 0.25, 0.5)
_GIVE_UP_S = 0.6
PROBE_INTERVAL_S = 0.01
"""The interval in seconds at which to call ``PortProbe.step``."""


class PortProbe:
    """Connects to a port a few times until the connection is refused: then its process has ended.

    A killed process holds its port while its memory is being freed, so that one attempt is often too early.
    """

    def __init__(self, host: str, port: int, now: float) -> None:
        self._address = (host, port)
        self._began_at = now
        self._attempts = list(_ATTEMPTS_S)
        self._socket: socket.socket | None = None
        try:
            # A host name is not probed: it may stand for many processes, and a look-up would block.
            self._family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        except ValueError:
            self._attempts, self._began_at = [], now - _GIVE_UP_S

    def step(self, now: float) -> bool | None:
        """True: the port is closed. False: that cannot be proven. None: call again."""
        passed_s = now - self._began_at
        if self._socket is not None and self._is_refused(
            self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        ):
            return True
        if self._attempts and passed_s >= self._attempts[0]:
            self._attempts.pop(0)
            self.close()
            try:
                self._socket = socket.socket(self._family, socket.SOCK_STREAM)
                self._socket.setblocking(False)
                if self._is_refused(self._socket.connect_ex(self._address)):
                    return True
            except OSError:
                self.close()
        if passed_s < _GIVE_UP_S:
            return None
        self.close()
        return False

    def close(self) -> None:
        """Close the connection attempt that is under way. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _is_refused(self, code: int) -> bool:
        if code != errno.ECONNREFUSED:
            return False
        self.close()
        return True

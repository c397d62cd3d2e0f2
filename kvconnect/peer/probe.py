"""Does a process still listen? Asked a few times without waiting, since it does not end at once."""

from __future__ import annotations

import errno
import ipaddress
import socket

_ATTEMPTS_S = (0.0, 0.03, 0.1, 0.25, 0.5)
_GIVE_UP_S = 0.6
PROBE_INTERVAL_S = 0.01
"""How often a probe wants to be stepped."""


class PortProbe:
    """Whether a port is closed: then its process ended, and nothing of it writes any more.

    A killed process holds its port while its memory is taken down, so one look would often be too early.
    """

    def __init__(self, host: str, port: int, now: float) -> None:
        self._address = (host, port)
        self._began_at = now
        self._attempts = list(_ATTEMPTS_S)
        self._socket: socket.socket | None = None
        try:
            # A name may stand for many processes, and looking it up would take its time.
            self._family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        except ValueError:
            self._attempts, self._began_at = [], now - _GIVE_UP_S

    def step(self, now: float) -> bool | None:
        """True: it is closed. False: it cannot be proven. None: it is not known yet."""
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
        """Forget what is under way. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _is_refused(self, code: int) -> bool:
        if code != errno.ECONNREFUSED:
            return False
        self.close()
        return True

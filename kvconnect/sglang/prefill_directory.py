"""Where prefill nodes listen, asked of their bootstrap servers by HTTP, off the scheduler's thread.

Only addresses come from there. Each is vouched for by a signed handle, and the side channel at it
authenticates both ends, so that a false one leads to no KV.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvconnect.errors import PeerError
from kvconnect.halves.building import Trust
from kvconnect.outcome import Cause, Reason
from kvconnect.sglang.room_ledger import Found

logger = logging.getLogger(__name__)

KEY = "kvconnect"
"""In what a bootstrap server answers of a rank: the signed handle that vouches for its address."""
_THREADS, _TRY_S, _AGAIN_S, _REGISTER_S = 8, 2.0, 0.2, 300.0
_REMEMBERED_S = 1.0
"""So long a failure stands for all requests of the same server."""
_MOST_BYTES, _MOST_SERVERS = 1 << 16, 256
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_EVERY = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


@dataclass(eq=False)
class _Server:
    """A bootstrap server: its data-parallel ranks, with the address of the first rank of each."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    dp_size: int = 0
    follows_room: bool = True
    addresses: dict[int, tuple[str, int]] = field(default_factory=dict)
    failure: Reason | None = None
    failed_at: float = 0.0

    def known(self, room: int) -> tuple[str, int] | None:
        """The address for a room, where it needs no question."""
        if not self.dp_size or not (self.follows_room or self.dp_size == 1):
            return None
        return self.addresses.get(room % self.dp_size)


class PrefillDirectory:
    """The prefill nodes that D knows, by the address of their bootstrap server; and P's own registration.

    ``patience_s``: how long a server may be starting that a request names.
    """

    def __init__(self, trust: Trust, patience_s: float) -> None:
        self._trust, self._patience_s = trust, patience_s
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvconnect-bootstrap")
        self._servers: dict[str, _Server] = {}

    def find(self, bootstrap: str, room: int) -> Future[Found]:
        """The address of the node that computes a request's prompt. Never waits."""
        if len(self._servers) > _MOST_SERVERS:
            self._servers.clear()
        server = self._servers.setdefault(bootstrap, _Server())
        known = server.known(room)
        if known is None:
            return self._pool.submit(self._ask, server, bootstrap, room)
        found: Future[Found] = Future()
        found.set_result(known)
        return found

    def forget(self, bootstrap: str) -> None:
        """A request failed there: its node may listen elsewhere now."""
        self._servers.pop(bootstrap, None)

    def register(self, url: str, rank: Mapping[str, Any]) -> None:
        """Register a rank of P at its node's bootstrap server, which may be starting. Never waits."""
        self._pool.submit(self._register, url, rank)

    def register_room(self, bootstrap: str, room: int, dp_rank: int) -> None:
        """Register the data-parallel rank that computes a request. Never waits."""
        body = {"bootstrap_room": room, "dp_rank": dp_rank}
        self._pool.submit(_fetch, f"http://{bootstrap}/register_dp_rank", body, "POST")

    def _register(self, url: str, rank: Mapping[str, Any]) -> None:
        until, error = time.monotonic() + _REGISTER_S, ""
        while time.monotonic() < until:
            status, answer = _fetch(f"{url}/route", rank, "PUT")
            if status == 200:
                return
            error = f"{status or 'no answer'}: {answer}"
            time.sleep(_AGAIN_S)
        text = (
            "this rank could not register at the bootstrap server %s within %g s (%s): decode nodes do not "
        )
        text += "find it; is --disaggregation-bootstrap-port free, and the server reachable?"
        logger.error(text, url, _REGISTER_S, error)

    def _ask(self, server: _Server, bootstrap: str, room: int) -> Found:
        """On a thread of the pool."""
        with server.lock:
            if (known := server.known(room)) is not None:
                return known
            if server.failure is not None and time.monotonic() - server.failed_at < _REMEMBERED_S:
                return server.failure
            try:
                return self._look_up(server, bootstrap, room)
            except PeerError as error:
                server.failure, server.failed_at = error.reason, time.monotonic()
                return error.reason
            except Exception as error:
                return Cause.PROTOCOL(f"the bootstrap server at {bootstrap} is not understood: {error!r}")

    def _look_up(self, server: _Server, bootstrap: str, room: int) -> Found:
        """Ask a server. Raises ``PeerError``: it does not answer, or not as one of ours."""
        until = time.monotonic() + self._patience_s
        if not server.dp_size:
            info = _get(bootstrap, f"/route?{_EVERY}", until)
            server.follows_room = bool(info.get("follow_bootstrap_room", True))
            server.dp_size = max(1, int(info.get("dp_size", 1)))
        dp_rank = room % server.dp_size
        if server.dp_size > 1 and not server.follows_room:
            dp_rank = self._dp_rank(bootstrap, room, until)
        if dp_rank not in server.addresses:
            where = f"prefill_dp_rank={dp_rank}&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
            handle = _get(bootstrap, f"/route?{where}", until).get(KEY)
            if not isinstance(handle, str):
                text = f"the prefill server of {bootstrap} has another --disaggregation-transfer-backend"
                raise PeerError(f"{text}; accepted: kvconnect", Cause.OTHER_IDENTITY)
            try:
                claims = self._trust.handles.read(handle, even_expired=True)
            except PeerError as error:
                text = f"the address of the prefill server of {bootstrap} is not proven: {error}"
                raise PeerError(text, Cause.PARAMETERS) from error
            peers, vouched = self._trust.peers, self._trust.handles.are_signed
            if peers is not None and (refusal := peers.refusal(claims.host, claims.port, vouched=vouched)):
                raise PeerError.of(refusal)
            server.addresses[dp_rank] = claims.host, claims.port
        return server.addresses[dp_rank]

    def _dp_rank(self, bootstrap: str, room: int, until: float) -> int:
        while time.monotonic() < until:
            _, answer = _fetch(f"http://{bootstrap}/query_dp_ranks", {"bootstrap_rooms": [room]}, "POST")
            if isinstance(answer, dict) and str(room) in answer:
                return int(answer[str(room)])
            time.sleep(_AGAIN_S)
        raise PeerError(f"the prefill server of {bootstrap} does not know the request", Cause.NOT_HELD)


def _get(bootstrap: str, path: str, until: float) -> dict[str, Any]:
    """What a bootstrap server answers, once it is ready. Raises ``PeerError``."""
    while True:
        status, answer = _fetch(f"http://{bootstrap}{path}")
        if status == 200 and isinstance(answer, dict):
            return answer
        if not status:
            text = (
                f"no bootstrap server answers at {bootstrap} ({answer}); accepted: the address of a prefill"
            )
            raise PeerError(f"{text} server, with its --disaggregation-bootstrap-port", Cause.OUT_OF_REACH)
        if status != 503 or time.monotonic() >= until:
            text = f"the bootstrap server at {bootstrap} answers {status}: {str(answer)[:200]}"
            raise PeerError(text, Cause.OUT_OF_REACH)
        time.sleep(_AGAIN_S)


def _fetch(url: str, body: Mapping[str, Any] | None = None, method: str = "GET") -> tuple[int, Any]:
    """The status and the content of an answer; 0 and the reason without one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with _direct.open(request, timeout=_TRY_S) as answer:
            text = answer.read(_MOST_BYTES)
            return answer.status, json.loads(text) if text[:1] == b"{" else text.decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError) as error:
        return 0, getattr(error, "reason", error)

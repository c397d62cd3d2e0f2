"""A publisher of numbered messages, and its reader, in the format in which vLLM publishes KV events.

A message has a topic, a number of 8 bytes, and a payload. A subscriber that missed messages requests a replay
from the number of the first one on. The feed must not know the content of payloads.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from kvconnect.errors import ConfigError

_LAST = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 200
_REPLAY_MS = 5000


class Feed:
    """Publishes on ``endpoint``; a thread replays messages on ``replay_endpoint``. Neither waits for readers.

    The last ``kept`` messages can be replayed. Up to ``most`` messages are queued for a slow subscriber,
    which misses further ones. One thread publishes. Raises ``ConfigError``: an endpoint cannot be used.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, *, most: int, kept: int
    ) -> None:
        self._topic, self._most = topic.encode(), most
        self._context = zmq.Context()
        self._last: deque[tuple[bytes, bytes]] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self._count = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # As in vLLM: the publisher binds an endpoint with a star, and connects to any other one.
        listens = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        self._socket = self._open(zmq.PUB, endpoint, listens=listens)
        if replay_endpoint is not None:
            replay = self._open(zmq.ROUTER, replay_endpoint, listens=True)
            self._thread = threading.Thread(
                target=self._answer, args=(replay,), name="kvconnect-replay", daemon=True
            )
            self._thread.start()

    def _open(self, kind: int, endpoint: str, *, listens: bool) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set_hwm(self._most)
        try:
            (made.bind if listens else made.connect)(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"nothing can be published on {endpoint!r}: {error}; accepted: an address with a port "
                "that is free, as tcp://*:5557"
            ) from error
        return made

    def publish(self, payload: bytes) -> None:
        """Send the next message to all subscribers."""
        with self._lock:
            number, self._count = self._count.to_bytes(8, "big"), self._count + 1
            self._last.append((number, payload))
        self._socket.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        while not self._is_closed:
            if not replay.poll(_POLL_MS):
                continue
            frames = replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != len(_LAST):
                continue
            with self._lock:
                missed = [message for message in self._last if message[0] >= frames[2]]
            # The replay ends if the subscriber does not keep up with it.
            with contextlib.suppress(zmq.ZMQError):
                for number, payload in missed:
                    replay.send_multipart((frames[0], b"", self._topic, number, payload), zmq.NOBLOCK)
                replay.send_multipart((frames[0], b"", b"", _LAST, b""), zmq.NOBLOCK)

    def close(self) -> None:
        """Stop publishing and replaying. Idempotent."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(10 * _POLL_MS / 1000)
        self._context.destroy(linger=0)


class FeedReader:
    """Reads one publisher's messages, in an event loop, within a ``with`` block.

    With a ``replay_endpoint``, missed messages can be requested.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "") -> None:
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint

    def __enter__(self) -> FeedReader:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        # Unbounded: without a replay endpoint a slow reader could not get dropped messages again.
        self._socket.set_hwm(0)
        self._socket.connect(self._endpoint)
        self._socket.subscribe(b"")
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def receive(self) -> tuple[int, bytes]:
        """The number and the payload of the next message."""
        while len(frames := await self._socket.recv_multipart()) < 2:
            pass
        return int.from_bytes(frames[-2], "big"), frames[-1]

    async def missed(self, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """The messages from number ``first`` on that the publisher still keeps."""
        if not self._replay_endpoint:
            return
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while await socket.poll(_REPLAY_MS):
                frames = await socket.recv_multipart()
                if len(frames) < 2 or frames[-2] == _LAST:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]

"""The engine's end of the link: serves one front over a socket that nobody else has.

Reads on the event loop; outputs are written by the engine's thread itself, one message a step, so that a
token waits for no other thread. What the socket does not take at once is kept for the event loop.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from kvconnect.node.desk import EngineDesk
from kvconnect.node.front.messages import (
    Abort,
    Ask,
    End,
    Frames,
    Listening,
    Look,
    News,
    Seen,
    Submit,
    ToEngine,
    encode_frame,
    end_of,
    submission_of,
)
from kvconnect.node.output import Failure, Output

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_MOST_UNSENT_BYTES = 256 << 20


class EngineService:
    """One front's requests at ``desk``. Made and closed on the event loop.

    ``link`` is closed with it. ``on_listening`` and ``on_lost`` are called on the event loop, each once at
    most; ``close`` calls neither.
    """

    def __init__(
        self,
        desk: EngineDesk,
        link: socket.socket,
        *,
        on_listening: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._desk = desk
        self.link = link
        self._on_listening = on_listening
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(ToEngine)
        # Written by the event loop and by the engine's thread; each touches an item only once.
        self._request_ids: dict[int, str] = {}
        self._tokens: list[tuple[int, list[int], list[int] | None]] = []
        self._ends: list[End] = []
        # Guards what follows, and the writing end of the socket.
        self._lock = threading.Lock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._unsent_bytes = 0
        self._closed = False
        link.setblocking(False)
        self._loop.add_reader(link.fileno(), self._read)
        desk.engine.after_outputs = self._flush

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._request_ids)

    def send(self, message: Any) -> None:
        """Send a message. For any thread; it does not wait.

        Raises:
            TypeError, OverflowError, ValueError: it holds what MessagePack does not know.
        """
        frame = encode_frame(message)
        with self._lock:
            if self._closed:
                return
            waits = bool(self._unsent)
            self._unsent.append(frame)
            self._unsent_bytes += len(frame)
            if waits and self._unsent_bytes <= _MOST_UNSENT_BYTES:
                return
            if not waits and self._write():
                return
        # A front that reads nothing any more is given up.
        self._loop.call_soon_threadsafe(self._lose if waits else self._watch)

    def close(self) -> None:
        """End all requests, and the link. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.remove_reader(self.link.fileno())
        self._loop.remove_writer(self.link.fileno())
        self.link.close()
        for request_id in list(self._request_ids.values()):
            self._desk.abort(request_id)

    # --- writing ----------------------------------------------------------------------------------

    def _write(self) -> bool:
        """Give the socket what it takes. True: all of it. The lock is held."""
        try:
            while self._unsent:
                frame = self._unsent[0]
                sent = self.link.send(frame)
                self._unsent_bytes -= sent
                if sent < len(frame):
                    self._unsent[0] = frame[sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:
            # Whoever reads meets the same.
            self._unsent.clear()
        return True

    def _watch(self) -> None:
        with self._lock:
            if not self._closed:
                self._loop.add_writer(self.link.fileno(), self._write_more)

    def _write_more(self) -> None:
        with self._lock:
            if self._write() and not self._closed:
                self._loop.remove_writer(self.link.fileno())

    # --- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            data = self.link.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        try:
            for message in self._frames.feed(data):
                self._take(message)
        except (msgspec.MsgspecError, ValueError):
            logger.exception("what the node's HTTP front says cannot be read")
            self._lose()

    def _lose(self) -> None:
        if not self._closed:
            self.close()
            self._on_lost()

    def _take(self, message: Any) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                request_id = self._request_ids.get(message.number)
                if request_id is not None:
                    self._desk.abort(request_id)
            case Ask():
                self.send(self._see(message.look))
            case Listening():
                self._on_listening()

    def _see(self, look: Look) -> Seen:
        if look is Look.ALIVE:
            return Seen(look, alive=self._desk.alive)
        if look is Look.METRICS:
            return Seen(look, False, *self._desk.metrics())
        return Seen(look, data=self._desk.state().encode())

    def _submit(self, message: Submit) -> None:
        try:
            submission = submission_of(message)
        except RecursionError:
            text = "kv_transfer_params are nested too deeply"
            failure = Failure(400, text, "invalid_request_error")
            self.send(News([], [end_of(message.number, Output(failure=failure))]))
            return
        # Before the engine has it: from then on its thread may end it at any time.
        request_id = self._request_ids[message.number] = self._desk.name(submission)
        sink = functools.partial(self._collect, message.number)
        refusal = self._desk.submit(request_id, submission, sink)
        if refusal is not None:
            del self._request_ids[message.number]
            self.send(News([], [end_of(message.number, refusal)]))

    # --- the engine's thread ----------------------------------------------------------------------

    def _collect(self, number: int, output: Output) -> None:
        if self._closed:
            return
        if output.is_last:
            self._request_ids.pop(number, None)
            self._ends.append(end_of(number, output))
        else:
            drafts = output.draft_token_ids
            self._tokens.append((number, list(output.token_ids), None if drafts is None else list(drafts)))

    def _flush(self) -> None:
        if not self._tokens and not self._ends:
            return
        tokens, ends, self._tokens, self._ends = self._tokens, self._ends, [], []
        try:
            self.send(News(tokens, ends))
        except (TypeError, OverflowError, ValueError):
            self.send(News(tokens, []))
            for end in ends:
                self._send_end(end)

    def _send_end(self, end: End) -> None:
        """Send one end by itself; what of it cannot be told becomes a failure."""
        try:
            self.send(News([], [end]))
        except (TypeError, OverflowError, ValueError) as error:
            logger.exception("the end of a request could not be told to its client")
            failure = Failure(500, f"{type(error).__name__}: {error}", "server_error")
            self.send(News([], [end_of(end.number, Output(failure=failure))]))

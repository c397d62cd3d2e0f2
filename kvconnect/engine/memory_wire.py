"""The network half of the memory engine: one TCP connection per pair of processes.

Owns the frames, the thread that serves this process's registered memory, and the thread that talks
to one peer. It must not know peers' names, the test controls, or when a batch may start.

A frame is a length prefix, a typed header and a payload, all bounded before anything is allocated.
The target takes a whole payload before it writes one byte, so a connection that breaks while a
payload is on its way leaves the target's memory as it was.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvconnect.engine.base import Addresses, Batch, SpanSet, Verb

log = logging.getLogger("kvconnect.engine.memory")

MAX_COPIES = 65_536
MAX_PAYLOAD_BYTES = 256 << 20
MAX_HEADER_BYTES = MAX_COPIES * 16 + 4096
MAX_CONNECTIONS = 256
IDLE_BYTES_TIMEOUT_S = 60.0
_MAX_ADDRESS = 1 << 62
_PREFIX = struct.Struct("!IQ")


class WriteRequest(msgspec.Struct, tag="write", frozen=True):
    """Put the payload at ``target``; both columns are packed int64."""

    token: bytes
    target: bytes
    length: bytes


class ReadRequest(msgspec.Struct, tag="read", frozen=True):
    """Answer with the bytes at ``source``; both columns are packed int64."""

    token: bytes
    source: bytes
    length: bytes


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The answer to one request; ``error`` is empty if it was done."""

    error: str = ""


_REQUEST = msgspec.msgpack.Decoder(WriteRequest | ReadRequest)
_REPLY = msgspec.msgpack.Decoder(Reply)
_encode = msgspec.msgpack.Encoder().encode


def move(source: Addresses, target: Addresses, length: Addresses) -> None:
    """Copy absolute address ranges within this process; neighbours on both sides become one copy."""
    keep = length > 0
    if not keep.all():
        source, target, length = source[keep], target[keep], length[keep]
    if len(length) == 0:
        return
    joined = (source[1:] == source[:-1] + length[:-1]) & (target[1:] == target[:-1] + length[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    sizes = np.add.reduceat(length, heads)
    for to, from_, size in zip(target[heads].tolist(), source[heads].tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(to, from_, size)


def packed_addresses(buffer: np.ndarray, length: Addresses) -> Addresses:
    """Where each stretch lies when all of them are packed one after another into ``buffer``."""
    return buffer.ctypes.data + np.cumsum(length) - length


def serve_request(
    request: WriteRequest | ReadRequest, payload: np.ndarray, token: bytes, spans: SpanSet
) -> tuple[str, np.ndarray | None]:
    """Do one request against registered memory. Returns the error (empty if none) and the answer.

    The caller holds the lock that guards ``spans``, so that memory which is unregistered meanwhile
    is not touched afterwards.
    """
    write = isinstance(request, WriteRequest)
    column = request.target if isinstance(request, WriteRequest) else request.source
    if request.token != token:
        return "this is another engine than the card names", None
    if len(column) != len(request.length) or len(column) % 8 or len(column) > MAX_COPIES * 8:
        return f"columns of {len(column)} and {len(request.length)} bytes", None
    address = np.frombuffer(column, dtype=np.int64)
    length = np.frombuffer(request.length, dtype=np.int64)
    if len(length) and (int(length.min()) < 0 or int(length.max()) > MAX_PAYLOAD_BYTES):
        return "a length is out of range", None
    if len(address) and (int(address.min()) < 0 or int(address.max()) > _MAX_ADDRESS):
        # Sums of an address and a length must not wrap around below.
        return "an address is out of range", None
    total = int(length.sum())
    if total > MAX_PAYLOAD_BYTES or (write and total != len(payload)):
        return f"{total} bytes asked, {len(payload)} sent, at most {MAX_PAYLOAD_BYTES} taken", None
    index = spans.outside(address, length)
    if index is not None:
        return (
            f"remote memory is not registered: {int(length[index])} bytes at {int(address[index]):#x}",
            None,
        )
    if write:
        move(packed_addresses(payload, length), address, length)
        return "", None
    answer = np.empty(total, dtype=np.uint8)
    move(address, packed_addresses(answer, length), length)
    return "", answer


def _send(sock: socket.socket, header: bytes, payload: np.ndarray | None) -> None:
    size = 0 if payload is None else payload.nbytes
    sock.sendall(_PREFIX.pack(len(header), size) + header)
    if payload is not None and size:
        sock.sendall(payload.data)


def _receive(sock: socket.socket, view: memoryview, deadline: float | None) -> None:
    while len(view):
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]


def _receive_frame(
    sock: socket.socket, deadline: float | None, on_start: Callable[[], None] | None = None
) -> tuple[bytes, np.ndarray]:
    prefix = bytearray(_PREFIX.size)
    _receive(sock, memoryview(prefix)[:1], deadline)
    if on_start is not None:
        on_start()
    _receive(sock, memoryview(prefix)[1:], deadline)
    header_bytes, payload_bytes = _PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ConnectionError(f"a frame of {header_bytes} + {payload_bytes} bytes is too large")
    header = bytearray(header_bytes)
    _receive(sock, memoryview(header), deadline)
    payload = np.empty(payload_bytes, dtype=np.uint8)
    _receive(sock, payload.data, deadline)
    return bytes(header), payload


class Server:
    """Serves registered memory to other processes until ``close``.

    ``spans`` is guarded by ``lock``, which the engine takes for every change of it.
    """

    def __init__(self, host: str, token: bytes, spans: SpanSet, lock: threading.Lock) -> None:
        self._token = token
        self._spans = spans
        self._lock = lock
        self._closed = False
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0), backlog=64)
        self.host, self.port = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="kvconnect-memory", daemon=True)
        self._thread.start()

    def renew(self, token: bytes) -> None:
        """Serve those who know this token, and nobody else any more. What is being done ends first."""
        with self._lock:
            self._token = token

    def close(self) -> None:
        """Stop listening and break every connection. A request that is being done ends first."""
        self._closed = True
        # A close alone does not wake a thread that waits in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for sock in connections:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=2.0)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("accepting connections failed, retrying: %s", error)
                    time.sleep(0.1)
                continue
            with self._lock:
                refused = self._closed or len(self._connections) >= MAX_CONNECTIONS
                if not refused:
                    self._connections.add(sock)
            if refused:
                log.warning("refused a connection: closing, or %d are open", MAX_CONNECTIONS)
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not self._closed:
                    # Idle connections may wait for ever; a frame that has begun may not.
                    sock.settimeout(None)
                    header, payload = _receive_frame(
                        sock, None, lambda: sock.settimeout(IDLE_BYTES_TIMEOUT_S)
                    )
                    request = _REQUEST.decode(header)
                    with self._lock:
                        if self._closed:
                            return
                        error, answer = serve_request(request, payload, self._token, self._spans)
                    _send(sock, _encode(Reply(error)), answer)
        except (OSError, msgspec.MsgspecError) as error:
            log.debug("a connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(sock)


@dataclass(slots=True)
class Job:
    """One batch on the wire. The link fills in the outcome and puts the job into its results."""

    batch: Batch
    deadline: float
    flip_byte: int | None = None
    interrupted: bool = False
    error: str = ""
    quiet: bool = True
    done: bool = field(default=False)


class Link:
    """One peer process: a queue of jobs, done in order by one thread over one connection."""

    def __init__(self, host: str, port: int, token: bytes, results: queue.SimpleQueue[Job]) -> None:
        self._address = (host, port)
        self._token = token
        self._results = results
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._current: Job | None = None
        self._thread = threading.Thread(target=self._work, name="kvconnect-memory-link", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job. It comes back once through the results, with ``done`` set."""
        self._jobs.put(job)

    def interrupt(self, job: Job) -> None:
        """End a job early: it is dropped if it waits, its connection is broken if it is running."""
        with self._lock:
            job.interrupted = True
            if self._current is job and self._sock is not None:
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let the thread end after the jobs that it has; they should be interrupted first."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout=timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._current = job
            if job.interrupted:
                job.error = "cancelled"
            else:
                self._run(job)
            with self._lock:
                self._current = None
            job.done = True
            self._results.put(job)
        self._drop()

    def _run(self, job: Job) -> None:
        try:
            sock = self._connected(job.deadline)
            if job.interrupted:
                raise ConnectionError("cancelled")
            self._exchange(sock, job)
        except (OSError, msgspec.MsgspecError) as error:
            timed_out = isinstance(error, TimeoutError)
            job.error = "cancelled" if job.interrupted else "timed out" if timed_out else str(error)
            self._drop()

    def _exchange(self, sock: socket.socket, job: Job) -> None:
        batch, length = job.batch, job.batch.length
        sock.settimeout(max(job.deadline - time.monotonic(), 0.001))
        request: WriteRequest | ReadRequest
        if batch.verb is Verb.WRITE:
            payload = np.empty(batch.total_bytes, dtype=np.uint8)
            move(batch.source, packed_addresses(payload, length), length)
            if job.flip_byte is not None and len(payload):
                payload[job.flip_byte % len(payload)] ^= 0xFF
            request = WriteRequest(self._token, batch.target.tobytes(), length.tobytes())
            _send(sock, _encode(request), payload)
        else:
            request = ReadRequest(self._token, batch.source.tobytes(), length.tobytes())
            _send(sock, _encode(request), None)
        # All is sent: from here on only an answer, or the end of the peer, says that it is over.
        job.quiet = False
        try:
            header, answer = _receive_frame(sock, job.deadline)
        except ConnectionError:
            # The server answers before it closes and a dead process writes nothing.
            job.quiet = not job.interrupted
            raise
        job.quiet = True
        job.error = _REPLY.decode(header).error
        if job.error or batch.verb is Verb.WRITE:
            return
        if len(answer) != batch.total_bytes:
            raise ConnectionError(f"{len(answer)} bytes came for a read of {batch.total_bytes}")
        if job.flip_byte is not None and len(answer):
            answer[job.flip_byte % len(answer)] ^= 0xFF
        move(packed_addresses(answer, length), batch.target, length)

    def _connected(self, deadline: float) -> socket.socket:
        if self._sock is not None and not _alive(self._sock):
            self._drop()
        if self._sock is None:
            wait_s = max(deadline - time.monotonic(), 0.001)
            sock = socket.create_connection(self._address, timeout=wait_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sock = sock
        return self._sock

    def _drop(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def _alive(sock: socket.socket) -> bool:
    """Whether an idle connection is still open: nothing to read, and no end of file."""
    try:
        sock.settimeout(0.0)
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False

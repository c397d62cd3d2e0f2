"""The NVLink engine: GPUs of one host write into each other's memory, one kernel launch per batch.

Owns registration, the bounds and how a batch ends. It must not know requests or blocks. A peer's allocations
are mapped into this process (``ipc``), and a kernel of the GPU whose memory is registered here moves the
bytes, so the peer's processor and its GPU's multiprocessors have no part in it.

What follows from that:

- A kernel that was launched cannot be called back. A batch that is cancelled, or whose peer is disconnected,
  is answered when its kernel is done, and then it is quiet.
- A peer cannot take back a mapping: after it unregistered, what was launched before still lands.
- Memory of a peer that died stays valid while it is mapped here, and stays allocated on its GPU. So
  processes are watched, and what the dead have left is let go of.
- Only whether a process of this host and pid namespace lives can be seen, so others are refused.

Between two H200 a launch moves 16 KiB pages at 0.92 of the rate of a contiguous copy, and 4 KiB pages at 0.9
of it. Before that a batch costs the owner's thread some 100 us and 15 to 20 ns per copy, while others move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvconnect.engine.base import Addresses, Batch, Capabilities, Completion, Span, Verb
from kvconnect.engine.batches import check_batch
from kvconnect.engine.ipc import CudaMemory, DeviceMemory
from kvconnect.engine.nvlink_card import SharedMemory, decode_card, device_of
from kvconnect.engine.nvlink_peer import Peer, PeerSet
from kvconnect.engine.nvlink_stream import Copier, CopyStream
from kvconnect.engine.process import own_identity
from kvconnect.errors import ConfigError, EngineError

log = logging.getLogger("kvconnect.engine.nvlink")

_CLOSE_S = 3.0
_NAP_S = 1e-4


@dataclass(slots=True)
class _Flight:
    """A batch of which a kernel may run: ``launched`` until it is known to have ended.

    ``error`` says why the batch must fail, whatever comes of it.
    """

    batch: Batch
    peer: Peer
    posted: float
    give_up_at: float
    done: Callable[[], bool] | None = None
    launched: bool = False
    error: str = ""


class NvlinkEngine:
    """An engine between GPUs of one host. See ``kvconnect.engine.base.Engine`` for the verbs.

    Args:
        max_programs: most programs of a kernel at one time, each on one multiprocessor; 0 for as many as
            are useful. It bounds what transfers take from the model.
        settle_s: how long a batch that timed out may take to be proven quiet.
        max_copies, max_bytes, max_batches_per_peer: the bounds to announce.
        memory: the CUDA driver, or a double of it.
        make_copier: makes what runs the copies on a GPU, given its number.

    Raises:
        ConfigError: ``max_programs`` is negative.
        EngineError: there is no CUDA driver.
    """

    def __init__(
        self,
        *,
        max_programs: int = 0,
        settle_s: float = 1.0,
        max_copies: int = 1 << 18,
        max_bytes: int = 4 << 30,
        max_batches_per_peer: int = 8,
        memory: DeviceMemory | None = None,
        make_copier: Callable[[int], Copier] | None = None,
    ) -> None:
        if max_programs < 0:
            raise ConfigError(f"max_programs is {max_programs}, accepted: 0 (no bound) and more")
        self._memory = memory or CudaMemory()
        self._shared = SharedMemory(self._memory)
        self._make_copier = make_copier or (lambda device: CopyStream(device, CudaMemory(), max_programs))
        self._settle_s = settle_s
        self._copier: Copier | None = None
        self._peers = PeerSet()
        self._flights: dict[int, _Flight] = {}
        # Answered, but their kernels are not known to have ended.
        self._overdue: list[_Flight] = []
        self._finished: list[Completion] = []
        self._closed = False
        self._capabilities = Capabilities(
            name="nvlink",
            verbs=frozenset(Verb),
            max_copies=max_copies,
            max_bytes=max_bytes,
            max_batches_per_peer=max_batches_per_peer,
            target_must_poll=False,
            device_memory=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        """The bounds of this engine."""
        return self._capabilities

    # ---- memory

    def register(self, spans: Sequence[Span]) -> None:
        """Make memory of one GPU reachable, all or nothing; compiles the kernel at the first time.

        Raises:
            UnshareableError: memory that no other process can map; the text says what to change.
            EngineError: memory of the host or of a second GPU, or a span that leaves its allocation.
        """
        self._check_open()
        device = device_of(spans, self._peers.device)
        if device is None:
            return
        self._shared.add(spans, device)
        try:
            if self._copier is None:
                self._copier = self._make_copier(device)
                self._peers.map_for(self._memory, device)
        except Exception as error:
            self._shared.remove(spans)
            raise EngineError(f"cuda:{device} runs no copies: {error!r}") from error

    def unregister(self, spans: Sequence[Span]) -> None:
        """Take spans off the card. What peers have mapped stays mapped. Raises ``EngineError``."""
        self._check_open()
        self._shared.remove(spans)

    def renew_registration(self) -> bool:
        """Not possible: a peer has our memory mapped until it lets go of it."""
        return False

    # ---- peers

    def card(self) -> bytes:
        """The process, its allocations and the spans in them. Changes with every registration."""
        self._check_open()
        return self._shared.card()

    def connect(self, peer: str, card: bytes) -> None:
        """Map a peer's memory; batches to who had the name before end as failures.

        Raises:
            EngineError: the card is not one of this engine's kind, the peer is not within reach, or there is
                no registered memory here, so that it is not known for which GPU to map.
        """
        self._check_open()
        decoded = decode_card(peer, card)
        known = self._peers.known.get(peer)
        if known is not None and known.card == decoded and not known.gone:
            return
        host = own_identity().host
        if not host or decoded.process.host != host:
            raise EngineError(
                f"peer {peer!r} is not on this host, or in another pid namespace: containers need "
                "the same one (docker run --pid=host, or hostPID: true)"
            )
        known = self._peers.meet(peer, decoded)
        if known is not None:
            self._fail_all(known, f"peer {peer!r} was connected anew")

    def disconnect(self, peer: str) -> None:
        """Forget a peer; batches in flight to it end as failures, once their kernels are done."""
        known = self._peers.forget(peer)
        if known is not None:
            self._fail_all(known, f"peer {peer!r} was disconnected")

    # ---- batches

    def submit(self, batch: Batch) -> None:
        """Launch a batch's kernel. Raises ``LocalError``."""
        in_flight = [(flight.batch.batch_id, flight.batch.peer) for flight in self._flights.values()]
        check_batch(batch, self._capabilities, self._peers.known, in_flight)
        peer, now = self._peers.known[batch.peer], time.monotonic()
        self._look(peer)
        flight = _Flight(batch, peer, now, now + batch.timeout_s + self._settle_s)
        self._flights[batch.batch_id] = flight
        flight.error = peer.gone or self._launch(flight)

    def poll(self) -> list[Completion]:
        """Collect what kernels have done, and let go of memory that nobody uses any more."""
        now = time.monotonic()
        for flight in list(self._flights.values()):
            self._advance(flight, now)
        self._overdue = [flight for flight in self._overdue if not self._has_ended(flight)]
        for peer in self._peers.look(now):
            self._bury(peer)
        self._peers.let_go()
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, batch_id: int) -> None:
        """Fail a batch, once its kernel is done."""
        flight = self._flights.get(batch_id)
        if flight is not None:
            flight.error = flight.error or "cancelled"

    def close(self) -> None:
        """Wait for the kernels, for some seconds at most, and let go of all memory."""
        if self._closed:
            return
        for peer in list(self._peers.known):
            self.disconnect(peer)
        self._closed = True
        until = time.monotonic() + _CLOSE_S
        finished = self.poll()
        while (self._flights or self._overdue) and time.monotonic() < until:
            finished += self.poll()
            time.sleep(_NAP_S)
        for flight in list(self._flights.values()):
            self._answer(flight, quiet=False)
        self._finished = finished + self._finished
        if self._peers.num_leaving:
            log.warning("memory of %d peers stays mapped: kernels use it still", self._peers.num_leaving)

    # ---- how a batch goes

    def _launch(self, flight: _Flight) -> str:
        """Start the kernel, if there is anything to move; returns why that cannot be done."""
        batch = flight.batch
        stray = self._shared.outside(batch.local, batch.length)
        if stray is not None:
            return f"local memory is not registered: {_copy_of(batch.local, batch, stray)}"
        remote = flight.peer.translate(batch.remote, batch.length)
        if isinstance(remote, int):
            stretch = _copy_of(batch.remote, batch, remote)
            return f"remote memory is not on the card of {batch.peer!r}: {stretch}"
        if not batch.total_bytes:
            return ""
        source, target = (batch.source, remote) if batch.verb is Verb.WRITE else (remote, batch.target)
        assert self._copier is not None
        try:
            flight.done = self._copier.copy(source, target, batch.length)
        except Exception as error:
            return f"the copy could not be launched: {type(error).__name__}: {error}"
        flight.launched = True
        flight.peer.in_flight += 1
        return ""

    def _advance(self, flight: _Flight, now: float) -> None:
        if self._has_ended(flight):
            # What landed in the memory of a process that is gone has reached nobody.
            self._look(flight.peer)
            self._answer(flight, quiet=True)
            return
        if now >= flight.posted + flight.batch.timeout_s:
            flight.error = flight.error or f"timed out after {flight.batch.timeout_s:g} s"
        if now >= flight.give_up_at:
            self._overdue.append(flight)
            self._answer(flight, quiet=False)

    def _has_ended(self, flight: _Flight) -> bool:
        """Whether no kernel uses the batch's memory any more."""
        try:
            if flight.launched and flight.done is not None and flight.done():
                flight.launched = False
                flight.peer.in_flight -= 1
        except Exception as error:
            # It is the GPU that fails here, and with it every kernel, whatever became of this one.
            flight.error = f"the GPU failed: {type(error).__name__}: {error}"
            flight.give_up_at = 0.0
        return not flight.launched

    def _answer(self, flight: _Flight, quiet: bool) -> None:
        batch, error = flight.batch, flight.error
        del self._flights[batch.batch_id]
        if error:
            log.debug("batch %d to %s failed: %s", batch.batch_id, batch.peer, error)
        seconds = time.monotonic() - flight.posted
        self._finished.append(Completion(batch.batch_id, not error, quiet, batch.total_bytes, seconds, error))

    def _fail_all(self, peer: Peer, error: str) -> None:
        for flight in self._flights.values():
            if flight.peer is peer:
                flight.error = flight.error or error

    def _look(self, peer: Peer) -> None:
        if peer.look():
            self._bury(peer)

    def _bury(self, peer: Peer) -> None:
        log.warning("%s: its memory is let go of", peer.gone)
        self._fail_all(peer, peer.gone)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the NVLink engine is closed")


def _copy_of(addresses: Addresses, batch: Batch, index: int) -> str:
    stretch = f"{int(batch.length[index])} bytes at {int(addresses[index]):#x}"
    return f"{stretch} (copy {index} of {len(batch.length)})"

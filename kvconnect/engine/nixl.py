"""The NIXL adapter: one agent without a progress thread, one transfer per batch.

Behaviour of nixl 1.5.1 with UCX that the code works around:

- Over shared memory with CMA the post itself moves the bytes, 10 ms for 128 MiB. So ``max_bytes`` bounds the
  time that ``submit`` takes.
- A progress thread occupies a core permanently. Without it both sides advance only in ``poll``: fetching
  notifications also progresses the peers' transfers to this node.
- With ``ucx_error_handling_mode=peer`` the loss of a killed peer is reported after some 15 ms over TCP while
  a transfer is in flight, and at the next post over shared memory. The loss of a stopped peer is never
  reported: its transfer stays in progress for ever, so the adapter has its own deadlines.
- After a disconnect every post fails, also to a healthy peer, until the agent is removed and added again.
  That ends every transfer to the peer, so it waits until these have ended or make no progress.
- Releasing a handle in progress succeeds, but bytes in the kernel's socket buffers still land when a stopped
  peer resumes. That memory is not quiescent.
- Making a transfer takes several times as long as posting it. So transfers are cached: they recur between
  the same slots, and a finished transfer can be posted again.
- Over shared memory the library does not check the peer's registration, so ranges are checked against the
  peer's card before a post.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvconnect.engine.adapter import Adapter, decode_card, range_problem
from kvconnect.engine.base import Batch, Capabilities, Completion, Span
from kvconnect.engine.nixl_library import (
    Copy,
    NativeFlight,
    NativePeer,
    NixlCard,
    TransferCache,
    by_memory_type,
    is_dead,
    load_library,
    make_transfer,
    own_identity,
    released,
    start_agent,
    ucx_options,
)
from kvconnect.errors import ConfigError, EngineError

log = logging.getLogger("kvconnect.engine.nixl")

_MAX_BATCHES_PER_PEER = 8


class NixlEngine(Adapter):
    """An engine over NIXL. See ``kvconnect.engine.base.Engine`` for the verbs.

    Args:
        host: the address at which peers reach this node; UCX listens on its interface alone.
        protocol: the NIXL backend that moves the bytes; ``"auto"`` for UCX.
        device_name: the device that UCX uses instead of the interface of ``host``.
        backend_options: parameters of the backend, added to the adapter's own.
        settle_s: how long a failed batch waits for the proof that it is quiescent; the time starts again
            whenever another batch to the peer ends.
        max_bytes: ``Capabilities.max_bytes``.

    Raises ``ConfigError`` for a device name that the backend does not take, ``EngineError`` if NIXL or the
    backend is missing, or refuses to start.
    """

    _peers: dict[str, NativePeer]
    _flights: dict[int, NativeFlight]
    _load = staticmethod(load_library)

    def __init__(
        self,
        host: str = "127.0.0.1",
        protocol: str = "auto",
        device_name: str = "",
        *,
        backend_options: Mapping[str, str] | None = None,
        settle_s: float = 1.0,
        max_bytes: int = 256 << 20,
    ) -> None:
        backend = "UCX" if protocol == "auto" else protocol
        options = dict(backend_options or {})
        if backend == "UCX":
            options = {"ucx_error_handling_mode": "peer", **ucx_options(host, device_name, options)}
        elif device_name:
            raise ConfigError(f"device_name is {device_name!r}: NIXL's backend {backend} takes none here")
        self._agent = start_agent(backend, options)
        super().__init__(
            Capabilities(
                name="nixl",
                max_bytes=max_bytes,
                max_batches_per_peer=_MAX_BATCHES_PER_PEER,
                target_must_poll=True,
                lane=" ".join(filter(None, (backend, options.get("engine_config", device_name)))),
                may_be_bypassed=protocol == "auto",
            )
        )
        self._settle_s = settle_s
        self._has_warned = False
        self._stuck: list[Any] = []
        self._cache = TransferCache(self._release)

    # ---- memory

    def register(self, spans: Sequence[Span]) -> None:
        self._check_open()
        groups = by_memory_type(spans)
        self._spans.add(spans)
        done: list[Any] = []
        try:
            for memory_type, rows in groups.items():
                done.append(self._agent.register_memory(rows, memory_type))
        except Exception as error:
            self._spans.remove(spans)
            for descriptors in done:
                self._agent.deregister_memory(descriptors)
            raise EngineError(f"NIXL cannot register {len(spans)} spans: {error!r}") from error

    def unregister(self, spans: Sequence[Span]) -> None:
        self._check_open()
        self._spans.remove(spans)
        self._cache.drop()
        self._deregister(spans)

    def _deregister(self, spans: Sequence[Span]) -> None:
        try:
            for memory_type, rows in by_memory_type(spans).items():
                self._agent.deregister_memory(self._agent.get_reg_descs(rows, memory_type))
        except Exception as error:
            raise EngineError(f"NIXL cannot unregister {len(spans)} spans: {error!r}") from error

    # ---- peers

    def card(self) -> bytes:
        """The agent's metadata and the registered spans. Changes with every registration."""
        self._check_open()
        spans = [(span.address, span.length_bytes, span.device) for span in self._spans]
        metadata = bytes(self._agent.get_agent_metadata())
        return msgspec.msgpack.encode(NixlCard(metadata, spans, own_identity()))

    def connect(self, peer: str, card: bytes) -> None:
        self._check_open()
        decoded = decode_card(card, NixlCard, "NIXL")
        known = self._peers.get(peer)
        if known is not None and known.card == decoded and not known.broken:
            return
        self.disconnect(peer)
        try:
            self._peers[peer] = NativePeer(decoded, self._add_agent(decoded.metadata))
        except Exception as error:
            raise EngineError(f"NIXL does not take its card: {error!r}") from error

    def _forget(self, peer: NativePeer) -> None:
        self._cache.drop(peer.agent)
        if all(state.agent != peer.agent for state in self._peers.values()):
            self._remove_agent(peer.agent)

    # ---- batches

    def submit(self, batch: Batch) -> None:
        self._admit(batch)
        flight = NativeFlight(batch=batch, submitted_at=time.monotonic())
        self._flights[batch.batch_id] = flight
        peer = self._peers[batch.peer]
        problem = range_problem(batch, self._spans, peer.spans)
        if problem or not batch.total_bytes:
            self._answer(flight, problem)
        else:
            self._post_if_healthy(flight, peer, flight.submitted_at)

    def poll(self) -> list[Completion]:
        if not self._closed:
            try:
                # Also progresses the peers' transfers into this node's memory.
                self._agent.get_new_notifs()
            except Exception as error:
                if not self._has_warned:
                    self._has_warned = True
                    text = "NIXL makes no progress, so transfers fail until a restart: %s: %s"
                    log.warning(text, type(error).__name__, error)
            now = time.monotonic()
            for flight in list(self._flights.values()):
                self._advance(flight, now)
            if self._stuck:
                self._stuck = [handle for handle in self._stuck if not released(handle)]
        return self._take_finished() if self._finished else []

    def cancel(self, batch_id: int) -> None:
        """Fail a batch once its transfer has ended, which takes milliseconds.

        NIXL cannot abort a transfer: a released transfer goes on. Only renewing the link ends it, and with
        it all other transfers to the peer.
        """
        flight = self._flights.get(batch_id)
        if flight is not None and not flight.error:
            flight.error, flight.settle_until = "cancelled", time.monotonic() + self._settle_s

    def _shut_down(self) -> None:
        spans = list(self._spans)
        try:
            self._deregister(spans)
        except EngineError as error:
            log.info("at the close of the engine: %s", error)
        self._spans.remove(spans)
        self._stuck.clear()
        self._agent = None

    # ---- how a batch goes

    def _post_if_healthy(self, flight: NativeFlight, peer: NativePeer, now: float) -> None:
        """Post a batch, unless the peer's link must be renewed first and cannot be yet."""
        try:
            if peer.broken and not self._heal(peer, now):
                return
            flight.is_posted, batch = True, flight.batch
            flight.copy = Copy(peer.agent, batch.source, batch.target, batch.total_bytes)
            flight.handle = self._cache.take(flight.copy)
            if flight.handle is None:
                flight.handle = make_transfer(self._agent, batch, self._spans, peer.spans, peer.agent)
            if self._agent.transfer(flight.handle) == "ERR":
                raise EngineError("NIXL refused the transfer")
        except Exception as error:
            self._fail(flight, error)

    def _advance(self, flight: NativeFlight, now: float) -> None:
        """Check a batch in flight, and complete it if it ended or its time is over."""
        if not flight.is_posted and not flight.error and now < flight.deadline:
            self._post_if_healthy(flight, self._peers[flight.batch.peer], now)
            return
        try:
            self._look(flight)
        except Exception as error:
            self._fail(flight, error)
        if flight.error:
            self._settle(flight, now)
        elif flight.is_posted and flight.handle is None:
            self._answer(flight, "")
        elif now >= flight.deadline:
            flight.error = flight.overdue
            flight.settle_until = now + self._settle_s

    def _look(self, flight: NativeFlight) -> None:
        """Return the handle of a finished transfer to the cache. Raises an error if the transfer failed."""
        if flight.handle is None:
            return
        assert flight.copy is not None, "a transfer was made"
        state = self._agent.check_xfer_state(flight.handle)
        if state == "ERR":
            raise EngineError("NIXL reports an error of the transfer")
        if state != "PROC":
            self._peers[flight.batch.peer].progressed_at = time.monotonic()
            self._cache.put(flight.copy, flight.handle)
            flight.handle = None

    def _settle(self, flight: NativeFlight, now: float) -> None:
        """Complete a failed batch once it is proven quiescent, or when its settle time is over.

        While other batches to the peer end, the link makes progress, and the settle time is extended: at
        most to the batch's deadline and ``settle_s``.
        """
        peer = self._peers[flight.batch.peer]
        until = flight.settle_until
        if not flight.severed:
            last = flight.deadline + self._settle_s
            until = min(last, max(until, peer.progressed_at + self._settle_s))
        dead = flight.severed and is_dead(peer.card.process)
        if dead or (flight.handle is None and not flight.severed):
            self._answer(flight, flight.error)
        elif now >= until:
            self._end_early(flight, flight.error)

    def _fail(self, flight: NativeFlight, error: Exception) -> None:
        """Handle a failure that the library reported: stop the batch; the link must be renewed."""
        peer = self._peers[flight.batch.peer]
        posted = flight.handle is not None
        if posted:
            self._release(flight.handle)
            flight.handle = None
        if not flight.error:
            flight.error = f"{type(error).__name__}: {error}"
            flight.settle_until = time.monotonic() + self._settle_s
        flight.severed = posted
        peer.broken = True
        if not posted:
            self._answer(flight, flight.error)

    def _end_early(self, flight: NativeFlight, error: str) -> None:
        """Complete a batch now. A transfer in progress is released, but is then not proven quiescent."""
        quiescent = not flight.severed
        try:
            self._look(flight)
        except Exception as cause:
            log.debug("batch %d failed while it was given up: %r", flight.batch.batch_id, cause)
        if flight.handle is not None:
            quiescent = False
            self._release(flight.handle)
            # Renewing the link also drops the transfers that are queued on it.
            self._peers[flight.batch.peer].broken = True
        self._answer(flight, error, quiescent)

    # ---- the library's objects

    def _release(self, handle: Any) -> None:
        if not released(handle):
            log.debug("NIXL did not release a transfer yet; it is tried again")
            self._stuck.append(handle)

    def _heal(self, peer: NativePeer, now: float) -> bool:
        """Renew the link of a peer: NIXL 1.5.1 never repairs a broken link by itself.

        False: not yet, since transfers to the peer may still end by themselves. On a broken link they fail
        at once; on a link that only stalled they go on. They get ``settle_s`` from the time the first batch
        waited for the renewal, and again from the end of each one.
        """
        peer.heal_asked_at = peer.heal_asked_at or now
        under_way = [
            flight
            for flight in self._flights.values()
            if flight.handle is not None and self._peers[flight.batch.peer].agent == peer.agent
        ]
        if under_way and now < max(peer.heal_asked_at, peer.progressed_at) + self._settle_s:
            return False
        for flight in under_way:
            self._end_early(flight, flight.error or "the link to the peer stood still, and was renewed")
        self._remove_agent(peer.agent)
        peer.agent = self._add_agent(peer.card.metadata)
        peer.broken, peer.heal_asked_at = False, 0.0
        return True

    def _add_agent(self, metadata: bytes) -> str:
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def _remove_agent(self, agent: str) -> None:
        self._cache.drop(agent)
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:
            # Already removed, for example after a disconnect that NIXL noticed by itself.
            log.debug("NIXL does not know agent %s: %r", agent, error)

"""The common base of the adapters of transfer libraries: it checks batches, and completes each exactly once.

A caller's bug raises ``LocalError`` in ``submit``; a later failure is a completion. It must know no library.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kvconnect.engine.base import Batch, Capabilities, Completion, SpanSet
from kvconnect.errors import EngineError, LocalError

log = logging.getLogger("kvconnect.engine")

MAX_CARD_BYTES = 16 << 20

_Card = TypeVar("_Card", bound=msgspec.Struct)


@dataclass(slots=True, eq=False, kw_only=True)
class Flight:
    """A batch without a completion yet. With ``error`` set it fails, even if the library reports success.

    It times out at ``deadline``, in seconds of the adapter's clock.
    """

    batch: Batch
    submitted_at: float
    deadline: float = field(init=False)
    error: str = ""

    def __post_init__(self) -> None:
        self.deadline = self.submitted_at + self.batch.timeout_s

    @property
    def overdue(self) -> str:
        """The error text of a timeout."""
        return f"timed out after {self.batch.timeout_s:g} s"


class Adapter:
    """The state that every engine has, and the verbs that all engines implement alike: see ``Engine``."""

    _flights: dict[int, Any]
    _peers: dict[str, Any]

    def __init__(self, capabilities: Capabilities, clock: Callable[[], float] = time.monotonic) -> None:
        self.capabilities = capabilities
        self._clock = clock
        self._spans = SpanSet()
        self._peers = {}
        self._flights = {}
        self._finished: list[Completion] = []
        self._closed = False

    @staticmethod
    def _load() -> Any:
        """Import the library. Raises ``EngineError``, which names the package to install."""

    @classmethod
    def problem(cls) -> str:
        """Why the library does not work here, and what to install; empty if it works."""
        try:
            cls._load()
        except EngineError as error:
            return str(error)
        return ""

    def cancel(self, batch_id: int) -> None:
        flight = self._flights.get(batch_id)
        if flight is not None:
            self._end_early(flight, "cancelled")

    def disconnect(self, peer: str) -> None:
        for flight in list(self._flights.values()):
            if flight.batch.peer == peer:
                self._end_early(flight, "the decode node was disconnected")
        known = self._peers.pop(peer, None)
        if known is not None:
            self._forget(known)

    def close(self) -> None:
        if self._closed:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        self._closed = True
        self._shut_down()

    def _end_early(self, flight: Any, error: str) -> None:
        raise NotImplementedError

    def _forget(self, peer: Any) -> None:
        """Release the library's state of a peer."""

    def _shut_down(self) -> None:
        """Release the memory, and complete the batches that are still in flight."""

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"the {self.capabilities.name} engine is closed")

    def _admit(self, batch: Batch) -> None:
        """Raises ``LocalError``: the batch breaks a bound, or names an unknown peer or an id in use."""
        name, most_bytes = f"batch {batch.batch_id} to {batch.peer!r}", self.capabilities.max_bytes
        if batch.peer not in self._peers:
            raise LocalError(f"{name}: no such peer is connected")
        if not 0 <= batch.total_bytes <= most_bytes:
            raise LocalError(f"{name}: {batch.total_bytes} bytes, 0 to {most_bytes} are taken")
        if not batch.timeout_s > 0:
            raise LocalError(f"{name}: timeout_s is {batch.timeout_s}, it must be positive")
        if batch.batch_id in self._flights:
            raise LocalError(f"{name}: this id is in flight already")
        to_peer = sum(flight.batch.peer == batch.peer for flight in self._flights.values())
        if to_peer >= self.capabilities.max_batches_per_peer:
            raise LocalError(
                f"{name}: {to_peer} batches are in flight to it, at most "
                f"{self.capabilities.max_batches_per_peer} are taken"
            )

    def _answer(self, flight: Flight, error: str, quiescent: bool = True) -> None:
        batch = flight.batch
        del self._flights[batch.batch_id]
        if error:
            log.debug("batch %d to %s failed: %s", batch.batch_id, batch.peer, error)
        seconds = max(self._clock() - flight.submitted_at, 0.0)
        self._finished.append(
            Completion(batch.batch_id, not error, quiescent, batch.total_bytes, seconds, error)
        )

    def _take_finished(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished


def decode_card(card: bytes, kind: type[_Card], engine: str) -> _Card:
    """Decode a peer's card. Raises ``EngineError``: too long, or not of this kind of engine."""
    if len(card) > MAX_CARD_BYTES:
        raise EngineError(f"its card has {len(card)} bytes, at most {MAX_CARD_BYTES}")
    try:
        return msgspec.msgpack.decode(card, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise EngineError(f"its card is not a {engine} engine's: {error}") from error


class _Addressed(msgspec.Struct, frozen=True):
    """The fields of any card that name an address."""

    session: str = ""
    host: str = ""


def card_host(card: bytes) -> str:
    """The host to which a card makes this node connect; empty if the card names none, as NIXL's."""
    try:
        addressed = msgspec.msgpack.decode(card, type=_Addressed)
    except (msgspec.MsgspecError, ValueError):
        return ""
    return addressed.host or addressed.session.rpartition(":")[0].strip("[]")


def source_problem(batch: Batch, spans: SpanSet) -> str:
    """The error if the batch reads memory that is not registered here; empty if it is registered."""
    return _problem("local", batch.source, batch, spans)


def range_problem(batch: Batch, local: SpanSet, remote: SpanSet) -> str:
    """As ``source_problem``, and the error if the peer has not registered the batch's target."""
    return source_problem(batch, local) or _problem("remote", batch.target, batch, remote)


def _problem(side: str, address: int, batch: Batch, spans: SpanSet) -> str:
    if spans.find(address, batch.total_bytes) is not None:
        return ""
    return f"{side} memory is not registered: {batch.total_bytes} bytes at {address:#x}"

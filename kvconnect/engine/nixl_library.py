"""How NIXL is imported, its descriptors, what is known of peers and batches, and which transfers are kept."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvconnect.engine import adapter
from kvconnect.engine.base import Addresses, Batch, Span, SpanSet
from kvconnect.engine.process import ProcessIdentity
from kvconnect.errors import EngineError

log = logging.getLogger("kvconnect.engine.nixl")

_MAX_IDLE = 256
_DEVICE_FOLDERS = (Path("/sys/class/net"), Path("/sys/class/infiniband"))


def load_library() -> Any:
    """Import NIXL, in the order that keeps the process alive. Raises ``EngineError``."""
    # NIXL's wheel brings its own libnl-route. When UCX then pulls in the system's copy through
    # libibverbs, both bind each other's symbols and the process dies with SIGSEGV at its exit.
    # The system's copy loaded first, privately, keeps them apart.
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        log.debug("no libibverbs on this system, so UCX will not load one: %s", error)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it logs every agent at INFO otherwise
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise EngineError(f"NIXL is not usable ({error}); pip install kvconnect[nixl]") from error


def start_agent(backend: str, options: dict[str, str]) -> Any:
    """An agent with one backend. Raises ``EngineError``."""
    library = load_library()
    try:
        config = library.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            # One thread owns the engine, but NIXL's default would let even its own helpers race.
            sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        agent = library.nixl_agent(f"kvconnect-{uuid.uuid4().hex}", config)
        agent.create_backend(backend, options)
        return agent
    except Exception as error:
        settings = f"protocol is {backend!r}"
        if device := options.get("engine_config"):
            known = ", ".join(sorted(path.name for root in _DEVICE_FOLDERS for path in root.glob("*")))
            settings += f", and UCX gets {device} by device_name or host; devices here are {known}"
        raise EngineError(
            f"NIXL cannot start its backend {backend!r}: {error!r}; in kv_connector_extra_config {settings}"
        ) from error


def released(handle: Any) -> bool:
    """Release a transfer's handle; whether NIXL let it go."""
    try:
        handle.release()
    except Exception as error:
        log.debug("a transfer cannot be released yet: %r", error)
        return False
    return True


def by_memory_type(spans: Sequence[Span]) -> dict[str, list[tuple[int, int, int, str]]]:
    """Spans as NIXL's rows of (address, length, device, ""), by its name of the memory type."""
    groups: dict[str, list[tuple[int, int, int, str]]] = {}
    for span in spans:
        row = (span.address, span.length_bytes, max(span.gpu, 0), "")
        groups.setdefault(_memory_type(span.gpu >= 0), []).append(row)
    return groups


def transfers(agent: Any, batch: Batch, local: SpanSet, remote: SpanSet, peer: str) -> Iterator[Any]:
    """Make the handles of a batch: one for each pair of memory types in it, as descriptor lists have one."""
    source_gpu, target_gpu = local.gpus(batch.source), remote.gpus(batch.target)
    kind = (source_gpu >= 0) * 2 + (target_gpu >= 0)
    is_copy = batch.length > 0
    for value in np.unique(kind[is_copy]).tolist():
        pick = is_copy & (kind == value)
        length = batch.length[pick]
        source = _descriptors(agent, batch.source[pick], length, source_gpu[pick], bool(value & 2))
        target = _descriptors(agent, batch.target[pick], length, target_gpu[pick], bool(value & 1))
        yield agent.initialize_xfer("WRITE", source, target, peer)


def _descriptors(agent: Any, addresses: Addresses, length: Addresses, gpu: Addresses, on_gpu: bool) -> Any:
    rows = np.empty((len(length), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, length, np.maximum(gpu, 0)
    return agent.get_xfer_descs(rows, _memory_type(on_gpu))


def _memory_type(on_gpu: bool) -> str:
    return "VRAM" if on_gpu else "DRAM"


class Copy(NamedTuple):
    """What a transfer of one copy was made from."""

    agent: str
    source: int
    target: int
    length: int


class NixlCard(msgspec.Struct, tag="kvconnect-nixl-1", frozen=True):
    """NIXL's own metadata, and the spans behind it as (address, length_bytes, device)."""

    metadata: bytes
    spans: list[tuple[int, int, str]]
    process: ProcessIdentity


@dataclass(slots=True, eq=False, kw_only=True)
class NativeFlight(adapter.Flight):
    """A batch that was not answered yet.

    ``handles`` are those which may still be in progress. Once ``error`` is set the batch is answered when it
    is proven quiescent, or once it had its time, ``settle_until`` at the earliest. ``copy`` is set where its
    handle can be posted again. ``is_posted`` is False while it waits for its peer's link to be renewed.
    """

    handles: list[Any] = field(default_factory=list)
    settle_until: float = 0.0
    severed: bool = False
    copy: Copy | None = None
    is_posted: bool = False


class NativePeer:
    """A connected peer: its card, its agent's name, and whether the link to it must be renewed.

    ``progressed_at`` is when a transfer to it ended last, ``heal_asked_at`` when a batch first waited for the
    link to be renewed; 0 where none does.
    """

    def __init__(self, card: NixlCard, agent: str) -> None:
        self.card = card
        self.agent = agent
        self.broken = False
        self.progressed_at = 0.0
        self.heal_asked_at = 0.0
        self.spans = SpanSet()
        self.spans.add([Span(*span) for span in card.spans])


class TransferCache:
    """Idle transfers of one copy by what they were made from; the least recently used one is evicted.

    To make a transfer costs NIXL several times what it takes to post it, and slots are used in turn. One that
    is under way belongs to its batch, and is put back only if it succeeded.
    """

    def __init__(self, release: Callable[[Any], None]) -> None:
        self._release = release
        self._idle: OrderedDict[Copy, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, copy: Copy) -> Any | None:
        """An idle transfer of this copy; None if there is none, or another batch has it."""
        return self._idle.pop(copy, None)

    def put(self, copy: Copy, handle: Any) -> None:
        """A transfer has succeeded, and can be posted again."""
        former = self._idle.pop(copy, None)
        self._idle[copy] = handle
        if former is not None:
            self._release(former)
        elif len(self._idle) > _MAX_IDLE:
            self._release(self._idle.popitem(last=False)[1])

    def drop(self, agent: str | None = None) -> None:
        """Release those to one agent, or all: what they were made from has changed."""
        for copy in [copy for copy in self._idle if agent in (None, copy.agent)]:
            self._release(self._idle.pop(copy))

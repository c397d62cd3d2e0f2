"""Imports NIXL and makes its agents, descriptors and transfers; records of peers and batches for ``nixl``."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvconnect.addresses import interface_of, is_address, is_loopback
from kvconnect.engine import adapter
from kvconnect.engine.base import Batch, Span, SpanSet
from kvconnect.errors import ConfigError, EngineError
from kvconnect.pack.shared_memory import this_machine

log = logging.getLogger("kvconnect.engine.nixl")

_MAX_IDLE = 256
_RDMA_CARDS = Path("/sys/class/infiniband")
_DEVICES = "UCX_NET_DEVICES"
_DEVICE_FOLDERS = (Path("/sys/class/net"), _RDMA_CARDS)


def load_library() -> Any:
    """Import NIXL after libibverbs, to avoid a crash at exit. Raises ``EngineError``: it is missing."""
    # NIXL's wheel has its own libnl-route. If UCX later loads the system's copy through libibverbs, the
    # two copies bind each other's symbols, and the process dies with SIGSEGV at its exit. Loading the
    # system's copy first, with local symbols, keeps them apart.
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        log.debug("no libibverbs on this system, so UCX will not load one: %s", error)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # at INFO it logs every agent
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise EngineError(f"NIXL is not usable ({error}); pip install 'kvconnect[nixl]'") from error


def start_agent(backend: str, options: dict[str, str]) -> Any:
    """Make an agent with one backend. Raises ``EngineError``: NIXL or its backend cannot start."""
    library = load_library()
    try:
        config = library.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            # One thread owns the engine, but NIXL's default lets even its own helper threads race.
            sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        agent = library.nixl_agent(f"kvconnect-{uuid.uuid4().hex}", config)
        agent.create_backend(backend, options)
        return agent
    except Exception as error:
        settings = f"protocol is {backend!r}"
        if device := options.get("engine_config"):
            known = ", ".join(sorted(_described(path) for root in _DEVICE_FOLDERS for path in root.glob("*")))
            settings += f", and UCX gets {device} by device_name or host; devices here are {known}"
        raise EngineError(
            f"NIXL cannot start its backend {backend!r}: {error!r}; in kv_connector_extra_config {settings}"
        ) from error


def _described(device: Path) -> str:
    """A device, and its state where that keeps UCX from it: UCX passes over an interface without carrier."""
    try:
        state = (device / "operstate").read_text().strip()
    except OSError:
        return device.name
    return device.name if state in ("up", "unknown") else f"{device.name} ({state})"


def ucx_options(
    host: str, device_name: str, options: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """NIXL's parameters for UCX, with its network device; without a device UCX listens on all interfaces.

    The device is ``device_name``, or the interface of ``host``. If there is an RDMA card and ``host`` is no
    loopback address, UCX chooses, since it is unknown to which card ``host`` belongs. Raises ``ConfigError``:
    ``device_name`` has several devices, of which NIXL would take the first, or no interface has ``host``.
    """
    if "," in device_name:
        raise ConfigError(
            f"device_name is {device_name!r}: NIXL takes one device; for several set {_DEVICES} in the "
            "environment"
        )
    configured = options.get("engine_config", "")
    if "NET_DEVICES=" in configured or (environ.get(_DEVICES) and not device_name):
        return dict(options)
    device = device_name
    has_rdma_card = _RDMA_CARDS.is_dir() and any(_RDMA_CARDS.iterdir())
    if not device and (is_loopback(host) or not has_rdma_card):
        device = interface_of(host)
        if not device and is_address(host):
            raise ConfigError(
                f"kv_connector_extra_config.host is {host!r}, which no interface here has, and UCX tells "
                "peers the addresses of its devices alone; accepted: device_name, the device that they reach"
            )
    if not device:
        log.warning(
            "UCX listens on all interfaces of this node, as it is not known which belongs to host %s: set "
            "device_name, or close its ports to all but peers",
            host,
        )
        return dict(options)
    return {**options, "engine_config": ",".join(filter(None, (f"NET_DEVICES={device}", configured)))}


def released(handle: Any) -> bool:
    """Release a transfer's handle. False: NIXL cannot release it yet."""
    try:
        handle.release()
    except Exception as error:
        log.debug("a transfer cannot be released yet: %r", error)
        return False
    return True


def by_memory_type(spans: Sequence[Span]) -> dict[str, list[tuple[int, int, int, str]]]:
    """Spans as NIXL's rows (address, length in bytes, device number, ""), by NIXL's memory type."""
    groups: dict[str, list[tuple[int, int, int, str]]] = {}
    for span in spans:
        row = (span.address, span.length_bytes, max(span.gpu, 0), "")
        groups.setdefault(_memory_type(span.gpu >= 0), []).append(row)
    return groups


def make_transfer(agent: Any, batch: Batch, local: SpanSet, remote: SpanSet, peer: str) -> Any:
    """Make a transfer for a batch whose memory is registered on both sides; returns its handle."""
    source = _descriptors(agent, batch.source, batch.total_bytes, local)
    target = _descriptors(agent, batch.target, batch.total_bytes, remote)
    return agent.initialize_xfer("WRITE", source, target, peer)


def _descriptors(agent: Any, address: int, length_bytes: int, spans: SpanSet) -> Any:
    span = spans.find(address, length_bytes)
    assert span is not None, "it was checked"
    row = np.array([[address, length_bytes, max(span.gpu, 0)]], dtype=np.uint64)
    return agent.get_xfer_descs(row, _memory_type(span.gpu >= 0))


def _memory_type(on_gpu: bool) -> str:
    return "VRAM" if on_gpu else "DRAM"


class Copy(NamedTuple):
    """The key of a cached transfer: agent, both addresses, and length in bytes."""

    agent: str
    source: int
    target: int
    length: int


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identifies a process on a host; a later process with the same pid has another ``started``."""

    host: str
    pid: int
    started: str


def own_identity() -> ProcessIdentity:
    """The identity of this process."""
    return ProcessIdentity(this_machine(), os.getpid(), _start_time(os.getpid()) or "")


def is_dead(process: ProcessIdentity) -> bool:
    """Whether the process and its memory are proven to be gone.

    Only a process of this host and pid namespace can be proven dead. A zombie counts as dead: its memory
    is released before its sockets, and long before the zombie is reaped.
    """
    if not process.host or process.host != this_machine():
        return False
    return _start_time(process.pid) != process.started


def _start_time(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The process name is in parentheses and may contain any character: parse after the last ")".
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


class NixlCard(msgspec.Struct, tag="kvconnect-nixl-1", frozen=True):
    """NIXL's metadata, the registered spans as (address, length_bytes, device), and the process."""

    metadata: bytes
    spans: list[tuple[int, int, str]]
    process: ProcessIdentity


@dataclass(slots=True, eq=False, kw_only=True)
class NativeFlight(adapter.Flight):
    """A batch without a completion yet.

    ``handle`` is set while the transfer of ``copy`` may be in progress. Once ``error`` is set, the batch is
    completed when it is proven quiescent, or after ``settle_until`` at the earliest. ``severed``: the library
    failed the posted transfer. ``is_posted`` is False while the batch waits for a renewed link.
    """

    handle: Any = None
    copy: Copy | None = None
    settle_until: float = 0.0
    severed: bool = False
    is_posted: bool = False


class NativePeer:
    """A connected peer: its card, its agent's name, and whether the link must be renewed (``broken``).

    ``progressed_at`` is when a transfer to it last ended; ``heal_asked_at`` is when a batch first waited for
    a renewed link, 0 if none waits. Both in seconds of the monotonic clock.
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
    """Idle transfers by ``Copy``; the least recently used one is evicted.

    Making a transfer costs NIXL several times as much as posting it, and the same slots recur. A transfer in
    progress belongs to its batch, and is put back only if it succeeded.
    """

    def __init__(self, release: Callable[[Any], None]) -> None:
        self._release = release
        self._idle: OrderedDict[Copy, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, copy: Copy) -> Any | None:
        """Take the idle transfer of this copy; None if there is none, or another batch uses it."""
        return self._idle.pop(copy, None)

    def put(self, copy: Copy, handle: Any) -> None:
        """Put back a transfer that has succeeded and can be posted again."""
        former = self._idle.pop(copy, None)
        self._idle[copy] = handle
        if former is not None:
            self._release(former)
        elif len(self._idle) > _MAX_IDLE:
            self._release(self._idle.popitem(last=False)[1])

    def drop(self, agent: str | None = None) -> None:
        """Release the idle transfers to an agent, or all: the registered memory or the agent has changed."""
        for copy in [copy for copy in self._idle if agent in (None, copy.agent)]:
            self._release(self._idle.pop(copy))

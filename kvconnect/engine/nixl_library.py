"""How NIXL is imported, and what it wants descriptors to look like.

Owns the import and the translation from spans and address columns. It keeps no state.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.engine.base import Addresses, Batch, Span
from kvconnect.engine.nixl_peer import DeviceMap, Peer, device_number
from kvconnect.errors import EngineError

log = logging.getLogger("kvconnect.engine.nixl")

MEMORY_TYPE = {False: "DRAM", True: "VRAM"}


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


def start_agent(backend: str, options: dict[str, str]) -> tuple[Any, bool]:
    """An agent with one backend, and whether that takes GPU memory. Raises ``EngineError``."""
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
        return agent, any("VRAM" in kind for kind in agent.get_backend_mem_types(backend))
    except Exception as error:
        raise EngineError(f"NIXL cannot start its backend {backend!r}: {error!r}") from error


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
        gpu, number = device_number(span.device)
        groups.setdefault(MEMORY_TYPE[gpu], []).append((span.address, span.length_bytes, number, ""))
    return groups


def transfers(agent: Any, batch: Batch, devices: DeviceMap, peer: Peer) -> Iterator[Any]:
    """Make the handles of a batch: one for each pair of memory types in it, as descriptor lists have one."""
    source_gpu, source_number = devices.lookup(batch.source)
    target_gpu, target_number = peer.devices.lookup(batch.target)
    kind = source_gpu.astype(np.int8) * 2 + target_gpu
    is_copy = batch.length > 0
    for value in np.unique(kind[is_copy]).tolist():
        pick = is_copy & (kind == value)
        length = batch.length[pick]
        source = _descriptors(agent, batch.source[pick], length, source_number[pick], bool(value & 2))
        target = _descriptors(agent, batch.target[pick], length, target_number[pick], bool(value & 1))
        yield agent.initialize_xfer("WRITE", source, target, peer.agent)


def _descriptors(
    agent: Any, addresses: Addresses, length: Addresses, number: NDArray[np.uint64], gpu: bool
) -> Any:
    rows = np.empty((len(length), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, length, number
    return agent.get_xfer_descs(rows, MEMORY_TYPE[gpu])

"""How NIXL is imported, and what it wants descriptors to look like.

Owns the import and the translation from spans and address columns. It keeps no state.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.engine.base import Addresses, Batch, Span
from kvconnect.engine.nixl_peer import Peer, device_number
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


def remote_problem(batch: Batch, peer: Peer) -> str:
    """Say which remote stretch of the batch is not on the peer's card; empty if all are."""
    index = peer.spans.outside(batch.remote, batch.length)
    if index is None:
        return ""
    return (
        f"remote memory is not on the card of {batch.peer!r}: {int(batch.length[index])} bytes at "
        f"{int(batch.remote[index]):#x}"
    )


def descriptors(
    agent: Any, addresses: Addresses, length: Addresses, number: NDArray[np.uint64], gpu: bool
) -> Any:
    """A descriptor list of one memory type; copies of no bytes are left out."""
    keep = length > 0
    rows = np.empty((int(keep.sum()), 3), dtype=np.uint64)
    rows[:, 0] = addresses[keep]
    rows[:, 1] = length[keep]
    rows[:, 2] = number[keep]
    return agent.get_xfer_descs(rows, MEMORY_TYPE[gpu])

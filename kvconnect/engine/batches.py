"""What every engine checks of a batch before it touches a library.

Owns the split between a caller's bug (``LocalError``, raised by ``submit``) and a batch that fails
(a completion). It must not know any library, and it moves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Container

import numpy as np

from kvconnect.engine.base import Addresses, Batch, Capabilities, SpanSet
from kvconnect.errors import LocalError


def check_batch(
    batch: Batch,
    capabilities: Capabilities,
    peers: Container[str],
    in_flight: Collection[Batch],
) -> None:
    """Refuse what no caller that reads ``capabilities`` would submit.

    ``in_flight`` holds every batch that was not answered yet.

    Raises:
        LocalError: the batch breaks a bound, or names an unknown peer or an id in use.
    """
    name = f"batch {batch.batch_id} to {batch.peer!r}"
    if batch.peer not in peers:
        raise LocalError(f"{name}: no such peer is connected")
    columns = (batch.source, batch.target, batch.length)
    if any(column.dtype != np.int64 or column.ndim != 1 for column in columns):
        raise LocalError(f"{name}: source, target and length must be one-dimensional int64 arrays")
    copies = len(batch.length)
    if len(batch.source) != copies or len(batch.target) != copies:
        raise LocalError(
            f"{name}: {len(batch.source)} sources, {len(batch.target)} targets and {copies} lengths"
        )
    if copies > capabilities.max_copies:
        raise LocalError(f"{name}: {copies} copies, at most {capabilities.max_copies} are taken")
    if copies and batch.length.min() < 0:
        raise LocalError(f"{name}: a length is negative")
    if batch.total_bytes > capabilities.max_bytes:
        raise LocalError(f"{name}: {batch.total_bytes} bytes, at most {capabilities.max_bytes} are taken")
    if not batch.timeout_s > 0:
        raise LocalError(f"{name}: timeout_s is {batch.timeout_s}, it must be positive")
    if any(other.batch_id == batch.batch_id for other in in_flight):
        raise LocalError(f"{name}: this id is in flight already")
    to_peer = sum(other.peer == batch.peer for other in in_flight)
    if to_peer >= capabilities.max_batches_per_peer:
        raise LocalError(
            f"{name}: {to_peer} batches are in flight to it, at most "
            f"{capabilities.max_batches_per_peer} are taken"
        )


def source_problem(batch: Batch, spans: SpanSet) -> str:
    """Which copy of the batch reads memory that is not registered here; empty if none does."""
    return _problem("local", batch.source, batch, spans)


def range_problem(batch: Batch, local: SpanSet, remote: SpanSet) -> str:
    """The same, also of what the peer has registered."""
    return source_problem(batch, local) or _problem("remote", batch.target, batch, remote)


def _problem(side: str, addresses: Addresses, batch: Batch, spans: SpanSet) -> str:
    index = spans.outside(addresses, batch.length)
    if index is None:
        return ""
    return (
        f"{side} memory is not registered: {int(batch.length[index])} bytes at {int(addresses[index]):#x} "
        f"(copy {index} of {len(batch.length)})"
    )

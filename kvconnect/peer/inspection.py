"""The current leases, loads, slots, peers and tiers of a worker: the answer to the topic ``inspection``."""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnect.outcome import Outcome

TOPIC = "inspection"
MOST_PER_PAGE = 256
"""The most leases, and the most loads, in an answer; so many take 1 ms of a transfer thread."""
OF_REQUEST = "request "
"""Prefix of a question's argument that names one request, instead of the number of entries already seen."""
MOST_TEXT = 256
"""Characters kept of a name or a reason, since a client or a peer may have chosen the text."""


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: a request that is held, or is still being prefilled; the latter has no times yet.

    ``digest`` stands for the handle, as in the timeline: the handle itself would open a load. ``renewed_by``
    counts peers.
    """

    digest: str
    request_id: str
    state: str
    tokens: int
    blocks: int
    renewed_by: int
    age_s: float | None = None
    left_s: float | None = None


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """A load: a request that is being fetched, over all source ranks."""

    digest: str
    request_id: str
    engine_id: str
    address: str
    phase: str
    age_s: float
    left_s: float
    landed_bytes: int
    total_bytes: int


class SlotsView(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the slots of a direction: free, in use by this worker, granted to peers, in quarantine."""

    direction: str
    slot_bytes: int
    free: int
    ours: int
    granted: int
    quarantined: int


class PeerView(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that KV is ``received`` from or ``sent`` to. ``met`` is how they met; empty: not connected.

    ``refusal`` is why the breaker permits no fetch now, ``retry_s`` for how long. ``loss`` is the last one.
    """

    direction: str
    engine_id: str
    ranks: tuple[int, ...]
    address: str
    met: str
    rate: str = ""
    failures: int = 0
    refusal: str = ""
    retry_s: float = 0.0
    loss: str = ""
    loss_age_s: float = 0.0


class RecordView(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the timeline, ``age_s`` seconds old."""

    age_s: float
    moment: str
    digest: str
    request_id: str
    number: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a worker. Other releases read it too: they ignore unknown fields.

    ``leases`` and ``loads`` are one page of each, oldest first; ``counts`` has the totals of these and of
    other things. ``tiers`` has by name the report of each tier: ``records``, ``taken_bytes``,
    ``limit_bytes`` where the tier has them. ``latest`` are the last records of the timeline, ``ended`` the
    outcomes of the last loads, newest first. If the question names a request, ``leases``, ``loads`` and
    ``ended`` are only those of the request, and ``receipts`` has its receipts, on rank 0.
    """

    engine_id: str
    rank: int
    counts: dict[str, int]
    leases: tuple[LeaseView, ...]
    loads: tuple[LoadView, ...]
    slots: tuple[SlotsView, ...]
    peers: tuple[PeerView, ...]
    tiers: dict[str, dict[str, Any]]
    latest: tuple[RecordView, ...]
    is_last: bool
    ended: tuple[Outcome, ...] = ()
    receipts: tuple[dict[str, Any], ...] = ()

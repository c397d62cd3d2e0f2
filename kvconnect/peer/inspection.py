"""What a worker holds and does right now: the answer to the topic ``inspection`` of a question."""

from __future__ import annotations

from typing import Any

import msgspec

TOPIC = "inspection"
MOST_PER_PAGE = 256
"""Of leases, and of loads, which take 1 ms of a transfer thread."""
OF_REQUEST = "request "
"""What an argument begins with that names one request, in place of how many were seen."""
MOST_TEXT = 256
"""Characters that are kept of a name or a reason: a client or a peer may have chosen it."""


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is held, or prefilled and streamed; then it has no times yet.

    A handle opens a load: ``digest`` stands for it here, as in the timeline. ``renewed_by`` counts peers.
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
    """A request that is fetched, over all ranks of its peer."""

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
    """The slots of a direction: free, or used by our kernels, an engine or a peer."""

    direction: str
    slot_bytes: int
    free: int
    ours: int
    granted: int
    quarantined: int


class PeerView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that KV is ``received`` from or ``sent`` to. ``met`` is how; empty: it is not connected.

    ``refusal`` is why the breaker lets nothing be fetched now, ``retry_s`` until when. ``loss`` is the last.
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
    """A record of the timeline, so long ago."""

    age_s: float
    moment: str
    digest: str
    request_id: str
    number: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it is. Read by other releases too: fields that they do not know are ignored.

    ``leases`` and ``loads`` are some of each, oldest first; ``counts`` has how many there are of these and of
    others. ``tiers`` is by name what each tier reports of itself: ``records``, ``taken_bytes``,
    ``limit_bytes`` where it has them. ``latest`` are the last records of the timeline, ``outcomes`` the
    lines of the last loads that ended, newest first; where one request was asked about, only what is its own.
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
    outcomes: tuple[str, ...] = ()

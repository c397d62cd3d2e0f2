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

Row = dict[str, Any]


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a worker. Other releases read it too: they ignore unknown fields.

    A row has what is shown of one thing by name, with the unit last. ``leases`` and ``loads`` are one page of
    each, oldest first; ``counts`` has the totals of these and of other things. ``tiers`` has by name the
    report of each tier: ``records``, ``taken_bytes``, ``limit_bytes`` where the tier has them. ``latest`` are
    the last records of the timeline, ``ended`` the outcomes of the last loads, newest first. If the question
    names a request, ``leases``, ``loads`` and ``ended`` are only those of the request, and ``receipts`` has
    its receipts, on rank 0.
    """

    engine_id: str
    rank: int
    counts: dict[str, int]
    leases: tuple[Row, ...]
    loads: tuple[Row, ...]
    slots: tuple[Row, ...]
    peers: tuple[Row, ...]
    tiers: dict[str, Row]
    latest: tuple[Row, ...]
    is_last: bool
    ended: tuple[Outcome, ...] = ()
    receipts: tuple[dict[str, Any], ...] = ()

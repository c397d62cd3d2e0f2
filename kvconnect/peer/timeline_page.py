"""A worker's timeline in pages: the answer to a question of the topic ``timeline``."""

from __future__ import annotations

import bisect
import functools
import hashlib
from operator import itemgetter

import msgspec

from kvconnect.peer.inspection import MOST_TEXT
from kvconnect.timeline import Record, Timeline

TOPIC = "timeline"
MOST_PER_PAGE = 4096
"""Records per page: some 300 kB, which occupy a transfer thread for 3 ms."""
_DIGEST_BYTES = 12


class TimelinePage(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a worker, ordered by time; the next page begins after the last one.

    ``clock_s`` is the records' clock at the time of the answer. A record has the digest of a handle instead
    of the handle itself, which would open a load; the digest is the same on both sides of the load.
    """

    engine_id: str
    rank: int
    clock_s: float
    is_last: bool
    records: tuple[Record, ...]


def write_page(timeline: Timeline, engine_id: str, rank: int, argument: str) -> bytes:
    """The worker's answer. ``argument`` is the time after which the page begins; empty for all records.

    If a page ends between two records of the same time, the second one is in no page.
    """
    after_s = float(argument) if argument else float("-inf")
    found = timeline.records()
    found = found[bisect.bisect_right(found, after_s, key=itemgetter(0)) :]
    cached_digest = functools.cache(digest)
    page = TimelinePage(
        engine_id=engine_id,
        rank=rank,
        clock_s=timeline.clock(),
        is_last=len(found) <= MOST_PER_PAGE,
        records=tuple(
            # A client may have chosen the id, and a record's number may be a bool.
            (at, moment, cached_digest(handle), request_id[:MOST_TEXT], transfer, int(number))
            for at, moment, handle, request_id, transfer, number in found[:MOST_PER_PAGE]
        ),
    )
    return msgspec.msgpack.encode(page)


def digest(handle: str) -> str:
    """The digest that stands for a handle in a page; empty for no handle."""
    return hashlib.blake2b(handle.encode(), digest_size=_DIGEST_BYTES).hexdigest() if handle else ""

"""A worker's timeline, page by page: the answer to the topic ``timeline`` of a question."""

from __future__ import annotations

import bisect
import functools
import hashlib
from operator import itemgetter

import msgspec

from kvconnect.errors import PeerError
from kvconnect.timeline import Record, Timeline

TOPIC = "timeline"
MOST_PER_PAGE = 4096
"""Some 80 kB, which hold up a transfer thread for 10 to 16 ms."""
_DIGEST_BYTES = 12

_Row = tuple[float, int, int, int, int, int]


class TimelinePage(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a worker, in the sequence of their times; the next page begins after the last of them.

    ``clock_s`` is the clock of its records as it answered. Texts are in ``names``, and rows have their places
    there. A handle opens a load: a page has its digest, which is the same on both sides of the load.
    """

    engine_id: str
    rank: int
    clock_s: float
    is_last: bool
    names: tuple[str, ...]
    rows: tuple[_Row, ...]

    def records(self) -> list[Record]:
        """The records, each with the digest of its handle as the handle. Raises ``PeerError``."""
        names = self.names
        if any(not 0 <= place < len(names) for row in self.rows for place in row[1:4]):
            raise PeerError("its timeline refers to names that it does not contain")
        return [
            (at, names[a], names[b], names[c], transfer, number)
            for at, a, b, c, transfer, number in self.rows
        ]


def write_page(timeline: Timeline, engine_id: str, rank: int, argument: str) -> bytes:
    """The answer of a worker; the question's ``argument`` is the time after which the page begins, if any.

    Two records of the same nanosecond may be parted by the end of a page, and one of them is lost then.
    """
    after_s = float(argument) if argument else float("-inf")
    found = timeline.records()
    found = found[bisect.bisect_right(found, after_s, key=itemgetter(0)) :]
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    cached_digest = functools.cache(digest)
    rows = tuple(
        # A number may be the answer to a question, yes or no.
        (
            at,
            place(moment),
            place(cached_digest(handle)),
            place(request_id),
            transfer,
            int(number),
        )
        for at, moment, handle, request_id, transfer, number in found[:MOST_PER_PAGE]
    )
    page = TimelinePage(
        engine_id=engine_id,
        rank=rank,
        clock_s=timeline.clock(),
        is_last=len(found) <= MOST_PER_PAGE,
        names=tuple(places),
        rows=rows,
    )
    return msgspec.msgpack.encode(page)


def digest(handle: str) -> str:
    """What stands for a handle in a page; empty for none."""
    return hashlib.blake2b(handle.encode(), digest_size=_DIGEST_BYTES).hexdigest() if handle else ""

"""Fetches that reach P before their KV can be sent: their prefill runs, or is not known here yet.

Pure, with the time as an argument; every entry has a bound and a deadline.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from kvconnect.config import ExtraConfig
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import Fetch
from kvconnect.plan.chunks import Chunker
from kvconnect.prefill.leases import LeaseBook, TransferKey
from kvconnect.transfer.params import NO_REQUEST
from kvconnect.transfer.parts import Timer, Timers

_LONGEST_FETCH_S = 3600.0
_FEW_CHUNKS = 256
_CHUNKS_PER_SLOT = 4
"""More than a correct peer needs: it fills slots at least half, except for the last chunk of a part."""


@dataclass
class PendingFetch:
    """A fetch that may have to wait. ``timer``, made when it first does, fires after too long a wait."""

    link: str
    fetch: Fetch
    received_at: float
    timer: Timer | None = None

    @property
    def key(self) -> TransferKey:
        return self.link, self.fetch.transfer_id

    @property
    def has_waited(self) -> bool:
        """It waits or has waited: P has returned its landing slots to the peer."""
        return self.timer is not None

    @functools.cached_property
    def deadline(self) -> float:
        """The peer's deadline for the fetch, by P's clock in seconds: an hour after its arrival at most."""
        fetch = self.fetch
        if math.isnan(fetch.until_s) or not math.isfinite(fetch.timeout_s):
            return self.received_at
        patience_s = min(max(fetch.timeout_s, 0.0), _LONGEST_FETCH_S)
        return min(self.received_at + patience_s, fetch.until_s)

    @functools.cached_property
    def first_tokens(self) -> float:
        """Tokens to be computed before the first chunk can be sent; infinite for a fetch without chunks."""
        ends = (max((1, *(span.stop for span in chunk.spans))) for chunk in self.fetch.chunks)
        return min(ends, default=math.inf)


def check_chunks(fetch: Fetch, chunker: Chunker, slot_bytes: int) -> None:
    """Refuse chunks by a PeerError: beyond the fetch's tokens, naming one twice, or more than slots call for.

    Computes no byte offsets: those cost far more per chunk than reading the message does.
    """
    wire, streams = chunker.wire, len(chunker.wire.streams)
    longest = max(1, fetch.num_tokens)
    if any(span.stop > longest for chunk in fetch.chunks for span in chunk.spans):
        raise PeerError(f"chunks go beyond the {fetch.num_tokens} tokens of the fetch")
    area = sum(
        max(0, min(chunk.stop_stream, streams) - chunk.first_stream) * (span.stop - span.start)
        for chunk in fetch.chunks
        for span in chunk.spans
    )
    # A chunk of all streams names each token once for every group.
    if area > streams * len(chunker.groups) * longest:
        raise PeerError(
            f"{len(fetch.chunks)} chunks name more than the {fetch.num_tokens} tokens of the fetch"
        )
    if len(fetch.chunks) <= _FEW_CHUNKS + streams:
        return
    total_bytes = sum(stream.width_bytes * -(-longest // stream.row_tokens) for stream in wire.streams)
    most = _FEW_CHUNKS + streams + _CHUNKS_PER_SLOT * (total_bytes // slot_bytes if slot_bytes else 0)
    if len(fetch.chunks) > most:
        raise PeerError(
            f"{len(fetch.chunks)} chunks are wanted, {most} are enough for {fetch.num_tokens} tokens in "
            f"slots of {slot_bytes} bytes"
        )


class PendingFetches:
    """The fetches that wait, by transfer key."""

    def __init__(self, config: ExtraConfig, book: LeaseBook, timers: Timers) -> None:
        self.fetches: dict[TransferKey, PendingFetch] = {}
        self._book, self._timers = book, timers
        self._by_handle: dict[str, dict[TransferKey, None]] = {}
        self.touched: dict[TransferKey, None] = {}
        """Fetches to look at in the next turn: an event touched them, or a device, disk or link is polled."""
        self._capacity = config.max_leases
        self._early_fetch_s = config.early_fetch_s

    def touch(self, handle: str) -> None:
        """Look again at the fetches of a handle, whose state has changed."""
        for key in self._by_handle.get(handle, ()):
            self.touched[key] = None

    def touch_link(self, link: str) -> None:
        """Look again at the fetches of a connection: its link is measured now, or is a new one."""
        for key in self.fetches:
            if key[0] == link:
                self.touched[key] = None

    def touch_fetch(self, key: TransferKey) -> None:
        """Look again at one fetch."""
        if key in self.fetches:
            self.touched[key] = None

    def take_touched(self) -> list[PendingFetch]:
        """The fetches to look at in this turn; they stay pending."""
        touched, self.touched = self.touched, {}
        return [self.fetches[key] for key in touched]

    def remove(self, early: PendingFetch) -> None:
        """Remove a fetch, which no longer waits, if it did."""
        if self.fetches.get(early.key) is not early:
            return
        del self.fetches[early.key]
        self.touched.pop(early.key, None)
        of_handle = self._by_handle[early.fetch.handle]
        del of_handle[early.key]
        if not of_handle:
            del self._by_handle[early.fetch.handle]
        if early.timer is not None:
            early.timer.cancel()

    def first_tokens(self, handle: str) -> list[int]:
        """The tokens at which the fetches of a handle begin."""
        return [self.fetches[key].fetch.first_token for key in self._by_handle.get(handle, ())]

    def admit(self, early: PendingFetch, now: float) -> Reason | None:
        """Let a fetch wait, for the first time or on. Returns why it cannot, or None."""
        handle, key, until = early.fetch.handle, early.key, early.deadline
        is_known = self._book.get(handle) is not None
        if not is_known:
            until = min(until, early.received_at + self._early_fetch_s)
        if handle in self._book.over:
            return self._book.over[handle]
        if now >= until:
            if is_known:
                waited_s = now - early.received_at
                return Cause.TIMEOUT(
                    f"its prefill was not complete {waited_s:.1f} s after the fetch, when load_timeout_s of "
                    "the decode node was over"
                )
            return Cause.NOT_HELD(NO_REQUEST)
        if early.timer is None:
            if len(self.fetches) >= self._capacity:
                return Cause.BUSY(
                    f"{len(self.fetches)} fetches wait at the prefill node already, which takes no more"
                )
            if key in self.fetches:
                return Cause.PROTOCOL(f"transfer {key[1]} of this decode rank waits already")
            early.timer = self._timers.timer(lambda now: self.touch_fetch(key))
            self.fetches[key] = early
            self._by_handle.setdefault(handle, {})[key] = None
        early.timer.at(until)
        return None

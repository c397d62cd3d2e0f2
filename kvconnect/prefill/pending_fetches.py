"""What peers send about a handle before P holds anything under it, and why a handle is void.

D's messages and P's own orders overtake each other: a fetch may come while its prefill is under way, or
before this worker knows of it. Pure, with the time as an argument; everything has a bound and ends by itself.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import msgspec

from kvconnect.config import ExtraConfig
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.handles import epoch_of
from kvconnect.peer.messages import Fetch
from kvconnect.plan.chunks import Chunker
from kvconnect.prefill.leases import Consumer, TransferKey
from kvconnect.transfer.params import announced_id
from kvconnect.transfer.parts import Timer, Timers

_LONGEST_FETCH_S = 3600.0
_FEW_CHUNKS = 256
_CHUNKS_PER_SLOT = 4
"""More than honest peers need: they fill slots to half at least, but for the last of a part."""


@dataclass
class PendingFetch:
    """A fetch that may have to wait; ``has_waited`` once its peer knows that, and has its slots back.

    ``timer`` is armed for when it has waited long enough.
    """

    link: str
    fetch: Fetch
    received_at: float
    has_waited: bool = False
    timer: Timer | None = None

    @property
    def handle(self) -> str:
        """What it is fetched under."""
        return self.fetch.handle

    @property
    def key(self) -> TransferKey:
        """The fetch as both sides know it."""
        return self.link, self.fetch.transfer_id

    @functools.cached_property
    def deadline(self) -> float:
        """When the time is over that the peer gives for all of it, by our clock, within what is sensible."""
        fetch = self.fetch
        if math.isnan(fetch.until_s) or not math.isfinite(fetch.timeout_s):
            return self.received_at
        patience_s = min(max(fetch.timeout_s, 0.0), _LONGEST_FETCH_S)
        return min(self.received_at + patience_s, fetch.until_s)

    @functools.cached_property
    def first_tokens(self) -> float:
        """How far a prefill must be for its first chunk to be sent. Endless, if it asks for no chunks."""
        ends = (max((span.stop for span in chunk.spans), default=0) for chunk in self.fetch.chunks)
        return min(ends, default=math.inf)


@dataclass
class EarlyRelease:
    """Ranks of one engine that will not fetch what is not held yet. Others' words do not count."""

    owner: str
    consumers: int
    timer: Timer
    ranks: set[Consumer] = field(default_factory=set)


def check_fetch(fetch: Fetch) -> None:
    """Refuse a fetch that names more than its tokens can fill, by a PeerError."""
    for chunk in fetch.chunks:
        if any(span.stop > max(1, fetch.num_tokens) for span in chunk.spans):
            raise PeerError(f"chunks go beyond the {fetch.num_tokens} tokens of the fetch")


def check_chunks(fetch: Fetch, chunker: Chunker, slot_bytes: int) -> None:
    """Refuse chunks that name anything twice, or cut it smaller than slots ask for, by a PeerError.

    Without a look at where any byte lies: that costs far more per chunk than to read it.
    """
    wire, streams = chunker.wire, len(chunker.wire.streams)
    longest = max(1, fetch.num_tokens)
    area = sum(
        max(0, min(chunk.stop_stream, streams) - chunk.first_stream) * (span.stop - span.start)
        for chunk in fetch.chunks
        for span in chunk.spans
    )
    # A chunk of all streams names each token once for every group.
    if area > streams * chunker.num_groups * longest:
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
    """Early fetches and refusals to fetch, the prefills that are under way, and handles that ended.

    Args:
        held: the handles of all leases.
    """

    def __init__(self, config: ExtraConfig, held: Collection[str], timers: Timers) -> None:
        self.fetches: dict[TransferKey, PendingFetch] = {}
        self.expected: set[str] = set()
        self.let_go: dict[str, EarlyRelease] = {}
        self._held = held
        self._timers = timers
        self._by_handle: dict[str, dict[TransferKey, None]] = {}
        # Those that something happened to, and those whose device or disk is asked at every turn.
        self._touched: dict[TransferKey, None] = {}
        self._watchers: OrderedDict[str, set[str]] = OrderedDict()
        self.over: OrderedDict[str, Reason] = OrderedDict()
        """Why nothing is held under a handle any more."""
        self._capacity = config.max_leases
        self._early_fetch_s = config.early_fetch_s
        self._announced: tuple[float, set[str]] = (-1.0, set())
        self._epoch = ""

    def __len__(self) -> int:
        return len(self.fetches) + len(self.let_go)

    @property
    def busy(self) -> bool:
        """One may go on without anything that wakes this thread."""
        return bool(self._touched)

    def touch(self, handle: str) -> None:
        """Something happened to a handle: fetches of it may go on."""
        for key in self._by_handle.get(handle, ()):
            self._touched[key] = None

    def touch_link(self, link: str) -> None:
        """What a connection's fetches waited for may be there: its link is measured, or another one."""
        for key in self.fetches:
            if key[0] == link:
                self._touched[key] = None

    def touch_fetch(self, key: TransferKey) -> None:
        """One is to be looked at."""
        if key in self.fetches:
            self._touched[key] = None

    def remove(self, early: PendingFetch) -> None:
        """It waits no longer."""
        del self.fetches[early.key]
        self._touched.pop(early.key, None)
        of_handle = self._by_handle[early.handle]
        del of_handle[early.key]
        if not of_handle:
            del self._by_handle[early.handle]
        if early.timer is not None:
            early.timer.cancel()

    def expect(self, handle: str) -> bool:
        """A prefill is under way. False: too many are, and this one gets no more time than unknown ones."""
        self.over.pop(handle, None)
        self._epoch = self._epoch or epoch_of(handle)
        if len(self.expected) >= self._capacity:
            return False
        self.expected.add(handle)
        return True

    def end(self, handle: str, reason: Reason) -> None:
        """Nothing will come of a handle, or nothing more."""
        self.expected.discard(handle)
        self._take_refusal(handle)
        self.touch(handle)
        self.over[handle] = reason
        if len(self.over) > self._capacity:
            self.over.popitem(last=False)

    def watch(self, handle: str, link: str) -> None:
        """The peer of a connection gets a message once a handle is held or over. The oldest are forgotten."""
        self._watchers.setdefault(handle, set()).add(link)
        if len(self._watchers) > self._capacity:
            self._watchers.popitem(last=False)

    def watchers(self, handle: str) -> set[str]:
        """The connections of those that watch a handle, which is held or over now."""
        return self._watchers.pop(handle, set())

    def hold(self, handle: str) -> EarlyRelease | None:
        """The request is held now. The early release of its handle, if peers sent one."""
        self._epoch = self._epoch or epoch_of(handle)
        self.expected.discard(handle)
        self.over.pop(handle, None)
        self.touch(handle)
        return self._take_refusal(handle)

    def _take_refusal(self, handle: str) -> EarlyRelease | None:
        release = self.let_go.pop(handle, None)
        if release is not None:
            release.timer.cancel()
        return release

    def admit(self, early: PendingFetch, now: float, *, is_served: bool = False) -> Reason | None:
        """Let a fetch wait, without its slots. Why it cannot, or None.

        ``is_served``: what it asks for is there, its link is not.
        """
        handle = early.handle
        is_known = is_served or self._is_known(early)
        if handle in self.over:
            return self.over[handle]
        # All handles of our scheduler name one start, but for transfer ids, which name none.
        if not is_known and self._epoch and epoch_of(handle) not in ("", self._epoch):
            return Cause.NOT_HELD(
                "the handle is of an earlier start of this node, which holds nothing of that any more"
            )
        if now >= (early.deadline if is_known else self._deadline(early)):
            if is_known:
                return Cause.TIMEOUT("the KV was not complete in the time that the fetch gives")
            if self._is_of_other_prompt(handle, now):
                return Cause.OTHER_PROMPT(
                    "no request is held under this handle: the transfer was announced with another prompt"
                )
            return Cause.NOT_HELD("no request is held under this handle")
        if len(self.fetches) >= self._capacity:
            return Cause.BUSY(f"{len(self.fetches)} fetches wait already")
        key = early.key
        if key in self.fetches:
            return Cause.PROTOCOL(f"transfer {key[1]} waits already")
        fetch = msgspec.structs.replace(early.fetch, grants=()) if early.fetch.grants else early.fetch
        timer = self._timers.timer(lambda now: self.touch_fetch(key))
        self.fetches[key] = replace(early, fetch=fetch, has_waited=True, timer=timer)
        self._by_handle.setdefault(handle, {})[key] = None
        self._touched[key] = None
        return None

    def refuse(self, handle: str, consumer: Consumer, consumers: int, now: float) -> None:
        """A rank of a peer will not fetch what is not held yet."""
        self._watchers.pop(handle, None)
        if handle in self.over or (handle not in self.let_go and len(self.let_go) >= self._capacity):
            return
        release = self.let_go.get(handle)
        if release is None:
            timer = self._timers.timer(lambda now: self._forget_refusal(handle))
            timer.at(now + self._early_fetch_s)
            release = self.let_go[handle] = EarlyRelease(consumer[0], consumers, timer)
        if release.owner == consumer[0]:
            release.consumers = consumers
            release.ranks.add(consumer)

    def _forget_refusal(self, handle: str) -> None:
        """Nothing came of a handle that was not known when ranks let go of it."""
        if handle not in self.expected:
            self.let_go.pop(handle, None)

    def take_due(
        self, is_ready: Callable[[PendingFetch], bool], is_polled: Callable[[PendingFetch], bool], now: float
    ) -> list[PendingFetch]:
        """Fetches that can go on, or have waited long enough, of those that something happened to.

        Others are at rest until something happens to them, but for those that are to be polled.
        """
        due: list[PendingFetch] = []
        touched, self._touched = self._touched, {}
        for key in touched:
            early = self.fetches[key]
            until = self._deadline(early)
            if early.handle in self.over or now >= until or is_ready(early):
                due.append(early)
                continue
            if early.timer is not None:
                early.timer.at(until)
            if is_polled(early):
                self._touched[key] = None
        for early in due:
            self.remove(early)
        return due

    def _is_known(self, early: PendingFetch) -> bool:
        return early.handle in self._held or early.handle in self.expected

    def _is_of_other_prompt(self, handle: str, now: float) -> bool:
        # One id may be of several prompts, so that this is known only once the time to wait is over.
        transfer_id = announced_id(handle)
        if not transfer_id:
            return False
        if self._announced[0] != now:
            # Once a step: a peer may have thousands of fetches end in one.
            self._announced = now, {announced_id(known) for known in (*self._held, *self.expected)}
        return transfer_id in self._announced[1]

    def _deadline(self, early: PendingFetch) -> float:
        until = math.inf if self._is_known(early) else early.received_at + self._early_fetch_s
        return min(early.deadline, until)

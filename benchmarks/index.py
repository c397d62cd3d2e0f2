"""What the index of host memory takes of a scheduler's thread, on one core and without any memory to copy.

An index of so many contents is full, and was filled as requests fill it: several at a time, some blocks of
each in turn. Hashes are made anew for every call, as a serving stack makes them. Times are the thread's own
on its processor: what else runs on the machine does not count.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.options import Options as BaseOptions
from benchmarks.options import option
from benchmarks.report import Report
from kvconnect.offload.index.budgets import plan_arena
from kvconnect.offload.index.session_pins import SessionPins
from kvconnect.offload.index.tier_index import TierIndex
from kvconnect.offload.tier import HOST

KEYS = 8192
_CHUNK = 512
_AT_ONCE = 4
_HASH_BYTES = 32
_PINNED = 0.7
_GROUP = 0


@dataclass(frozen=True)
class Options(BaseOptions):
    """What is measured."""

    contents: tuple[int, ...] = option(
        (100_000, 1_000_000), "Contents in the index (repeatable).", least=65536
    )
    pins: int = option(0, "Sessions that pin 70 % of the contents between them.", least=0)
    repeat: int = option(100, "Calls of each kind; ten times as many of short ones.", least=1)


class _Filled:
    """A full index, and the sequences that are in it as a generator of their hashes makes them again."""

    def __init__(self, contents: int, pins: int = 0) -> None:
        plan = plan_arena(contents * 64, {_GROUP: 64}, {_GROUP: 1.0})
        self.index = TierIndex(plan)
        self.pins = SessionPins(self.index, plan, 1.0)
        self.sequences = 0
        self.contents = contents
        while self.sequences * KEYS < contents + _AT_ONCE * KEYS:
            self.fill()
        if pins:
            self.pin(pins)

    def pin(self, pins: int) -> None:
        """Sessions pin parts of what has been there longest."""
        first = self.sequences - self.contents // KEYS + _AT_ONCE
        length = int(self.contents * _PINNED) // pins
        kept = itertools.chain.from_iterable(map(hashes_of, itertools.count(first)))
        for number in range(pins):
            names = list(itertools.islice(kept, length))
            pin = self.pins.begin(str(number % 16), str(number), names)
            if self.pins.add(pin, (HOST, _GROUP), names) < length:
                raise AssertionError(f"session {number} could not pin {length} contents")
            self.pins.end(pin, 1e9 + number)
        self.contents -= pins * length

    def fill(self) -> None:
        """Some sequences more, their blocks in turn; the oldest make room."""
        coming = [self.new() for _ in range(_AT_ONCE)]
        for first in range(0, KEYS, _CHUNK):
            for hashes in coming:
                self.store(hashes[first : first + _CHUNK])

    def store(self, hashes: list[bytes]) -> None:
        """Reserve and commit contents."""
        taken, _ = self.index.reserve(_GROUP, hashes)
        self.index.commit(_GROUP, taken)

    def recent(self, draw: random.Random) -> list[bytes]:
        """One of the sequences that are in the index as a whole."""
        return hashes_of(self.sequences - 1 - draw.randrange(self.contents // KEYS - _AT_ONCE))

    def new(self) -> list[bytes]:
        """A sequence that is not in the index."""
        self.sequences += 1
        return hashes_of(self.sequences - 1)


def hashes_of(sequence: int) -> list[bytes]:
    """Hashes of a sequence's blocks: the same ones for the same sequence, new objects every time."""
    data = random.Random(sequence).randbytes(KEYS * _HASH_BYTES)
    return [data[first : first + _HASH_BYTES] for first in range(0, len(data), _HASH_BYTES)]


def _timed(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e6


def _lookups(filled: _Filled, draw: random.Random) -> Iterator[float]:
    while True:
        hashes = filled.recent(draw)
        yield _timed(lambda hashes=hashes: filled.index.lookup(_GROUP, hashes))  # type: ignore[misc]
        if filled.index.lookup(_GROUP, hashes) != KEYS:
            raise AssertionError("a sequence that is in the index was not found")


def _touches(filled: _Filled, draw: random.Random) -> Iterator[float]:
    while True:
        hashes = filled.recent(draw)
        yield _timed(lambda hashes=hashes: filled.index.touch(_GROUP, hashes))  # type: ignore[misc]


def _pins(filled: _Filled, draw: random.Random) -> Iterator[float]:
    def pin_and_unpin(hashes: list[bytes]) -> None:
        filled.index.pin(_GROUP, hashes)
        filled.index.unpin(_GROUP, hashes)

    while True:
        hashes = filled.recent(draw)
        yield _timed(lambda hashes=hashes: pin_and_unpin(hashes))  # type: ignore[misc]


def _session_pins(filled: _Filled, draw: random.Random) -> Iterator[float]:
    """A step that ends a request whose session pins its prompt, and one whose pin is over."""

    def pin_and_release(names: list[bytes]) -> None:
        pin = filled.pins.begin("t", "s", names)
        filled.pins.add(pin, (HOST, _GROUP), names)
        filled.pins.end(pin, 1.0)
        filled.pins.expire(1.0)

    while True:
        names = filled.recent(draw)[:_CHUNK]
        yield _timed(lambda names=names: pin_and_release(names))  # type: ignore[misc]


def _steps(filled: _Filled, draw: random.Random) -> Iterator[float]:
    """What pins cost a step in which nothing of them changes."""
    while True:
        yield _timed(lambda: filled.pins.expire(2.0))


def _evictions(filled: _Filled, draw: random.Random) -> Iterator[float]:
    (rows,) = filled.index.classes
    while True:
        yield _timed(lambda: rows.evict(KEYS))
        if len(rows.free) < KEYS:
            raise AssertionError(f"{KEYS} contents could not make room")
        hashes = filled.new()
        for first in range(0, KEYS, _CHUNK):
            filled.store(hashes[first : first + _CHUNK])


def _reservations(count: int, commit: bool) -> Callable[[_Filled, random.Random], Iterator[float]]:
    """Reserve contents on a full index, or commit what was reserved."""

    def timings(filled: _Filled, draw: random.Random) -> Iterator[float]:
        while True:
            hashes = filled.new()
            for first in range(0, KEYS, count):
                part = hashes[first : first + count]
                reserving = _timed(lambda part=part: filled.index.reserve(_GROUP, part))  # type: ignore[misc]
                committing = _timed(lambda part=part: filled.index.commit(_GROUP, part))  # type: ignore[misc]
                yield committing if commit else reserving

    return timings


_CASES: tuple[tuple[str, int, Callable[[_Filled, random.Random], Iterator[float]]], ...] = (
    ("lookup", KEYS, _lookups),
    ("eviction", KEYS, _evictions),
    ("touch", KEYS, _touches),
    ("pin, unpin", KEYS, _pins),
    ("session pin, expiry", _CHUNK, _session_pins),
    ("step of session pins", 1, _steps),
    *(("reserve", count, _reservations(count, False)) for count in (KEYS, _CHUNK, 1)),
    *(("commit", count, _reservations(count, True)) for count in (KEYS, _CHUNK, 1)),
)


def bench_index(options: Options, report: Report) -> None:
    """Time every kind of call on full indexes of so many contents, in microseconds of a call."""
    for contents in options.contents:
        filled = _Filled(contents, options.pins)
        gc.collect()
        gc.freeze()
        for call, keys, timings in _CASES:
            draw = random.Random(contents)
            count = options.repeat if keys > 1 else 10 * options.repeat
            times = list(itertools.islice(timings(filled, draw), count))
            median = statistics.median(times)
            report.add(
                {
                    "contents": contents,
                    "call": call,
                    "keys": keys,
                    "median_us": round(median, 1),
                    "worst_us": round(max(times), 1),
                    "median_us_per_key": round(median / keys, 3),
                }
            )
        gc.unfreeze()
        # Not beside the next one, which is as large.
        del filled, timings

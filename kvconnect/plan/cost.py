"""What a transfer will take on either path, and which of the two is taken.

Pure: the caller measures; nothing here knows a clock, an engine or a tensor. Calibration says what to
expect first, every transfer that was really made corrects it, and what is known of a path that is not
taken fades with every transfer, until it is worth a try.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from kvconnect.errors import LocalError
from kvconnect.plan.learned_time import ASSUMED, CALIBRATED, LearnedTime, Vector, fit_factors

Path = Literal["direct", "packed"]
PATHS: tuple[Path, ...] = get_args(Path)

PACKED_FROM_COPIES = 128
"""Where nothing was measured, so many copies are packed: about what a round trip and two launches cost."""

TRY_EVERY = 16
"""Transfers from one try of the path that looks worse to the next, at least."""

TRY_SHARE = 0.01
"""Tries may lose so much of all seconds, and one average transfer, as far as predictions tell."""

_LEAST_S, _MOST_S = 1e-9, 1e6
_LEAST_BYTES_PER_S, _MOST_BYTES_PER_S = 1e4, 1e14
_MOST_COUNT = 2**62


class Sample(NamedTuple):
    """One probe: the engine moved ``copies`` equal copies, ``total_bytes`` together, as one batch."""

    copies: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class EngineRates:
    """An engine on one link: what a batch costs by itself, with each copy, and with each byte."""

    seconds_per_batch: float
    seconds_per_copy: float
    bytes_per_s: float


@dataclass(frozen=True)
class Choice:
    """The path to take, and the seconds that either would take. ``is_try``: the other one looks cheaper."""

    path: Path
    direct_s: float
    packed_s: float
    is_try: bool = False


DEFAULT_RATES = EngineRates(seconds_per_batch=100e-6, seconds_per_copy=3e-6, bytes_per_s=10e9)
DEFAULT_PACK_BYTES_PER_S = 100e9
DEFAULT_ROUND_TRIP_S = 400e-6


def fit(samples: Sequence[Sample]) -> EngineRates:
    """The rates that explain these probes best; what they do not show stays near the defaults.

    Probes tell the three rates apart if some are one small copy, some many small copies and some few large
    ones. Several of one shape count as their median; what cannot be a measurement is left out. The rates
    are positive, finite and within bounds.
    """
    shapes: dict[tuple[int, int], list[float]] = {}
    for copies, total_bytes, seconds in samples:
        if copies > 0 and total_bytes > 0 and _is_size(seconds):
            shapes.setdefault((copies, total_bytes), []).append(_within(seconds, _LEAST_S, _MOST_S))
    if not shapes:
        return DEFAULT_RATES
    terms = np.array([_direct_terms(DEFAULT_RATES, *shape) for shape in shapes])
    batch, copy, byte = fit_factors(terms, np.array([float(np.median(times)) for times in shapes.values()]))
    return _bounded(
        EngineRates(
            DEFAULT_RATES.seconds_per_batch * batch,
            DEFAULT_RATES.seconds_per_copy * copy,
            DEFAULT_RATES.bytes_per_s / byte,
        )
    )


def _is_size(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _speed(bytes_per_s: float) -> float:
    return _within(bytes_per_s, _LEAST_BYTES_PER_S, _MOST_BYTES_PER_S)


def _bounded(rates: EngineRates) -> EngineRates:
    return EngineRates(
        _within(rates.seconds_per_batch, _LEAST_S, _MOST_S),
        _within(rates.seconds_per_copy, _LEAST_S, _MOST_S),
        _speed(rates.bytes_per_s),
    )


def _direct_terms(rates: EngineRates, copies: int, total_bytes: int) -> Vector:
    """Seconds of a batch, of its copies, of its bytes."""
    copies, total_bytes = (min(max(count, 0), _MOST_COUNT) for count in (copies, total_bytes))
    return np.array(
        [rates.seconds_per_batch, copies * rates.seconds_per_copy, total_bytes / rates.bytes_per_s]
    )


class LinkCost:
    """The cost of both paths to one peer. Owned by one thread.

    Args:
        rates: of the engine on this link; None where it was not probed.
        pack_bytes_per_s: how fast the sender packs; None where that is not known.
        unpack_bytes_per_s: how fast the receiver unpacks; None where that is not known.
        round_trip_s: of a message on the side channel and its answer; None where that is not known.
        overlaps: chunks are packed while others are on their way; not so where one processor does both.
    """

    def __init__(
        self,
        rates: EngineRates | None = None,
        pack_bytes_per_s: float | None = None,
        unpack_bytes_per_s: float | None = None,
        round_trip_s: float | None = None,
        overlaps: bool = True,
    ) -> None:
        self._probed = rates is not None
        self._rates = _bounded(rates or DEFAULT_RATES)
        pack_bytes_per_s, unpack_bytes_per_s, round_trip_s = (
            value if _is_size(value) else None
            for value in (pack_bytes_per_s, unpack_bytes_per_s, round_trip_s)
        )
        pack, unpack = (
            _speed(speed or DEFAULT_PACK_BYTES_PER_S) for speed in (pack_bytes_per_s, unpack_bytes_per_s)
        )
        self._unpack_s = 1 / unpack
        # Seconds per byte of the stages of a chunk.
        wire = self._rates.bytes_per_s
        self._stages = (1 / pack, 1 / wire, 1 / unpack) if overlaps else (1 / pack + 1 / wire, 1 / unpack)
        message_s = _within(round_trip_s or DEFAULT_ROUND_TRIP_S, _LEAST_S, _MOST_S) / 2
        self._chunk_s = self._rates.seconds_per_batch + self._rates.seconds_per_copy + message_s
        engine = CALIBRATED if rates else ASSUMED
        chunk = CALIBRATED if rates and round_trip_s else ASSUMED
        stages = CALIBRATED if rates and pack_bytes_per_s and unpack_bytes_per_s else ASSUMED
        self._direct = LearnedTime((engine, engine, engine))
        self._packed = LearnedTime((chunk, stages, stages))
        self._chosen = 0
        self._chosen_s = 0.0
        self._tries = 0
        self._tried_at = 0
        self._tried_s = 0.0

    def predict_direct(self, copies: int, total_bytes: int) -> float:
        """Seconds of one batch of copies from page to page."""
        return self._direct.predict(_direct_terms(self._rates, copies, total_bytes))[0]

    def predict_packed(self, total_bytes: int, chunks: int) -> float:
        """Seconds of equal chunks, each packed, moved and unpacked while its neighbours are."""
        return self._packed.predict(self._packed_terms(total_bytes, chunks))[0]

    def choose(self, copies: int, direct_bytes: int, packed_bytes: int, chunks: int) -> Choice:
        """The path for a transfer that is made next: the cheaper one, and rarely the other for a try.

        ``copies`` and ``direct_bytes`` are what the direct path would move, ``chunks`` and ``packed_bytes``
        the packed one.
        """
        direct_s, direct_hoped_s = self._direct.predict(_direct_terms(self._rates, copies, direct_bytes))
        packed_s, packed_hoped_s = self._packed.predict(self._packed_terms(packed_bytes, chunks))
        if self._probed or (self._direct.observed and self._packed.observed):
            pack = packed_s < direct_s
        else:
            pack = copies >= PACKED_FROM_COPIES
        best_s, other_s = (packed_s, direct_s) if pack else (direct_s, packed_s)
        self._chosen += 1
        is_try = self._is_worth_a_try(best_s, other_s, direct_hoped_s if pack else packed_hoped_s)
        path: Path = "packed" if pack is not is_try else "direct"
        if is_try:
            self._tries += 1
            self._tried_at = self._chosen
            self._tried_s += max(0.0, other_s - best_s)
        self._chosen_s += other_s if is_try else best_s
        return Choice(path, direct_s, packed_s, is_try)

    def observe(self, path: str, copies: int, total_bytes: int, chunks: int, seconds: float) -> None:
        """Learn from a transfer that was made on this path, whether it was chosen or ordered.

        ``copies`` matter on the direct path, ``chunks`` on the packed one. Seconds that are no time, such as
        those of a clock that did not move, teach nothing.

        Raises:
            LocalError: there is no such path.
        """
        if path not in PATHS:
            raise LocalError(f"path is {path!r}; accepted: {', '.join(PATHS)}")
        if not _is_size(seconds):
            return
        seconds = _within(seconds, _LEAST_S, _MOST_S)
        self._direct.age()
        self._packed.age()
        if path == "direct":
            self._direct.correct(_direct_terms(self._rates, copies, total_bytes), seconds)
        else:
            self._packed.correct(self._packed_terms(total_bytes, chunks), seconds)

    def last_unpack_s(self, total_bytes: int, chunks: int) -> float:
        """Seconds in which the receiver unpacks the last chunk, which no clock of the sender sees."""
        return total_bytes / max(chunks, 1) * self._unpack_s

    def as_metrics(self) -> dict[str, float]:
        """What is believed of the link now, and how often each path was observed."""
        batch, copy, byte = self._direct.factors
        chunk, stream, ends = self._packed.factors
        slowest = max(self._stages)
        return {
            "direct_batch_s": self._rates.seconds_per_batch * batch,
            "direct_copy_s": self._rates.seconds_per_copy * copy,
            "direct_bytes_per_s": self._rates.bytes_per_s / byte,
            "packed_chunk_s": self._chunk_s * chunk,
            "packed_bytes_per_s": 1 / (slowest * stream),
            "packed_ends_bytes_per_s": 1 / ((sum(self._stages) - slowest) * ends),
            "direct_transfers": self._direct.observed,
            "packed_transfers": self._packed.observed,
            "tries": self._tries,
        }

    def describe(self) -> str:
        """One line for a log."""
        known = self.as_metrics()
        return (
            f"direct {known['direct_batch_s'] * 1e6:.3g} us + {known['direct_copy_s'] * 1e6:.3g} us a copy "
            f"+ bytes at {known['direct_bytes_per_s'] / 1e9:.3g} GB/s "
            f"({known['direct_transfers']} observed); "
            f"packed {known['packed_chunk_s'] * 1e6:.3g} us a chunk "
            f"+ bytes at {known['packed_bytes_per_s'] / 1e9:.3g} GB/s "
            f"+ one chunk at {known['packed_ends_bytes_per_s'] / 1e9:.3g} GB/s "
            f"({known['packed_transfers']} observed); {known['tries']} tries"
        )

    def _packed_terms(self, total_bytes: int, chunks: int) -> Vector:
        """Seconds that grow with the number of chunks, with all bytes, and with the bytes of one chunk.

        The first chunk goes through all stages; the others follow at the pace of the slowest.
        """
        chunks, total_bytes = max(chunks, 1), min(max(total_bytes, 0), _MOST_COUNT)
        slowest = max(self._stages)
        others = sum(self._stages) - slowest
        return np.array([chunks * self._chunk_s, total_bytes * slowest, total_bytes / chunks * others])

    def _is_worth_a_try(self, best_s: float, other_s: float, hoped_s: float) -> bool:
        """It may well be better, the last try was some time ago, and tries have not cost too much."""
        if self._chosen - self._tried_at < TRY_EVERY:
            return False
        allowed_s = self._chosen_s * (TRY_SHARE + 1 / self._chosen)
        return hoped_s < best_s and self._tried_s + max(0.0, other_s - best_s) <= allowed_s

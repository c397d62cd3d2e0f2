"""What a transfer takes on either path by the rates of a calibration, and which path is cheaper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Path = Literal["direct", "packed"]

PACKED_FROM_COPIES = 128
"""Where nothing was measured, so many copies are packed: about what a round trip and two launches cost."""

_LEAST_S, _MOST_S = 1e-9, 1e6
_LEAST_BYTES_PER_S, _MOST_BYTES_PER_S = 1e4, 1e14
# Of a fit, as standard deviations of logarithms: a probe's noise, and how far a rate may be from its default.
_NOISE, _UNKNOWN = 0.1, 4.0
_FIT_ROUNDS, _LEAST_STEP = 60, 1e-6
_MOST_LOG = 40.0


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


DEFAULT_RATES = EngineRates(seconds_per_batch=100e-6, seconds_per_copy=3e-6, bytes_per_s=10e9)
DEFAULT_PACK_BYTES_PER_S = 100e9
DEFAULT_ROUND_TRIP_S = 400e-6


def fit(samples: Sequence[Sample]) -> EngineRates:
    """The rates that explain these probes best; what they do not show stays near the defaults.

    Probes separate the three rates if some are one small copy, some many small copies and some few large
    ones. Several of one shape count as their median; what cannot be a measurement is left out.
    """
    shapes: dict[tuple[int, int], list[float]] = {}
    for copies, total_bytes, seconds in samples:
        if copies > 0 and total_bytes > 0 and 0 < seconds < math.inf:
            shapes.setdefault((copies, total_bytes), []).append(_within(seconds, _LEAST_S, _MOST_S))
    if not shapes:
        return DEFAULT_RATES
    terms = np.array([_direct_terms(DEFAULT_RATES, *shape) for shape in shapes])
    batch, copy, byte = _fit_factors(terms, np.log([float(np.median(times)) for times in shapes.values()]))
    return EngineRates(
        _within(DEFAULT_RATES.seconds_per_batch * batch, _LEAST_S, _MOST_S),
        _within(DEFAULT_RATES.seconds_per_copy * copy, _LEAST_S, _MOST_S),
        _within(DEFAULT_RATES.bytes_per_s / byte, _LEAST_BYTES_PER_S, _MOST_BYTES_PER_S),
    )


def _fit_factors(terms: NDArray[np.float64], measured: NDArray[np.float64]) -> list[float]:
    """The factors of each probe's terms that explain the logarithms of its seconds best.

    In logarithms, since rates are positive and known to a factor at best.
    """
    logs = np.zeros(terms.shape[1])
    for _ in range(_FIT_ROUNDS):
        # A Gauss-Newton step to the likeliest factors, with little weight on probes that are far off.
        parts = terms * np.exp(logs)
        predicted = parts.sum(axis=1)
        shares = parts / predicted[:, None]
        surprise = measured - np.log(predicted)
        weight = 1 / np.maximum(1.0, np.abs(surprise) / (2 * _NOISE)) / _NOISE**2
        curvature = (shares * weight[:, None]).T @ shares + np.eye(len(logs)) / _UNKNOWN**2
        slope = shares.T @ (weight * surprise) - logs / _UNKNOWN**2
        step = np.linalg.solve(curvature, slope)
        logs = np.clip(logs + np.clip(step, -1.0, 1.0), -_MOST_LOG, _MOST_LOG)
        if np.abs(step).max() < _LEAST_STEP:
            break
    factors: list[float] = np.exp(logs).tolist()
    return factors


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _direct_terms(rates: EngineRates, copies: int, total_bytes: int) -> tuple[float, float, float]:
    """Seconds of a batch, of its copies, of its bytes."""
    return rates.seconds_per_batch, copies * rates.seconds_per_copy, total_bytes / rates.bytes_per_s


class LinkCost:
    """The cost of both paths to one peer; what is not known is None. Never changes.

    ``round_trip_s`` is that of a message on the side channel and its answer. ``overlaps``: chunks are packed
    while others are on their way; not so where one processor does both.
    """

    def __init__(
        self,
        rates: EngineRates | None = None,
        pack_bytes_per_s: float | None = None,
        unpack_bytes_per_s: float | None = None,
        round_trip_s: float | None = None,
        overlaps: bool = True,
    ) -> None:
        self.is_calibrated = rates is not None
        self._rates = rates or DEFAULT_RATES
        pack = pack_bytes_per_s or DEFAULT_PACK_BYTES_PER_S
        unpack = unpack_bytes_per_s or DEFAULT_PACK_BYTES_PER_S
        # Seconds per byte of the stages of a chunk.
        wire = self._rates.bytes_per_s
        stages = (1 / pack, 1 / wire, 1 / unpack) if overlaps else (1 / pack + 1 / wire, 1 / unpack)
        self._slowest_s = max(stages)
        self._others_s = sum(stages) - self._slowest_s
        message_s = (round_trip_s or DEFAULT_ROUND_TRIP_S) / 2
        self._chunk_s = self._rates.seconds_per_batch + self._rates.seconds_per_copy + message_s

    def predict_direct(self, copies: int, total_bytes: int) -> float:
        """Seconds of one batch of copies from page to page."""
        return sum(_direct_terms(self._rates, copies, total_bytes))

    def predict_packed(self, total_bytes: int, chunks: int) -> float:
        """Seconds of equal chunks, each packed, moved and unpacked while its neighbours are.

        The first chunk goes through all stages; the others follow at the pace of the slowest.
        """
        chunks = max(chunks, 1)
        return chunks * self._chunk_s + total_bytes * self._slowest_s + total_bytes / chunks * self._others_s

    def choose(self, copies: int, direct_bytes: int, packed_bytes: int, chunks: int) -> Path:
        """The path that is cheaper for what either would move."""
        pack = copies >= PACKED_FROM_COPIES
        if self.is_calibrated:
            pack = self.predict_packed(packed_bytes, chunks) < self.predict_direct(copies, direct_bytes)
        return "packed" if pack else "direct"

    def as_metrics(self) -> dict[str, float]:
        return {
            "direct_batch_s": self._rates.seconds_per_batch,
            "direct_copy_s": self._rates.seconds_per_copy,
            "direct_bytes_per_s": self._rates.bytes_per_s,
            "packed_chunk_s": self._chunk_s,
            "packed_bytes_per_s": 1 / self._slowest_s,
            "packed_ends_bytes_per_s": 1 / self._others_s,
        }

    def describe(self) -> str:
        """One line for a log."""
        known = self.as_metrics()
        return (
            f"direct {known['direct_batch_s'] * 1e6:.3g} us + {known['direct_copy_s'] * 1e6:.3g} us a copy "
            f"+ bytes at {known['direct_bytes_per_s'] / 1e9:.3g} GB/s; "
            f"packed {known['packed_chunk_s'] * 1e6:.3g} us a chunk "
            f"+ bytes at {known['packed_bytes_per_s'] / 1e9:.3g} GB/s "
            f"+ one chunk at {known['packed_ends_bytes_per_s'] / 1e9:.3g} GB/s"
        )

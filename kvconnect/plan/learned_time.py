"""Times that are sums of terms of known shape and uncertain size, and how measurements settle the sizes.

Everything is in logarithms, since sizes are positive and known to a factor at best: a size is what was
assumed, times a factor. Uncertainties are standard deviations of such logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

CALIBRATED = 0.6
"""The uncertainty of a size that was measured once, under conditions that may have been others."""

ASSUMED = 1.2
"""The uncertainty of a size that was not measured."""

# The deviations of a transfer and of a probe from what is typical, and the most that is ever admitted not
# to be known.
_NOISE = 0.25
_PROBE_NOISE = 0.1
_MOST_UNKNOWN = 4.0
# By so much, as the square of a deviation, a size may change from one transfer to the next.
_DRIFT = 5e-4
# What lies further off is an accident where it was measured, and out of reach where it is hoped for.
_MOST_DEVIATIONS = 2.0
# So many accidents of one kind in a row are news.
_NEWS = 3
_FIT_ROUNDS = 60
_MOST_LOG = 40.0


class LearnedTime:
    """What a kind of transfer takes: terms, each times a factor that measurements correct.

    ``deviations`` say how uncertain the terms are at the start. ``observed`` counts measurements.
    """

    def __init__(self, deviations: Sequence[float]) -> None:
        self.observed = 0
        self._doubts = 0
        self._logs = np.zeros(len(deviations))
        self._variance = np.diag(np.square(deviations))

    @property
    def factors(self) -> list[float]:
        """What the terms are multiplied by."""
        factors: list[float] = np.exp(self._logs).tolist()
        return factors

    def predict(self, terms: Vector) -> tuple[float, float]:
        """The most likely seconds, and the least that can be hoped for."""
        seconds, shares = self._shares(terms)
        deviation = math.sqrt(max(0.0, float(shares @ self._variance @ shares)))
        return seconds, seconds * math.exp(-_MOST_DEVIATIONS * deviation)

    def correct(self, terms: Vector, seconds: float) -> None:
        """Take a measurement into account: every factor moves by its share and its uncertainty."""
        predicted, shares = self._shares(terms)
        surprise, most = math.log(seconds / predicted), self._most_surprise(shares)
        certainty = 1.0
        if abs(surprise) <= most:
            self._doubts = 0
        else:
            self._doubts = max(1, self._doubts + 1) if surprise > 0 else min(-1, self._doubts - 1)
            if abs(self._doubts) < _NEWS:
                # An accident, the less to be believed the greater it is; but nothing is more certain now.
                surprise = most**2 / surprise
                certainty = -1.0
            else:
                # Much of what was known holds no longer.
                self._variance = self._variance + np.eye(len(terms)) * CALIBRATED**2
                most = self._most_surprise(shares)
                certainty = 1.0 if abs(surprise) <= most else 0.0
                surprise = min(max(surprise, -most), most)
        lever = self._variance @ shares
        spread = float(shares @ lever) + _NOISE**2
        self._logs = np.clip(self._logs + lever * (surprise / spread), -_MOST_LOG, _MOST_LOG)
        self._variance = self._variance - np.outer(lever, lever) * (certainty / spread)
        self.observed += 1

    def age(self) -> None:
        """A transfer went by, of this kind or another: what was known may have changed a little."""
        self._variance = self._variance + np.eye(len(self._logs)) * _DRIFT
        excess = np.sqrt(np.maximum(1.0, np.diag(self._variance) / _MOST_UNKNOWN**2))
        self._variance = self._variance / np.outer(excess, excess)

    def _most_surprise(self, shares: Vector) -> float:
        return _MOST_DEVIATIONS * math.sqrt(float(shares @ self._variance @ shares) + _NOISE**2)

    def _shares(self, terms: Vector) -> tuple[float, Vector]:
        parts = terms * np.exp(self._logs)
        seconds = float(parts.sum())
        return seconds, parts / seconds


def fit_factors(terms: Vector, seconds: Vector) -> list[float]:
    """The factors of terms that explain probes best, 1 where these say nothing of them.

    ``terms`` has a row for every probe and is positive, as are ``seconds``.
    """
    measured = np.log(seconds)
    logs = np.zeros(terms.shape[1])
    for _ in range(_FIT_ROUNDS):
        # A Gauss-Newton step to the likeliest factors, with little weight on probes that are far off.
        parts = terms * np.exp(logs)
        predicted = parts.sum(axis=1)
        shares = parts / predicted[:, None]
        surprise = measured - np.log(predicted)
        weight = 1 / np.maximum(1.0, np.abs(surprise) / (_MOST_DEVIATIONS * _PROBE_NOISE)) / _PROBE_NOISE**2
        curvature = (shares * weight[:, None]).T @ shares + np.eye(len(logs)) / _MOST_UNKNOWN**2
        slope = shares.T @ (weight * surprise) - logs / _MOST_UNKNOWN**2
        step = np.linalg.solve(curvature, slope)
        logs = np.clip(logs + np.clip(step, -1.0, 1.0), -_MOST_LOG, _MOST_LOG)
    factors: list[float] = np.exp(logs).tolist()
    return factors

"""Whether chunks to one peer are coded (``pack/exponent_code.py``). Owned by the transfer thread."""

from __future__ import annotations

import logging

from kvconnect.metrics import Metrics
from kvconnect.pack.exponent_code import ExponentCoder

logger = logging.getLogger(__name__)

_MOST_FAILURES = 8
"""Consecutive chunks that cannot be coded before no more are tried: the cache is not of bfloat16."""


class ExponentCoding:
    """The choice for one peer, which decodes.

    Args:
        always: whether chunks are coded over a link of any rate.
        who: the peer for people.
    """

    def __init__(self, coder: ExponentCoder, always: bool, who: str, metrics: Metrics) -> None:
        self.coder, self._always, self._who, self._metrics = coder, always, who, metrics
        self._failures = 0
        self._is_logged = False

    def is_on(self, bytes_per_s: float) -> bool:
        """Whether chunks are to be coded over a link of this rate, 0 if that is unknown."""
        pays = self._always or (bytes_per_s > 0 and self.coder.pays_below(bytes_per_s))
        is_on = pays and not self.has_given_up
        if is_on and not self._is_logged:
            self._is_logged = True
            logger.info(
                "KV to %s travels with coded exponents: the link moves %.1f GB/s, coding and decoding %.1f",
                self._who,
                bytes_per_s / 1e9,
                self.coder.bytes_per_s / 1e9,
            )
        return is_on

    @property
    def has_given_up(self) -> bool:
        """No more chunks are coded: those before could not be."""
        return self._failures >= _MOST_FAILURES

    def ended(self, has_failed: bool) -> None:
        """A chunk was coded, or could not be and is packed again as it is."""
        if has_failed:
            self._metrics.failures.labels("exponents").inc()
        if self.has_given_up:
            # The last of those that were under way.
            return
        self._failures = self._failures + 1 if has_failed else 0
        if self.has_given_up:
            logger.warning(
                "KV to %s travels as it is: %d chunks in a row have values that exponent_coding cannot code; "
                "set it to off for this model",
                self._who,
                _MOST_FAILURES,
            )

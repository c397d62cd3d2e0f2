"""Whether requests that ask for KV get any: a minute in which none did is warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

WINDOW_S = 60.0


class FetchOutcomes:
    """Requests that asked for KV in the current minute: those that got it, and those that did not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = clock()
        self._got = self._missed = 0

    def got(self) -> None:
        """The KV of a request arrived."""
        self._judge()
        self._got += 1

    def missed(self) -> None:
        """A request is computed here, or fails, though it asked for KV."""
        self._judge()
        self._missed += 1

    def _judge(self) -> None:
        now = self._clock()
        if now - self._began_at < WINDOW_S:
            return
        if self._missed and not self._got:
            logger.warning(
                "none of the %d requests that asked for KV within a minute got it: their prompts were "
                "computed here, or they failed; kvconnect_failures counts the reasons",
                self._missed,
            )
        self._began_at, self._got, self._missed = now, 0, 0

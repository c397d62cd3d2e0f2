"""Informs the scheduler half that vLLM pauses: vLLM has no hook for that, and waits for all held requests.

Before vLLM sleeps it takes no new request and waits until no request holds blocks; only then it calls the
workers. A request that is held for a decode node would delay that until its lease is over. Imports no vLLM.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

_WAITS_FOR_BLOCKS = "PAUSED_NEW"
"""vLLM's name of the state in which it waits; in its other pauses, requests keep their blocks."""


@functools.cache
def follow_pauses() -> None:
    """Have vLLM's scheduler call ``_paused`` of its connectors as its pause state changes. Once per process.

    The method has no public name: those are vLLM's hooks.

    To be called in the scheduler's process, which has vLLM's module by then.
    """
    scheduler = getattr(sys.modules.get("vllm.v1.core.sched.scheduler"), "Scheduler", None)
    set_state: Any = getattr(scheduler, "set_pause_state", None)
    if scheduler is None or set_state is None:
        logger.debug("this vLLM has no pause state: requests stay held until their leases are over")
        return

    @functools.wraps(set_state)
    def set_and_inform(self: Any, pause_state: Any, *arguments: Any, **more: Any) -> Any:
        result = set_state(self, pause_state, *arguments, **more)
        # A MultiConnector has several.
        for connector in getattr(self.connector, "_connectors", (self.connector,)):
            if (inform := getattr(connector, "_paused", None)) is not None:
                inform(is_paused=pause_state.name == _WAITS_FOR_BLOCKS)
        return result

    scheduler.set_pause_state = set_and_inform

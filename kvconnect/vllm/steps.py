"""What vLLM's scheduler has asked of its workers, told to the scheduler half one step later.

By then it has been launched: a connector's part of a step is handed out beside the step, not after it,
and a new request may find blocks in the prefix cache that another one computes in the same step.
Imports no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import Any

from kvconnect.scheduler.connector import SchedulerConnector

logger = logging.getLogger(__name__)

_Scheduled = tuple[int, Sequence[Sequence[int]] | None, bool]
"""Tokens after the step, new blocks, and whether these are all that the request has."""


class Steps:
    """The step before this one, as far as it is of interest: requests whose KV is sent while they run."""

    def __init__(self) -> None:
        self._scheduled: dict[str, _Scheduled] = {}
        self._refusal = ""

    def tell(self, half: SchedulerConnector, scheduler_output: Any) -> None:
        """A step was scheduled: what was scheduled before it is told, unless it lost its blocks."""
        streaming = half.streaming
        if not streaming or self._refusal:
            return
        try:
            preempted = list(scheduler_output.preempted_req_ids or ())
            scheduled = _read(scheduler_output, streaming)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            # What a scheduler tells is no stable interface, and must not end a server.
            self._refusal = f"{type(error).__name__}: {error}"
            logger.warning(
                "this vLLM's scheduler output cannot be read (%s): prompts are sent once they are computed",
                self._refusal,
            )
            for request_id in list(streaming):
                half.preempted(request_id)
            return
        for request_id in preempted:
            self._scheduled.pop(request_id, None)
            half.preempted(request_id)
        for request_id, (num_tokens, block_ids, is_anew) in self._scheduled.items():
            if is_anew:
                half.preempted(request_id)
            half.progress(request_id, num_tokens, block_ids)
        self._scheduled = scheduled

    def forget(self, request_id: str) -> None:
        """A request ended. Another one may have its id."""
        self._scheduled.pop(request_id, None)


def _read(scheduler_output: Any, wanted: Container[str]) -> dict[str, _Scheduled]:
    counts = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    scheduled: dict[str, _Scheduled] = {
        new.req_id: (new.num_computed_tokens + counts[new.req_id], new.block_ids, True)
        for new in scheduler_output.scheduled_new_reqs
        if new.req_id in wanted
    }
    for index, request_id in enumerate(cached.req_ids):
        if request_id in wanted:
            scheduled[request_id] = (
                cached.num_computed_tokens[index] + counts[request_id],
                cached.new_block_ids[index],
                request_id in cached.resumed_req_ids,
            )
    return scheduled

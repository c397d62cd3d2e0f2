"""Which blocks vLLM's steps have filled, told to the scheduler half one step later.

By then the step was launched: what is stored of it is read before the next one begins. Told are only the
requests that got blocks, and those that are due, having filled one: of most requests that are being decoded
there is nothing to tell in most steps. Imports no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

BlockIds = Sequence[Sequence[int]]


class Keeper(Protocol):
    """What is told, in the terms of the scheduler half."""

    @property
    def due(self) -> Mapping[str, int]:
        """The tokens at which a request has filled a block, for which it is to be told without new ones."""
        ...

    def computed(self, request_id: str, num_computed_tokens: int, new_block_ids: BlockIds | None) -> None:
        """So many tokens of a request are computed; it got these blocks, by group and position."""
        ...

    def state_at(self, request_id: str, group: int, num_tokens: int, block_id: int, *, chosen: bool) -> None:
        """A block holds the state of a request after so many tokens, which vLLM chose."""
        ...

    def preempted(self, request_id: str) -> None:
        """A request lost its blocks."""
        ...

    def overwritten(self, block_ids: Collection[int]) -> None:
        """These blocks are not to be read any more when the next orders are carried out."""
        ...


class _Step(NamedTuple):
    num_tokens: int
    new_block_ids: BlockIds | None


class FilledBlocks:
    """The step before this one, for all requests.

    Args:
        is_told: by cache group, whether its blocks are told by their position; not those of states.
        is_zeroed_first: the worker overwrites new blocks before it carries out a step's orders.
    """

    def __init__(self, is_told: Sequence[bool], *, is_zeroed_first: bool) -> None:
        self._is_told = tuple(is_told)
        self._is_zeroed_first = is_zeroed_first
        self._requests: dict[str, Any] = {}
        # Requests of which blocks were told.
        self._known: set[str] = set()
        self._scheduled: dict[str, _Step] = {}
        self._states: dict[str, list[tuple[int, int, int]]] = {}
        self.refusal = ""

    def __len__(self) -> int:
        """Requests that are remembered."""
        return len(self._requests)

    def begin(self, request: Any) -> None:
        """A request arrived. vLLM's own object: it is read whenever something is told of it."""
        self._requests[request.request_id] = request

    def admitted(self, request_id: str) -> None:
        """A request gets a new table of blocks. What it did before it was preempted is of its old one.

        vLLM preempts and admits a request within one ``schedule`` when its caches are reset under load.
        """
        self._forget(request_id)

    def end(self, half: Keeper, request_id: str) -> None:
        """A request ends, and its blocks are about to be freed: what is left of it is told now."""
        if request_id in self._scheduled or request_id in self._states:
            self._tell(half, request_id)
        request = self._requests.pop(request_id, None)
        if request is not None and request_id in self._known:
            half.computed(request_id, _certain(request, request.num_computed_tokens), None)
        self._forget(request_id)

    def tell(self, half: Keeper, scheduler_output: Any) -> None:
        """A step was scheduled: what was scheduled before it is told."""
        if self.refusal:
            return
        for request_id in list(self._scheduled.keys() | self._states.keys()):
            self._tell(half, request_id)
        try:
            preempted = list(scheduler_output.preempted_req_ids or ())
            scheduled = _read(scheduler_output, half.due)
            states = _read_states(scheduler_output)
            overwritten = _read_overwritten(scheduler_output) if self._is_zeroed_first else ()
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            # What a scheduler tells is no stable interface, and must not end a server.
            self.refusal = f"{type(error).__name__}: {error}"
            logger.warning(
                "this vLLM's scheduler output cannot be read (%s): no more blocks are kept", self.refusal
            )
            preempted, scheduled, states, overwritten = list(self._requests), {}, {}, ()
        for request_id in preempted:
            self._forget(request_id)
            half.preempted(request_id)
        self._scheduled.update(scheduled)
        self._states.update(states)
        if overwritten:
            half.overwritten(overwritten)

    def _tell(self, half: Keeper, request_id: str) -> None:
        """Pass on what the last step did for a request."""
        step, states = self._scheduled.pop(request_id, None), self._states.pop(request_id, ())
        request = self._requests.get(request_id)
        if request is None:
            return
        for group, block_id, num_tokens in states:
            if block_id:
                half.state_at(request_id, group, num_tokens, block_id, chosen=True)
        if step is None:
            return
        new_block_ids = None
        if step.new_block_ids is not None:
            self._known.add(request_id)
            new_block_ids = [
                ids if is_told else () for ids, is_told in zip(step.new_block_ids, self._is_told, strict=True)
            ]
        half.computed(request_id, _certain(request, step.num_tokens), new_block_ids)

    def _forget(self, request_id: str) -> None:
        self._scheduled.pop(request_id, None)
        self._states.pop(request_id, None)
        self._known.discard(request_id)


def _read(scheduler_output: Any, due: Mapping[str, int]) -> dict[str, _Step]:
    counts = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    scheduled = {
        new.req_id: _Step(new.num_computed_tokens + counts[new.req_id], new.block_ids)
        for new in scheduler_output.scheduled_new_reqs
    }
    for request_id, computed, new_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        num_tokens = computed + counts[request_id]
        if new_ids is not None or num_tokens >= due.get(request_id, 0):
            scheduled[request_id] = _Step(num_tokens, new_ids)
    return scheduled


def _certain(request: Any, num_computed_tokens: int) -> int:
    """The tokens of a request whose KV is what it will always be.

    Of what a draft model guessed, only what came true is part of the request, and the last token of all is
    computed by the next step.
    """
    known = max(request.num_prompt_tokens, request.num_tokens - 1)
    return min(num_computed_tokens, int(known))


def _read_states(scheduler_output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """States that this step leaves in blocks of their own: by request, group, block, and tokens."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    handed_off: Mapping[str, Any] = (state and state.boundary_state_offloads) or {}
    return {
        request_id: [(int(group), int(block_id), int(num_tokens)) for group, block_id, num_tokens in entries]
        for request_id, entries in handed_off.items()
    }


def _read_overwritten(scheduler_output: Any) -> set[int]:
    copies = getattr(scheduler_output, "kv_cache_block_copies", None) or ()
    return {*(scheduler_output.new_block_ids_to_zero or ()), *(copy.dst_block_id for copy in copies)}

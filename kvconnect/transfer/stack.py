"""The contract of a serving stack and the connector: what a stack calls, in which order, and what it reports.

A stack has a request scheduler, and workers, one a rank, that hold its tensors. ``SchedulerHalf`` lives
beside the scheduler and ``WorkerHalf`` beside each worker, both in ``kvconnect.halves``. Of a request:

    new_request, matched_tokens (each time it may be admitted), update_after_alloc (it was),
    launched (steps that computed some of it), preempted (it begins anew, with matched_tokens),
    request_finished

and of a step, in this order:

    scheduler   update_results     what all ranks have reported
                launched           the steps that the device was given since these orders were built last
                build_orders       once for each step, one without tokens too
    each rank   before_step        before the kernels of the step that the orders come with are launched
                after_zeroing      once those are launched that zero its blocks
                results            taken with every step, and whenever ``on_results`` wakes the stack

Blocks are named by cache group and position. What a block id means in one group does not hold in another:
groups may share a pool, or have pools of their own. A stack with a scheduler in every rank makes a scheduler
half in each, and gives it its own engine id; no hook waits for anything but ``drain``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvconnect.cache.identity import Naming
from kvconnect.plan.blocks import BlockIdsByGroup


class RequestView(Protocol):
    """What the scheduler half reads of a serving stack's request. It never changes one.

    ``request_id`` is unique among the requests that this node holds, ``num_tokens`` counts prompt and answer,
    and ``kv_transfer_params`` came with the request.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


PromptDigest = Callable[[Any, int], bytes | None]
"""The digest of a request's first so many tokens. None for a request that stands for another one, without its
tokens, and ends at once. Raises nothing, for any input of a client."""


Names = Callable[[Any, int], Sequence[bytes]]
"""The names of a request's first tokens, one for every so many: see ``Prefix``. Raises nothing."""


class LongestRequest(NamedTuple):
    """The most that a stack gives one request room for; a step's tokens are kept beside a window."""

    num_tokens: int
    step_tokens: int


@dataclass(frozen=True)
class StackTraits:
    """What a serving stack states of itself, once.

    ``held_back`` are tokens at the end of a prompt that P must not compute and D always computes itself;
    caches with recurrent state need 1 in any case. ``parent_of`` is what the ids of requests that were made
    of one have in common. ``batch_of`` is the same of prompts of one batch, and a prompt's number, from 0; an
    empty name for no batch. For ``longest`` see ``EarlyLoads``; None where the stack has no bound. ``names``
    are those of a request, made as ``naming`` has it, but each of so many tokens; none where that cannot be.
    """

    held_back: int = 0
    parent_of: Callable[[str], str] = str
    batch_of: Callable[[str], tuple[str, int]] | None = None
    # Of a stack that does not state what its tokens are all prompts of a length count as one.
    prompt_digest: PromptDigest = lambda request, num_tokens: b""
    # The machine's monotonic one; without it nothing is recorded for the timeline.
    clock: Callable[[], float] | None = None
    longest: LongestRequest | None = None
    # ``Identity.marks`` of its workers; empty for a stack that does not state what its KV depends on.
    identity_marks: bytes = b""
    naming: Naming | None = None
    names: Names | None = None
    # Blocks that are loaded are zeroed after ``before_step`` of the load's step.
    zeroes_loads: bool = False


class Computed(NamedTuple):
    """What the device was given makes so many tokens of a request.

    ``new_block_ids`` are the blocks since its admission, those included, or since its last reported step;
    None for no new ones.
    """

    request_id: str
    num_tokens: int
    new_block_ids: BlockIdsByGroup | None


class StateBlock(NamedTuple):
    """Until the next orders are carried out a block holds a group's state after exactly so many tokens.

    ``is_chosen``: the stack keeps states at counts of its own choice, and this is one.
    """

    request_id: str
    group: int
    num_tokens: int
    block_id: int
    is_chosen: bool = False


class Step(NamedTuple):
    """What one step, or several, computed. See ``SchedulerHalf.due`` for what may be left out."""

    computed: Sequence[Computed] = ()
    states: Sequence[StateBlock] = ()

"""The contract of a serving stack and the connector: the hooks that a stack calls, and their sequence.

A stack has a request scheduler, and one worker per rank, which holds the rank's tensors. ``SchedulerHalf``
runs beside the scheduler and ``WorkerHalf`` beside each worker, both in ``kvconnect.halves``. Per request:

    new_request, prefill_tokens (of ``notices`` too), matched_tokens (before each try to admit it, and
    settle_notice after it for ``notices``), update_after_alloc (it was admitted),
    launched (steps that computed some of it), preempted (it begins anew, with matched_tokens),
    request_finished

and per step, in this sequence:

    scheduler   update_results     the results of all ranks
                launched           the steps given to the device since orders were last built
                build_orders       once for each step, also for one without tokens
    each rank   before_step        before the kernels of these orders' step are launched
                after_zeroing      once the kernels that zero the step's blocks are launched
                results            with every step, and whenever ``on_results`` wakes the stack

``SchedulerHalf`` has further hooks for stacks that keep KV in tiers or sleep: ``checkpoints``,
``overwritten``, ``reset``, ``pause``, ``take_events``, ``pending``, ``due``.

Blocks are named by cache group and position. A block id has a meaning only within its group: groups may share
a pool, or have pools of their own. A stack with a scheduler in every rank makes a scheduler half in each,
with its own engine id. No hook waits, except a worker's ``drain``.

A stack whose requests have one name on both nodes, and whose ranks each schedule them alike, needs no
scheduler half: every rank writes the orders of its requests itself (``OrdersDraft``), numbered by when it
gives them to ``before_step``. There the handle is that of a transfer id. P orders ``expected``, ``progress``
as parts are complete, and a ``Hold``, D a ``Load``. ``RankTraits.reports_fetches`` states when P may begin,
and ``WorkerHalf.revoke`` that blocks are freed while they may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from kvconnect.cache.identity import Identity, Naming
from kvconnect.cache.region_table import CacheTensor, RegionTable, Scales
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.plan.blocks import BlockIdsByGroup
from kvconnect.runner_kit.kernel_blocks import sync_block_size


class RequestView(Protocol):
    """The fields of a serving stack's request that the scheduler half reads; it changes none.

    ``request_id`` is unique among the requests on this node, ``num_tokens`` counts prompt and answer, and
    ``kv_transfer_params`` came with the request.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


PromptDigest = Callable[[Any, int], bytes | None]
"""The digest of a request's first tokens, as many as given. None for a request that stands for another one,
without its tokens, and ends at once. Raises nothing, for any input of a client."""


Names = Callable[[Any, int], Sequence[bytes]]
"""The names of a request's tokens, one per given number of tokens: see ``Prefix``. Raises nothing."""


class PrefixPool(Protocol):
    """A stack's prefix cache, for peers that fetch its blocks by name. Called by the thread of the hooks."""

    def watch(self, group: int, hashes: Sequence[bytes]) -> Sequence[int]:
        """For each content of a cache group the block that later requests may reuse, 0 for none.

        These blocks are watched from now on. The device was given what they hold.
        """
        ...

    def take_reused(self) -> Sequence[int]:
        """The watched blocks that the stack gave to other contents since the last call."""
        ...

    def refresh(self, block_ids: Sequence[int]) -> None:
        """Have the stack give away these blocks after all others that are free."""
        ...


class LongestRequest(NamedTuple):
    """The most tokens that a stack allows one request; ``step_tokens`` are kept beside a window."""

    num_tokens: int
    step_tokens: int


@dataclass(frozen=True)
class StackTraits:
    """The properties that a serving stack states, once.

    ``held_back``: tokens at the end of a prompt that P must not compute and D computes; at least 1 for caches
    with recurrent state. ``parent_of``: the common id of requests that were made of one. ``batch_of``: the
    common id of the prompts of a batch, empty for none, and the prompt's number, from 0. ``longest``: see
    ``EarlyLoads``; None without a bound. ``names``: a request's names, made as in ``naming`` but for any
    number of tokens; none where impossible.
    """

    held_back: int = 0
    parent_of: Callable[[str], str] = str
    batch_of: Callable[[str], tuple[str, int]] | None = None
    # Without digests, all prompts of one length count as one.
    prompt_digest: PromptDigest = lambda request, num_tokens: b""
    # The machine's monotonic clock; without it the timeline gets no record.
    clock: Callable[[], float] | None = None
    longest: LongestRequest | None = None
    # What this node's KV depends on; empty if the stack does not state it.
    identity: Callable[[], Identity] = Identity
    naming: Naming | None = None
    names: Names | None = None
    # The tokens of a request's prompt in the device's own cache at its admission, where the stack counts
    # others than it names before.
    cached_tokens: Callable[[Any], int] | None = None
    # The stack zeroes blocks to be loaded after ``before_step`` of the load's step.
    zeroes_loads: bool = False


class Computed(NamedTuple):
    """A request has ``num_tokens`` computed once the device has finished what it was given.

    ``new_block_ids``: by group, the blocks since its admission, inclusive, or its last reported step; None:
    none.
    """

    request_id: str
    num_tokens: int
    new_block_ids: BlockIdsByGroup | None


class StateBlock(NamedTuple):
    """A block that holds a group's state after exactly ``num_tokens``, until the next orders are carried out.

    ``is_chosen``: the stack keeps states at token counts of its own choice, and this is one.
    """

    request_id: str
    group: int
    num_tokens: int
    block_id: int
    is_chosen: bool = False


class Step(NamedTuple):
    """What one or several steps computed; see ``SchedulerHalf.due`` for requests that may be left out."""

    computed: Sequence[Computed] = ()
    states: Sequence[StateBlock] = ()


@dataclass(frozen=True)
class RankCache:
    """The caches of one rank, ready to be registered.

    ``kernel_block_sizes``: tokens by cache group. ``heads``: which of the model's heads a layer's tensor
    holds on this rank. ``scales``: the factors of quantised values of K and of V.
    """

    config: KVCacheConfig
    kernel_block_sizes: Mapping[int, int]
    tensors: Mapping[str, CacheTensor]
    heads: Mapping[str, HeadInterval] | None = None
    scales: Mapping[str, Scales] | None = None

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).tensor.device

    def table(self) -> RegionTable:
        """The region table, in kernel blocks, as is everything that is built from it.

        Raises ``ConfigError``: a kernel block is larger than a group's block; ``LayoutError``: a cache cannot
        be expressed.
        """
        sizes = {
            group: sync_block_size(self.config.groups[group].block_size, kernel)
            for group, kernel in self.kernel_block_sizes.items()
        }
        return RegionTable.build(self.config, sizes, self.tensors, self.heads, self.scales)

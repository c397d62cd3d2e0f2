"""What a simulated node that keeps KV in host memory states of itself, and its scheduler half for that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvconnect.cache.identity import Naming
from kvconnect.halves.building import KeptBlocks
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.transfer.stack import LongestRequest, StackTraits
from tests.simulator.content import names_of
from tests.simulator.pledges import WatchedOffload
from tests.simulator.tiers import make_requirements

_MANY_TOKENS = 1 << 20

if TYPE_CHECKING:
    from tests.simulator.node import SimNode
    from tests.simulator.request import Request
    from tests.simulator.scenario import KeepPlan


def naming_of(keeps: KeepPlan | None) -> Naming | None:
    """How a node names KV; None for not at all."""
    return None if keeps is None else Naming(f"simulated {keeps.hashing}", keeps.name_tokens)


def traits_of(node: SimNode) -> StackTraits:
    """What the stack of a node states of itself."""
    plan = node.plan
    longest = LongestRequest(plan.longest_tokens, plan.longest_tokens) if plan.longest_tokens else None
    if plan.keeps is None:
        return StackTraits(longest=longest)
    names = partial(_names, plan.keeps.hashing)
    return StackTraits(longest=longest, clock=node.world.clock, naming=node.naming, names=names)


def tell_rate(half: SchedulerHalf, keeps: KeepPlan | None) -> None:
    """Have a node know how fast it computes prompts: those of a simulation are too short to show it."""
    if keeps is not None and keeps.tokens_per_s and half.pulls is not None:
        half.pulls._rate.measured(_MANY_TOKENS, _MANY_TOKENS / keeps.tokens_per_s)


def kept_blocks(node: SimNode) -> KeptBlocks | None:
    """What a node states of the blocks that it keeps, beside what its workers have."""
    keeps, tiers = node.plan.keeps, node.workers[0].tiers
    if keeps is None or tiers is None:
        return None
    return KeptBlocks(
        node.workers[0].memory.config.groups,
        make_requirements(node.workers[0]),
        hashes=partial(_names, keeps.hashing),
        row_bytes=tiers.row_bytes,
        num_ranks=node.plan.world_size,
        clock=node.world.clock,
    )


def nothing_stays_pinned(node: SimNode) -> None:
    """When all is over, and much time has passed."""
    half = node.connector.offload
    if isinstance(half, WatchedOffload) and not node.is_dead:
        half.pledges.over()


def _names(hashing: int, request: Request, tokens: int) -> Sequence[bytes]:
    # By another hash a name stands for another prompt.
    return names_of(request.prompt.moved(hashing), request.num_tokens, tokens)

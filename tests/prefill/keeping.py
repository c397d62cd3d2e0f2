"""P whose ranks keep KV in rows of host memory under names, and D that loads it by these."""

from __future__ import annotations

import itertools
import math

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.specs import div_ceil
from kvconnect.offload.copies.copier import make_copier
from kvconnect.offload.copies.rows import RowArena, RowLayout
from kvconnect.offload.index.budgets import plan_arena
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.worker.jobs import RankJobs, Report
from kvconnect.offload.worker.named_rows import NamedRows
from kvconnect.offload.worker.prefix_blocks import PrefixBlocks
from kvconnect.transfer.orders import NamedBlocks, Orders, RowCopies
from kvconnect.transfer.parts import always
from tests.transfer.ranks import Blocks, Ranks
from tests.transfer.shapes import Truth


def names_of(request: str, num_tokens: int, tokens: int) -> tuple[bytes, ...]:
    """Of a prompt, one for every so many tokens."""
    return tuple(f"{request}:{end}".encode() for end in range(tokens, num_tokens + 1, tokens))


class Keeper:
    """The rows of one worker, as the offload has them, with copies that a test asks for."""

    def __init__(self, worker, drafts=()) -> None:
        self.cache = worker.cache
        groups = self.cache.config.groups
        sizes = [group.block_size for group in groups if not group.is_state]
        needs = HitRequirements.of(groups, range(len(groups)), math.lcm(*sizes), drafts)
        self.naming, self.needs = Naming("test", math.gcd(*sizes)), needs
        layout = RowLayout.build(self.cache.table)
        plan = plan_arena(1 << 20, layout.row_bytes, dict.fromkeys(layout.row_bytes, 1))
        self.copier = make_copier(layout, RowArena(plan), "cpu")
        self.jobs, self._class_of = RankJobs(0), plan.class_of
        arena = self.copier._arena
        self.rows = self.jobs.names = NamedRows(self.naming, needs, self.cache.table, arena, self.jobs)
        # Those of one class are of several groups.
        self._free = [itertools.count() for _ in plan.classes]
        self._numbers = itertools.count()
        worker.local.keep(self.rows)

    def store(self, group: int, pairs, into=None) -> list[int]:
        """``pairs`` are of name and block; the rows."""
        free = self._free[self._class_of[group]]
        rows = into or [next(free) for _ in pairs]
        copies = RowCopies(group, tuple(block for _, block in pairs), tuple(rows))
        job = self.jobs.open(
            next(self._numbers), tuple(name for name, _ in pairs), Report.STORED, copies=copies
        )
        ticket = self.copier.snapshot([job.copies])
        assert ticket.error is None
        self.jobs.end(job)
        return rows


class Sharer:
    """The named blocks of one worker's device, over what its ``keeper`` has in rows."""

    def __init__(self, keeper: Keeper, worker) -> None:
        self.keeper, self.step = keeper, 0
        table, num_blocks = worker.cache.table, worker.cache.config.num_blocks
        self.blocks = PrefixBlocks(keeper.naming, keeper.needs, table, num_blocks, keeper.rows)
        worker.local.kept = self.blocks

    def begin(self, reused=()) -> None:
        """A step, which gives away these blocks."""
        self.step += 1
        self.blocks.begin(self.step, reused)

    def name(self, group: int, pairs, is_computed=always) -> None:
        """The orders of a step name blocks; ``pairs`` are of name and block."""
        self.begin()
        names, blocks = zip(*pairs, strict=True)
        self.blocks.name([NamedBlocks(group, blocks, names)], self.blocks.number, is_computed)


class KeepingRanks(Ranks):
    """Ranks of P that keep prompts by name; with ``shares`` on the device too."""

    def __init__(self, *given, drafts=(), shares=False, **settings) -> None:
        super().__init__(*given, **settings)
        self.keepers = [Keeper(worker, drafts) for worker in self.prefill]
        both = zip(self.keepers, self.prefill, strict=True)
        self.sharers = [Sharer(keeper, worker) for keeper, worker in both] if shares else []
        self.naming = self.keepers[0].naming
        for worker in self.prefill:
            worker.order(Orders(directory=self.directory))

    def keep(self, request: str, num_tokens: int) -> Truth:
        """All ranks keep a prompt, and no block of the device has it any more."""
        truth, blocks = self.computed(num_tokens)
        for worker, keeper in zip(self.prefill, self.keepers, strict=True):
            for group, pairs in self._named(keeper.needs, request, num_tokens, blocks):
                keeper.store(group, pairs)
            for cache in worker.cache.tensors.values():
                cache.tensor.fill_(0)
        return truth

    def share(self, request: str, num_tokens: int, is_computed=always) -> tuple[Truth, Blocks]:
        """All ranks have a prompt in named blocks of the device: its content, and the blocks."""
        truth, blocks = self.computed(num_tokens)
        for sharer in self.sharers:
            for group, pairs in self._named(sharer.keeper.needs, request, num_tokens, blocks):
                sharer.name(group, pairs, is_computed)
        return truth, blocks

    def _named(self, needs: HitRequirements, request: str, num_tokens: int, blocks: Blocks):
        """By group, what a prompt has, as pairs of name and block: of a state its last one."""
        names = names_of(request, num_tokens + 1024, self.naming.tokens)
        for group in needs.groups:
            (held,) = (found for found in blocks.values() if found.group == group.group)
            step = group.block_tokens // self.naming.tokens
            named = group.names(names[step - 1 :: step], 0, div_ceil(num_tokens, group.block_tokens))
            named = named[-1:] if group.is_state else named
            yield group.group, [pair for pair in zip(named, held.block_ids, strict=True) if pair[1]]

    def prefix(self, request: str, num_tokens: int, start_tokens: int = 0) -> Prefix:
        return Prefix(self.naming, start_tokens, names_of(request, num_tokens, self.naming.tokens))

    def pull(
        self, request: str, num_tokens: int, known_tokens: int = 0, *, prefix: Prefix | None = None, name=""
    ) -> Blocks:
        """Have all ranks of D load a prompt by name; the blocks that it gets."""
        prefix = prefix or self.prefix(name or request, num_tokens, known_tokens)
        return self.fetched(request, num_tokens, known_tokens, handle=f"pin:own-{request}", prefix=prefix)

    def run_until_ended(self, count: int = 1) -> None:
        self.run_until_received(count)
        self.settle()

    @property
    def failed(self) -> list[str]:
        return [why for worker in self.decode for why in worker.failed.values()]

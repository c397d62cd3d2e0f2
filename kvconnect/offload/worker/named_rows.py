"""Which content lies in which row of one rank, for peers that ask for it by name.

A row holds what the job that took it last has put there, once that job succeeded: from the moment it is taken
until then, whatever may write it late, it has no name. Nothing is locked. The thread that gives the device
its steps notes which job has a row, that of the tiers what rows hold, and who reads compares the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import ConfigError
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.rows import row_table
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from kvconnect.offload.tier import Content
from kvconnect.orders import GroupBlocks, Naming, Prefix
from kvconnect.pack.lanes import Column
from kvconnect.worker.kept import Kept

if TYPE_CHECKING:
    from kvconnect.offload.worker.jobs import Job

_Place = tuple[int, int]
"""A row of a group's class, and the number of the job that put a content there."""


class NamedRows:
    """The rows of an arena by name: a ``KeptByName``. What is evicted is kept until its row is taken.

    Args:
        table: the blocks on the device that the rows are copies of.

    Raises:
        LayoutError: rows of this cache are no region table.
        ConfigError: a block is no whole number of names.
    """

    def __init__(
        self, naming: Naming, requirements: HitRequirements, table: RegionTable, arena: RowArena
    ) -> None:
        for group in requirements.groups:
            if group.block_tokens % naming.tokens:
                raise ConfigError(
                    f"cache group {group.group} has blocks of {group.block_tokens} tokens, and names are of "
                    f"{naming.tokens}: accepted are those that divide it"
                )
        self.naming = naming
        self.table: RegionTable
        self.table, self._pages = row_table(table, arena)
        self._requirements = requirements
        plan = arena.plan
        self._class_of = plan.class_of
        # By class the job that took each row last, and what that row was named; by group, where each name is.
        self._taken = [np.zeros(rows.num_rows, dtype=np.int64) for rows in plan.classes]
        self._contents: list[list[Content | None]] = [[None] * rows.num_rows for rows in plan.classes]
        self._places: dict[int, dict[bytes, _Place]] = {group: {} for group in plan.groups}

    # What happens to rows

    def take(self, job: Job) -> None:
        """A job is about to write its rows. Before any byte changes."""
        if job.copies.rows:
            # An order for a row that does not exist fails where it is copied.
            np.put(self._taken[job.row_class], job.copies.rows, job.number, mode="clip")

    def forget(self) -> None:
        """No row has a name any more, nor will what was taken before. By the thread that takes rows."""
        for taken in self._taken:
            taken.fill(0)

    def fill(self, job: Job, failed: Collection[bytes]) -> None:
        """The rows of a job hold what it names, but for what ``failed``. By one thread."""
        contents, group, wrong = self._contents[job.row_class], job.copies.group, set(failed)
        for name, row in zip(job.named, job.copies.rows, strict=True):
            if name in wrong:
                continue
            former = contents[row]
            if former is not None and self._places[former[0]].get(former[1], (-1, 0))[0] == row:
                del self._places[former[0]][former[1]]
            contents[row] = group, name
            self._places[group][name] = row, job.number

    # What peers ask, by any thread

    def find(self, prefix: Prefix, max_tokens: int) -> tuple[int, int]:
        """See ``KeptByName``."""
        needs, start_tokens = self._requirements, prefix.start_tokens
        if prefix.naming != self.naming:
            return 0, 0

        def run(group: HitGroup, first: int, end: int) -> int:
            places = map(self._places[group.group].get, self._names(prefix, group, range(first, end)))
            known = self._are_current(group.group, tuple(itertools.takewhile(bool, places)))
            return len(known) if known.all() else int(known.argmin())

        def known(group: HitGroup, first: int, end: int) -> Sequence[bool]:
            places = map(self._places[group.group].get, self._names(prefix, group, range(first, end)))
            found: list[bool] = self._are_current(group.group, tuple(places)).tolist()
            return found

        named_tokens = len(prefix.names) * self.naming.tokens
        limit = min(max_tokens + needs.ahead_tokens, named_tokens)
        num_tokens, _ = needs.hit(start_tokens, limit, run, known)
        if num_tokens <= start_tokens:
            return 0, 0
        total_bytes = sum(
            self._pages[group.group].content_bytes * sum(map(len, group.needed(num_tokens, start_tokens)))
            for group in needs.groups
        )
        return num_tokens, total_bytes

    def hold(self, prefix: Prefix, num_tokens: int) -> Kept | None:
        """See ``KeptByName``."""
        needs, named_tokens = self._requirements, len(prefix.names) * self.naming.tokens
        if prefix.naming != self.naming or not prefix.start_tokens < num_tokens <= named_tokens:
            return None
        held, groups = [], []
        for group in needs.groups:
            if group.is_state and num_tokens % group.block_tokens:
                return None
            parts = group.needed(num_tokens, prefix.start_tokens)
            names = [name for part in parts for name in self._names(prefix, group, part)]
            places = [place for place in map(self._places[group.group].get, names) if place is not None]
            if len(places) < sum(map(len, parts)):
                return None
            rows, numbers = _columns(places)
            held.append((self._taken[self._class_of[group.group]], rows, numbers))
            groups.append(self._blocks(group, parts, rows))
        is_intact = partial(_are_untaken, held)
        return Kept(tuple(groups), is_intact) if is_intact() else None

    def _names(self, prefix: Prefix, group: HitGroup, part: range) -> Sequence[bytes]:
        step = group.block_tokens // self.naming.tokens
        return group.names(prefix.names[step - 1 :: step], part.start, part.stop)

    def _are_current(self, group: int, places: Sequence[_Place | None]) -> Column:
        rows, numbers = _columns([place or (0, -1) for place in places])
        current: Column = self._taken[self._class_of[group]][rows] == numbers
        return current

    def _blocks(self, group: HitGroup, parts: Sequence[range], rows: Column) -> GroupBlocks:
        """The blocks of rows that hold the positions of these parts, as ``table`` counts them."""
        pages = self._pages[group.group].ids(rows)
        if group.is_state or not parts:
            return GroupBlocks(group.group, 0, tuple(pages.ravel().tolist()))
        first, stop = parts[0].start, parts[-1].stop
        ids = np.zeros((stop - first, pages.shape[1]), dtype=np.int64)
        ids[np.concatenate([np.arange(part.start, part.stop) for part in parts]) - first] = pages
        return GroupBlocks(group.group, first * pages.shape[1], tuple(ids.ravel().tolist()))


def _columns(places: Sequence[_Place]) -> tuple[Column, Column]:
    rows, numbers = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return rows, numbers


def _are_untaken(held: Sequence[tuple[Column, Column, Column]]) -> bool:
    return all(bool((taken[rows] == numbers).all()) for taken, rows, numbers in held)

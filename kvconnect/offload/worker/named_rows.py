"""The rows of one rank by name, for peers that fetch KV by name.

From the moment a job takes a row until that job succeeds, the row has no name, even if a late write reaches
it. The thread that launches steps notes which job took a row, the tiers' thread notes a row's content. For
lent rows, into which disk contents are read for peers, the thread that serves peers notes both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import PeerError
from kvconnect.offload.copies.rows import RowArena, row_table
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.tier import DISK
from kvconnect.offload.worker.jobs import RankJob, RankJobs, Report
from kvconnect.offload.worker.named_contents import Held, NamedContents, Needed, placed
from kvconnect.pack.page_lanes import Column
from kvconnect.transfer.kept import Kept, Stock
from kvconnect.transfer.orders import RowCopies

if TYPE_CHECKING:
    from kvconnect.offload.worker.tier_loop import TierLoop

_Lent = tuple[int, tuple[bytes, ...], tuple[int, ...]]
_PROBE_ROWS = 8


class NamedRows(NamedContents):
    """The rows of an arena by name, as ``KeptByName``; a row's number is that of the job that filled it.

    Args:
        loop: reads contents from disk into lent rows; None if peers get nothing from disk.

    Raises:
        LayoutError: rows of this cache cannot be expressed as a region table.
        ConfigError: a group's block size is no multiple of the tokens of a name.
    """

    def __init__(
        self,
        naming: Naming,
        requirements: HitRequirements,
        device: RegionTable,
        arena: RowArena,
        jobs: RankJobs,
        loop: TierLoop | None = None,
    ) -> None:
        plan = arena.plan
        class_of = {group: plan.class_of[group] for group in plan.groups}
        super().__init__(naming, requirements, device, class_of, [rows.num_all for rows in plan.classes])
        self.table, self._pages = row_table(device, arena)
        self._plan, self._jobs, self._loop = plan, jobs, loop
        self._reading: dict[int, RankJob] = {}
        # The rows that fetches of peers read; an entry goes when its fetch drops it.
        self._kept: WeakKeyDictionary[Kept, list[Held]] = WeakKeyDictionary()

    # Changes of rows

    def take(self, job: RankJob) -> None:
        """Note that a job takes its rows. Call it before any byte of them changes."""
        if job.copies.rows:
            # An order for a group or a row that does not exist fails in the copy.
            index = self._class_of.get(job.copies.group, -1)
            np.put(self._taken[index], job.copies.rows, job.number, mode="clip")

    def forget(self, *, only_lent: bool = False) -> None:
        """Remove the names of all rows, or of lent rows only; jobs that took rows before name none either."""
        for taken, rows in zip(self._taken, self._plan.classes, strict=True):
            taken[rows.num_rows * only_lent :] = 0

    def fill(self, job: RankJob, failed: Collection[bytes] = ()) -> None:
        """Name the rows of a job by its contents, except ``failed`` ones; a disk read may be under way."""
        group, wrong = job.copies.group, set(failed)
        taken = self._taken[self._class_of[group]]
        for name, row in zip(job.hashes, job.copies.rows, strict=True):
            if name in wrong:
                # Lets ``Kept.is_intact`` detect that the row was not read.
                taken[row] *= taken[row] != job.number
            elif taken[row] == job.number:
                # Of a job from before a clear, the name may have another row by now.
                self._put(group, name, row, job.number)

    # For the thread that serves peers

    def find(self, prefix: Prefix, max_tokens: int) -> Stock:
        """See ``KeptByName``."""
        plan, loop, here = self._plan, self._loop, self._hit(prefix, max_tokens)
        found = here, self._length_bytes(self._needed(prefix, here)), 0, 0, 0.0
        if loop is None:
            return found
        # Beyond the hit in host memory, as much as lent rows hold; groups of a class get equal parts of them.
        sharing = ((group, plan.class_of[group.group]) for group in self._requirements.whole)
        room = (
            plan.classes[index].num_lent // len(plan.groups_of(index)) * group.block_tokens
            for group, index in sharing
        )
        most = max(here, prefix.start_tokens) + min(room, default=max_tokens)
        there = self._hit(prefix, min(max_tokens, most), from_disk=True)
        needed = self._needed(prefix, there)
        lent = self._lend(needed)
        if there <= here or lent is None:
            return found
        if not (rate := loop.disk_bytes_per_s):
            # Read a few rows, to measure how fast the disk is.
            if not any(job.owed for job in self._reading.values()):
                self._read(lent, _PROBE_ROWS)
            return found
        read_bytes = sum(len(rows) * plan.row_class(group).row_bytes for group, _, rows in lent)
        return (*found[:2], there, self._length_bytes(needed), read_bytes / rate)

    def hold(self, prefix: Prefix, num_tokens: int) -> Kept | None:
        """See ``KeptByName``."""
        if not self._is_named(prefix, num_tokens):
            return None
        needed = self._needed(prefix, num_tokens)
        if not self._are_known(needed, num_tokens, from_disk=True):
            return None
        if (lent := self._lend(needed)) is None:
            raise PeerError("the rows into which this node reads what peers fetch from its disk are in use")
        self._read(lent)
        held, groups, jobs = [], [], set[RankJob]()
        for group, parts, names in needed:
            rows, numbers = self._find(group.group, names)
            held.append((self._plan.class_of[group.group], rows, numbers))
            groups.append(placed(group, parts, self._pages[group.group].ids(rows)))
            jobs.update(self._reading[number] for number in self._reading.keys() & set(numbers.tolist()))
        is_intact = partial(self._are_intact, held)
        kept = Kept(tuple(groups), is_intact, lambda: not any(job.owed for job in jobs))
        self._kept[kept] = held
        return kept if is_intact() else None

    def _are_there(self, index: int, places: Column, numbers: Column) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = self._taken[index][places] == numbers
        return there

    def _known(self, group: int, names: Sequence[bytes], *, from_disk: bool = False) -> NDArray[np.bool_]:
        """For each content whether a row has it or is to get it; with ``from_disk`` the disk counts too."""
        known = super()._known(group, names)
        (absent,) = np.nonzero(~known)
        if from_disk and self._loop is not None and len(absent):
            known[absent] = self._loop.on_disk([(group, names[at]) for at in absent.tolist()])
        return known

    def _lend(self, needed: Sequence[Needed]) -> list[_Lent] | None:
        """By group the contents that no row has, and free lent rows for them; None: too few are free.

        No job writes to a free lent row, and no fetch reads it. The rows taken longest ago come first.
        """
        is_free = [np.arange(rows.num_all) >= rows.num_rows for rows in self._plan.classes]
        for job in self._reading.values():
            if job.owed:
                is_free[self._class_of[job.copies.group]][list(job.copies.rows)] = False
        for index, rows, _ in chain.from_iterable(self._kept.values()):
            is_free[index][rows] = False
        absent: list[tuple[int, int, list[bytes]]] = []
        for group, _, names in needed:
            index, known = self._plan.class_of[group.group], self._known(group.group, names)
            is_free[index][self._find(group.group, names)[0][known]] = False
            absent.append((group.group, index, list(compress(names, ~known))))
        lent = []
        for number, index, names in absent:
            (rows,) = is_free[index].nonzero()
            rows = rows[self._taken[index][rows].argsort(kind="stable")][: len(names)]
            if len(rows) < len(names):
                return None
            is_free[index][rows] = False
            lent.append((number, tuple(names), tuple(rows.tolist())))
        return lent

    def _read(self, lent: Sequence[_Lent], most: int | None = None) -> None:
        """Order reads from disk into lent rows, at most ``most`` in each group."""
        self._reading = {number: job for number, job in self._reading.items() if job.owed}
        for group, names, rows in lent:
            if names and self._loop is not None:
                copies = RowCopies(group, (), rows[:most])
                job = self._jobs.open(None, names[:most], Report.FETCHED, copies=copies)
                self._reading[job.number] = job
                self.fill(job)
                self._loop.order(self._loop.ask, "read", job, DISK, job=job)

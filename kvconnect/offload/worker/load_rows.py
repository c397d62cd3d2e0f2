"""The rows of one rank as a target of loads: KV of requests that wait for blocks of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvconnect.cache.region_table import RegionTable
from kvconnect.offload.copies.rows import RowArena, row_table
from kvconnect.offload.worker.jobs import RankJob, RankJobs, Report
from kvconnect.plan.blocks import NULL_BLOCK, GroupBlocks
from kvconnect.transfer.orders import Park, RowCopies


class LoadRows:
    """See ``ParkedRows``. Raises ``LayoutError``: the rows cannot be expressed as a region table."""

    def __init__(self, table: RegionTable, arena: RowArena, jobs: RankJobs) -> None:
        self.table, self._pages = row_table(table, arena)
        self._jobs = jobs
        self._open: dict[int, RankJob] = {}

    def pages(self, groups: Sequence[GroupBlocks]) -> tuple[GroupBlocks, ...]:
        found = []
        for blocks in groups:
            pages = self._pages[blocks.group]
            rows = np.array(blocks.block_ids, dtype=np.int64)
            ids = np.where(rows[:, None] == NULL_BLOCK, NULL_BLOCK, pages.ids(rows - 1))
            found.append(
                GroupBlocks(blocks.group, blocks.first_block * pages.ratio, tuple(ids.ravel().tolist()))
            )
        return tuple(found)

    def begin(self, parks: Sequence[Park]) -> None:
        for park in parks:
            copies = RowCopies(park.group, (), park.rows)
            self._open[park.job] = self._jobs.open(park.job, park.names, Report.PARKED, copies=copies)

    def end(self, parks: Sequence[Park], *, ok: bool) -> None:
        for park in parks:
            self._jobs.end(self._open.pop(park.job), () if ok else park.names)

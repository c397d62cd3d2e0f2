"""Rows of host memory for the KV of requests that wait for blocks: D fetches it there, and frees P's blocks.

These rows stay pending in the index: no lookup finds them, nothing evicts them, no event names them, and a
reset leaves them. Their names say nothing about their content, and no peer can ask for them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from kvconnect.offload.scheduler.host import Host, Job, JobKind
from kvconnect.plan.blocks import NULL_BLOCK, GroupBlocks
from kvconnect.transfer.kept import Parked
from kvconnect.transfer.orders import Park, Restore, RowCopies


class ParkingLot:
    """All parked KV of a node, in at most ``park_share`` of the rows of each class. See ``Parking``."""

    def __init__(self, host: Host) -> None:
        self._host, self._class_of = host, host.plan.class_of
        self._most = [int(host.config.park_share * rows.num_rows) for rows in host.plan.classes]
        self._taken = Counter[int]()
        self.after_s = host.config.park_after_s
        self._filling: dict[int, Parked] = {}
        """By open job, what it parks."""
        self._parked: set[Parked] = set()
        """The parked KV that has rows."""
        self.restoring: dict[str, Parked] = {}
        self._serial = itertools.count(1)

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, wanted: Mapping[int, Sequence[range]]) -> Parked | None:
        needed = Counter[int]()
        for group, parts in wanted.items():
            needed[self._class_of[group]] += sum(map(len, parts))
        if any(self._taken[index] + count > self._most[index] for index, count in needed.items()):
            return None
        serial, reserved = next(self._serial), dict[int, tuple[list[bytes], list[int]]]()
        for group, parts in wanted.items():
            names = [f"parked {serial} {at}".encode() for part in parts for at in part]
            reserved[group] = taken, _ = self._host.index.reserve(group, names)
            if len(taken) < len(names):
                for other, (some, _) in reserved.items():
                    self._host.index.drop(other, some)
                return None
        self._taken += needed
        groups, parks = [], []
        for group, (names, rows) in reserved.items():
            first, ids = wanted[group][0].start, iter(rows)
            by_position = [NULL_BLOCK] * (wanted[group][-1].stop - first)
            for part in wanted[group]:
                for at in part:
                    by_position[at - first] = next(ids) + 1
            groups.append(GroupBlocks(group, first, tuple(by_position)))
            job = self._host.jobs.open(JobKind.PARK, group, names)
            parks.append(Park(job.number, group, tuple(names), tuple(rows)))
        parked = Parked(tuple(groups), tuple(parks))
        self._parked.add(parked)
        self._filling.update((park.job, parked) for park in parks)
        return parked

    def ended(self, job: Job) -> None:
        """All ranks have reported a job."""
        self._host.jobs.close(job)
        parked = self._filling.pop(job.number)
        parked.is_lost |= bool(job.named) or job.stale
        self._settle(parked)

    def leave(self, parked: Parked) -> None:
        parked.is_lost = True
        self._settle(parked)

    def _settle(self, parked: Parked) -> None:
        """Once its jobs are over, parked KV is ready, or lost and without rows."""
        if parked in self._parked and not any(park.job in self._filling for park in parked.parks):
            parked.is_ready = not parked.is_lost
            if parked.is_lost:
                self._free(parked)

    def restore(self, request_id: str, parked: Parked, blocks: Sequence[GroupBlocks]) -> None:
        rows_of = {group.group: group for group in parked.groups}
        copies = tuple(_copies(rows_of[one.group], one) for one in blocks)
        self.restoring[request_id] = parked
        self._host.restores.append(Restore(request_id, tuple(copy for copy in copies if copy.rows)))

    def restored(self, request_id: str, *, failed: bool) -> None:
        """A load of a request ended, perhaps a restore."""
        if (parked := self.restoring.pop(request_id, None)) is not None:
            self._free(parked)
            if failed:
                self._host.count("offload_restore_failed")

    def _free(self, parked: Parked) -> None:
        self._parked.remove(parked)
        for park in parked.parks:
            self._host.index.drop(park.group, park.names)
            self._taken[self._class_of[park.group]] -= len(park.rows)


def _copies(rows: GroupBlocks, blocks: GroupBlocks) -> RowCopies:
    """The pairs of block and row at the positions that have both."""
    by_position = dict(enumerate(rows.block_ids, rows.first_block))
    pairs = [
        (block, row - 1)
        for at, block in enumerate(blocks.block_ids, blocks.first_block)
        if block and (row := by_position.get(at, NULL_BLOCK))
    ]
    return RowCopies(rows.group, tuple(block for block, _ in pairs), tuple(row for _, row in pairs))

"""Restores under way: which rows are copied to which blocks, and what must stay in host memory meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.errors import LocalError
from kvconnect.offload.scheduler.hit_requirements import HitGroup
from kvconnect.offload.scheduler.host import Host
from kvconnect.offload.scheduler.requests import OffloadRequest, Pins
from kvconnect.orders import Restore, RowCopies


class Restores:
    """Restores by the request that waits for them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.pins: dict[str, Pins] = {}
        """What stays in host memory, by request whose restore is under way."""
        self._orders: list[Restore] = []

    def begin(self, request: OffloadRequest, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Restore the first ``num_tokens`` of what was promised. What cannot be is reported failed."""
        request_id, offer = request.view.request_id, request.offer
        pins = self.pins[request_id] = {}
        try:
            if offer is None or num_tokens > offer.length:
                raise LocalError(f"{num_tokens} tokens are not what was promised")
            start, end = offer.start_tokens, offer.start_tokens + num_tokens
            wanted = [
                self._copies(request, group, block_ids[group.group], start, end)
                for group in self._host.requirements.groups
            ]
        except LocalError as error:
            self._host.count("offload_refused")
            self._orders.append(Restore(request_id, (), f"it cannot be restored: {error}"))
            return
        if num_tokens == offer.length:
            # They stay pinned as they are.
            pins.update(offer.pins)
            offer.pins = {}
        else:
            for names, copies in wanted:
                self._host.index.pin(copies.group, names)
                pins[copies.group] = names
        self._orders.append(Restore(request_id, tuple(copies for _, copies in wanted if copies.rows)))

    def end(self, request_id: str, *, failed: bool) -> bool:
        """A request was reported, whose load may be one of these. Whether it was."""
        pins = self.pins.pop(request_id, None)
        if pins is None:
            return False
        for group, names in pins.items() if failed else ():
            self._host.index.drop(group, names)
        self._host.unpin(pins)
        return True

    def take(self) -> tuple[Restore, ...]:
        """The orders since the last call."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def _copies(
        self, request: OffloadRequest, group: HitGroup, ids: Sequence[int], start: int, end: int
    ) -> tuple[list[bytes], RowCopies]:
        """The names and copies that bring a group from ``start`` to ``end`` tokens. Raises ``LocalError``."""
        if group.is_state and end % group.block_tokens:
            raise LocalError(f"no state is kept after {end} tokens")
        parts = group.needed(end, start)
        count = sum(map(len, parts))
        names = self._host.names(request.view, group, parts)
        ids = ids[-1:] if group.is_state else [at for part in parts for at in ids[part.start : part.stop]]
        if not len(ids) == len(names) == count:
            raise LocalError(f"cache group {group.group} has {len(ids)} blocks for {count}")
        if (group.is_whole or group.is_state) and 0 in ids:
            raise LocalError(f"cache group {group.group} has no block for some of {end} tokens")
        # A window may be kept for fewer tokens than it is wide.
        names = [name for name, block_id in zip(names, ids, strict=True) if block_id]
        ids = tuple(block_id for block_id in ids if block_id)
        return names, RowCopies(group.group, ids, tuple(self._host.index.rows_of(group.group, names)))

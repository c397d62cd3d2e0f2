"""Long prefills that are sent while they run: how far each is, and which blocks the workers know of.

Pure bookkeeping, bounded by the transfers that are announced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.specs import KVCacheGroup
from kvconnect.orders import GroupBlocks, Preempted, Progress
from kvconnect.scheduler.stack import BlockIdsByGroup


@dataclass(eq=False)
class _Stream:
    """One prefill of ``num_tokens``.

    ``known`` counts by group the positions that the workers know of, or will with ``fresh``.
    """

    handle: str
    num_tokens: int
    known: list[int]
    fresh: dict[int, list[int]] = field(default_factory=dict)
    computed: int = 0
    computed_sent: int = 0

    @property
    def is_new(self) -> bool:
        """The workers know nothing of it, and there is nothing to send yet."""
        return not (self.computed or any(self.known) or self.fresh)


class Streams:
    """All such prefills of a node.

    Args:
        groups: the cache groups; states are not streamed, they travel last.
        min_tokens: shorter prefills are left alone; 0 for all of them.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._block_tokens = {
            index: group.block_size
            for index, group in enumerate(groups)
            if group.has_cache and not group.is_state
        }
        self._num_groups = len(groups)
        self._streams: dict[str, _Stream] = {}
        self.due: dict[str, int] = {}
        """Requests that are in here, all of them at any number of tokens."""
        self._changed: dict[str, _Stream] = {}
        self._preempted: dict[str, Preempted] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, request_id: str, handle: str, num_tokens: int) -> None:
        """A prefill was announced under a handle; only a long one counts."""
        if 0 < self._min_tokens <= num_tokens and self._block_tokens:
            self._streams[request_id] = _Stream(handle, num_tokens, [0] * self._num_groups)
            self.due[request_id] = 0

    def end(self, request_id: str) -> None:
        """A prefill is over; what the workers do not know of it yet is void."""
        if self._streams.pop(request_id, None) is not None:
            del self.due[request_id]
            self._changed.pop(request_id, None)
            self._preempted.pop(request_id, None)

    def progress(self, request_id: str, computed_tokens: int, new_block_ids: BlockIdsByGroup | None) -> None:
        """A prefill has so many tokens now, and by group these blocks more than before."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        for group, tokens in self._block_tokens.items():
            ids = new_block_ids[group] if new_block_ids else ()
            # What is beyond the prompt is never sent.
            room = div_ceil(stream.num_tokens, tokens) - stream.known[group]
            if ids and room > 0:
                stream.fresh.setdefault(group, []).extend(ids[:room])
                stream.known[group] += min(room, len(ids))
        stream.computed = max(stream.computed, min(computed_tokens, stream.num_tokens))
        if stream.fresh or stream.computed > stream.computed_sent:
            self._changed[request_id] = stream

    def preempted(self, request_id: str) -> None:
        """A prefill lost its blocks."""
        stream = self._streams.get(request_id)
        if stream is None or stream.is_new:
            return
        self._changed.pop(request_id, None)
        self._preempted[request_id] = Preempted(stream.handle)
        self._streams[request_id] = _Stream(stream.handle, stream.num_tokens, [0] * self._num_groups)

    def take(self) -> tuple[tuple[Preempted, ...], tuple[Progress, ...]]:
        """Orders for the workers: what was preempted, and after that what went on."""
        if not (self._changed or self._preempted):
            return (), ()
        progress = []
        for stream in self._changed.values():
            groups = []
            for group, ids in sorted(stream.fresh.items()):
                groups.append(GroupBlocks(group, stream.known[group] - len(ids), tuple(ids)))
            progress.append(Progress(stream.handle, stream.num_tokens, stream.computed, tuple(groups)))
            stream.fresh, stream.computed_sent = {}, stream.computed
        preempted = tuple(self._preempted.values())
        self._changed, self._preempted = {}, {}
        return preempted, tuple(progress)

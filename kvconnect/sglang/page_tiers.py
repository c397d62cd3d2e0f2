"""Both halves of the offload of one rank, driven by pages: no requests, no steps, and no types of SGLang.

SGLang names each page by the hash of all tokens up to its end, and asks for pages by name. So a lookup is a
request here whose blocks have these names, and pages to keep are one whose tokens were all computed.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from kvconnect.config import TransferConfig
from kvconnect.halves.building import build_scheduler_half, build_worker_half
from kvconnect.halves.rank_traits import RankTraits
from kvconnect.offload.index.tier_index import ContentState
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.transfer.stack import Computed, Step

_GROUP = 0
_LOOK_S = 0.5
"""How often a thread that waits for a copy looks whether the thread that makes it has ended."""
_TAKE_S = 0.005
"""How long results are taken at once: a folder on disk has a million names to tell at its start."""


@dataclass(eq=False)
class _Pages:
    """The ``RequestView`` of named pages, with a token more: the last token of a prompt is never restored."""

    request_id: str
    names: Sequence[bytes]
    num_tokens: int
    kv_transfer_params: Mapping[str, Any] | None = None


class PageTiers:
    """The tiers of a rank's pages, which are those of the only cache group of ``traits.kept``.

    One thread calls all of it; ``finish_layer_wise_loading`` and ``reset`` alone wait. Methods with SGLang's
    names for them are as its ``UnifiedCacheLinker`` has them.

    Raises ``ConfigError`` or ``LayoutError``: tiers or pages cannot be used.
    """

    def __init__(self, config: TransferConfig, traits: RankTraits, page_tokens: int) -> None:
        assert traits.kept is not None
        self._page_tokens, self._wake = page_tokens, threading.Event()
        with ExitStack() as undo:
            self.worker = build_worker_half(config, traits)
            undo.callback(self.worker.close)
            offload, cache_config = self.worker.offload, traits.kept.cache.config
            assert offload is not None
            kept = KeptBlocks(
                cache_config.groups,
                traits.kept.requirements,
                hashes=lambda pages, block_tokens: pages.names,
                row_bytes=offload.row_bytes,
            )
            self.scheduler = build_scheduler_half(config, cache_config, kept=kept)
            undo.pop_all()
        assert self.scheduler.offload is not None
        self._index = self.scheduler.offload.host.index
        self.worker.on_results(self._wake.set)
        # Tiers may have reported before.
        self._wake.set()
        self._numbers = itertools.count(1)
        self._asked: dict[str, _Pages] = {}
        """By SGLang's id the pages that a request looked up; what it found stays in host memory meanwhile."""
        self._queued: dict[str, tuple[_Pages, list[int]]] = {}
        self._batch = 0
        self._loading: dict[str, int] = {}
        """The batch of each restore under way."""
        self._failed: set[int] = set()
        self._storing: deque[tuple[Sequence[bytes], list[bytes]]] = deque()
        """The pages of each call of ``store``, and those of them that it copies."""
        self._stored: deque[bool] = deque()
        self._has_new_weights = False

    # Lookups and loads

    def find(self, request: str, names: Sequence[bytes]) -> int:
        """How many of these pages, from the first on, can be restored now; lower tiers are read for more."""
        self._name_weights()
        pages = self._asked.get(request)
        # SGLang asks for a page more where it sorts its queue than where it admits a request.
        count = 0 if pages is None else min(len(pages.names), len(names))
        is_same = pages is not None and list(pages.names[:count]) == list(names[:count])
        if pages is None or not is_same or len(names) > count + 1:
            self.forget([request])
            pages = self._asked[request] = self._pages(names)
            self.scheduler.new_request(pages, writes=False)
        return min(len(names), (self._matched(pages) or 0) // self._page_tokens)

    def is_waiting(self, request: str) -> bool:
        """Whether lower tiers are still read for a request that looked its pages up."""
        pages = self._asked.get(request)
        return pages is not None and self._matched(pages) is None

    def forget(self, requests: Collection[str]) -> None:
        """These requests load nothing of what they found."""
        for request in requests:
            if (pages := self._asked.pop(request, None)) is not None:
                self._end(pages)

    def forget_others(self, requests: Collection[str]) -> None:
        """All requests that looked pages up, except these, load nothing of what they found."""
        self.forget(self._asked.keys() - requests)

    def has(self, request: str, names: Sequence[bytes]) -> bool:
        """Whether these pages, the first of those that a request looked up, can be restored now."""
        pages = self._asked.get(request)
        if pages is None or list(pages.names[: len(names)]) != list(names):
            return False
        return (self._matched(pages) or 0) >= len(names) * self._page_tokens

    def queue(self, request: str, page_ids: Sequence[int]) -> None:
        """Restore the first of the pages that a request looked up, which it has, to these."""
        self._queued[request] = self._asked.pop(request), list(page_ids)

    def cancel_queued_load(self, rid: str) -> bool:
        if (queued := self._queued.pop(rid, None)) is None:
            return False
        self._end(queued[0])
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        self._batch += 1
        for pages, page_ids in self._queued.values():
            self.scheduler.update_after_alloc(pages, (page_ids,), len(page_ids) * self._page_tokens)
            self._end(pages)
            self._loading[pages.request_id] = self._batch
        self._queued.clear()
        self._order()
        return self._batch

    def await_load(self, batch: int) -> bool:
        """Wait until nothing writes to the pages of a batch any more; whether all of them were restored."""
        while batch in self._loading.values():
            self._await_results()
        return batch not in self._failed

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        is_whole = self.await_load(counter_index)
        self._failed.discard(counter_index)
        return is_whole

    # Stores

    def store(self, names: Sequence[bytes], page_ids: Sequence[int]) -> None:
        """Keep pages as all work given to the device so far leaves them, as far as there is room.

        They may be overwritten once ``num_completed_offloads`` counts them.
        """
        self._name_weights()
        pages = self._pages(names)
        computed = Computed(pages.request_id, pages.num_tokens - 1, (list(page_ids),))
        # Others may be on their way from lower tiers, which take their time.
        own = [
            name for name, is_there in zip(names, self._index.has(_GROUP, names), strict=True) if not is_there
        ]
        self.scheduler.new_request(pages, reads=False)
        self.scheduler.launched(Step([computed]))
        self._end(pages, page_ids)
        self._order()
        self._storing.append((names, own))

    def num_completed_offloads(self) -> int:
        self.take_results()
        while self._storing:
            names, own = self._storing[0]
            if ContentState.PENDING in self._index.states(_GROUP, own):
                break
            self._stored.append(set(self._index.states(_GROUP, names)) == {ContentState.READY})
            self._storing.popleft()
        return len(self._stored)

    def pop_completed_offload(self) -> bool:
        return self._stored.popleft()

    # All tiers

    def take_results(self) -> None:
        """Take what has ended, and order what follows; for a while at most."""
        until, has_any = time.monotonic() + _TAKE_S, False
        while self._wake.is_set() and (not has_any or time.monotonic() < until):
            self._wake.clear()
            has_any = True
            results = self.worker.results()
            for name in results.received:
                batch = self._loading.pop(name)
                if name in results.failed:
                    self._failed.add(batch)
            # There is one scheduler half for each rank.
            reports = tuple(msgspec.structs.replace(report, rank=0) for report in results.offload)
            self.scheduler.update_results(msgspec.structs.replace(results, offload=reports))
        if has_any or self.scheduler.pending:
            self._order()

    def reset(self) -> None:
        """Wait until no page is read or written, and clear all tiers."""
        self.forget_others(())
        for request in list(self._queued):
            self.cancel_queued_load(request)
        self.settle()
        self._stored.clear()
        self._failed.clear()
        self.scheduler.reset()
        self._order()

    def settle(self) -> None:
        """Wait until no page is read or written."""
        self.num_completed_offloads()
        while self._loading or self._storing:
            self._await_results()
            self.num_completed_offloads()

    def replace_weights(self) -> None:
        """Other weights: their pages have names of their own, which no later process knows.

        There may be many of these before the next page is looked up or kept.
        """
        self.scheduler.reset()
        self._order()
        self._has_new_weights = True

    def _name_weights(self) -> None:
        if self._has_new_weights:
            self._has_new_weights = False
            self.worker.replace_weights({"replaced": uuid.uuid4().hex})

    def close(self) -> None:
        self.worker.close()

    def _pages(self, names: Sequence[bytes]) -> _Pages:
        return _Pages(str(next(self._numbers)), names, len(names) * self._page_tokens + 1)

    def _matched(self, pages: _Pages) -> int | None:
        count, _ = self.scheduler.matched_tokens(pages, 0)
        if count is None:
            self._order()
        return count

    def _end(self, pages: _Pages, page_ids: Sequence[int] = ()) -> None:
        self.scheduler.request_finished(pages, (list(page_ids),), delivered=False)

    def _order(self) -> None:
        self.worker.before_step(self.scheduler.build_orders())

    def _await_results(self) -> None:
        if not self._wake.wait(_LOOK_S):
            # A thread that has ended reports nothing: asked for results, its worker fails all.
            self._wake.set()
        self.take_results()

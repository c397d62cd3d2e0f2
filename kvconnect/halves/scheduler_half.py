"""The half beside a stack's request scheduler: it passes every hook to the parts that have it.

It has no engine, no tensor, and no socket but P's ``Bootstrap``; no hook waits. A request that is fetched
from a peer restores nothing from the tiers for that admission; its blocks are stored like those of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvconnect.addresses import join_address
from kvconnect.decode.decode_requests import DecodeRequests
from kvconnect.decode.pulls import PullRequests
from kvconnect.halves.receipts import Receipts
from kvconnect.plan.blocks import BlockIdsByGroup
from kvconnect.prefill.prefill_requests import PrefillRequests
from kvconnect.receipt import PEER, RECEIPT_KEY, LoadPart
from kvconnect.transfer.orders import NO_OFFLOAD, Load, Orders, OrdersDraft, Results
from kvconnect.transfer.params import RESULTS_KEY, SOURCES_KEY, is_release, transfer_params
from kvconnect.transfer.stack import RequestView, Step

if TYPE_CHECKING:
    from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
    from kvconnect.offload.scheduler.sessions import Notice
    from kvconnect.offload.scheduler.shared_prefixes import SharedPrefixes

_ROLES: Mapping[str, tuple[str, str]] = {
    "do_remote_decode": (
        "prefill",
        "a request asks this node to hold its KV for another, which it does not: kv_role is "
        "kv_consumer, that of a prefill node has to be kv_producer or kv_both",
    ),
    "do_remote_prefill": (
        "decode",
        "a request asks this node to fetch its KV, and is computed here instead: kv_role is "
        "kv_producer, that of a decode node has to be kv_consumer or kv_both",
    ),
}


class SchedulerHalf:
    """The parts that a configuration needs; without any, every hook answers that there is nothing to do.

    ``draft`` collects the orders of prefill, decode and pulls, and what is counted of receipts. See
    ``building.build_scheduler_half``.
    """

    def __init__(
        self,
        draft: OrdersDraft | None = None,
        prefill: PrefillRequests | None = None,
        decode: DecodeRequests | None = None,
        pulls: PullRequests | None = None,
        offload: OffloadScheduler | None = None,
        *,
        shared: SharedPrefixes | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        self.draft, self.prefill, self.decode = draft or OrdersDraft([]), prefill, decode
        self.pulls, self.offload, self._shared = pulls, offload, shared
        self.has_transfers = prefill is not None or decode is not None
        self.notices: Mapping[str, Notice] = {} if offload is None else offload.notices
        """The requests that only announce their prompt: see ``settle_notice``."""
        # Most requests want none: it is called only while one that does exists.
        self.receipts = receipts
        self._parts = [part for part in (prefill, decode, pulls, offload) if part is not None]
        # Few requests name a source: the hooks of pulls are called only while one that does exists.
        others = [part for part in (prefill, decode, offload, shared) if part is not None]
        self._update_results = _hooks(others, "update_results")
        self._launched = _hooks(others, "launched")
        self._ordered = _hooks(others, "ordered")
        self._preempted = _hooks(self._parts, "preempted")
        self._reset = _hooks([*self._parts, shared], "reset")

    def drain(self) -> None:
        """Hold no further request. The only hook that any thread may call."""
        if self.prefill is not None:
            self.prefill.drain()

    def pause(self, *, is_paused: bool) -> None:
        """The stack waits until no request holds blocks, as before it sleeps; or it goes on."""
        if self.prefill is not None:
            (self.prefill.pause if is_paused else self.prefill.resume)()

    def new_request(self, request: RequestView, *, reads: bool = True, writes: bool = True) -> None:
        """Register a request that arrived, before all other hooks for it. Raises nothing.

        ``reads``: it may use contents of the tiers; ``writes``: its blocks are stored there.
        """
        params = transfer_params(request)
        if self.pulls is not None and reads and (self.pulls.has_sources or SOURCES_KEY in params):
            self.pulls.new_request(request)
        if self.has_transfers and params:
            for wanted, (part, warning) in _ROLES.items():
                if params.get(wanted) and getattr(self, part) is None and not is_release(params):
                    self.draft.warn("wrong_role", warning)
            if self.decode is not None:
                self.decode.share(request)
            if self.prefill is not None:
                self.prefill.new_request(request)
        if self.offload is not None:
            self.offload.new_request(request, reads=reads, writes=writes)
        if self.receipts is not None and (self.receipts.is_for_all or RECEIPT_KEY in params):
            self.receipts.new_request(request)

    def prefill_tokens(self, request: RequestView) -> int:
        """The number of prompt tokens to compute on this node."""
        if self.notices and request.request_id in self.notices:
            return min(request.num_tokens, self.notices[request.request_id].most_tokens + 1)
        return request.num_tokens if self.prefill is None else self.prefill.prefill_tokens(request)

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond those computed that can be loaded, and whether asynchronously; None: ask again."""
        # With a handle the request loads only that KV; without one, the better of tier and source loads.
        offload = self.offload
        if self.receipts is not None and self.receipts.records:
            self.receipts.looked_up(request.request_id, num_computed_tokens)
        if self.decode is not None:
            count = self.decode.matched_tokens(request, num_computed_tokens)
            if count != 0:
                if offload is not None:
                    offload.withdraw(request.request_id)
                return count, bool(count)
        local: int | None = 0
        if offload is not None:
            local, _ = offload.matched_tokens(request, num_computed_tokens)
        if self.pulls is None or local is None or not self.pulls.requests:
            return local, bool(local)
        pulled = self.pulls.matched_tokens(request, num_computed_tokens, local)
        if pulled == 0:
            return local, bool(local)
        if pulled is not None and offload is not None:
            offload.withdraw(request.request_id)
        return pulled, bool(pulled)

    def settle_notice(self, request: RequestView, num_computed_tokens: int, count: int) -> tuple[int, int]:
        """For a request of ``notices`` whose ``matched_tokens`` are ``count``: the stack cuts its prompt.

        Returns how many of these tokens are loaded, and how many the prompt keeps: those in the device's own
        cache, the loaded ones, and the least that must be computed. The stack generates one token.
        """
        assert self.offload is not None, "only an offload has notices"
        return self.offload.settle_notice(request, num_computed_tokens, count)

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        """A request was admitted with all these blocks; some of the tokens offered to it are loaded."""
        offload, is_restored = self.offload, False
        if offload is not None:
            is_restored = offload.offers(request.request_id)
            offload.update_after_alloc(request, block_ids, num_external_tokens if is_restored else 0)
        fetched_tokens = 0 if is_restored else num_external_tokens
        if self.prefill is not None:
            self.prefill.update_after_alloc(request)
        if self.decode is not None:
            self.decode.update_after_alloc(request, block_ids, fetched_tokens)
        if self.pulls is not None and self.pulls.requests:
            self.pulls.update_after_alloc(request, block_ids, fetched_tokens)
        if self.receipts is not None and self.receipts.records:
            self._note_admission(self.receipts, request, num_external_tokens, is_restored=is_restored)

    def _note_admission(
        self, receipts: Receipts, request: RequestView, num_tokens: int, *, is_restored: bool
    ) -> None:
        """Pass an admission to the receipts, and have the outcome of its load reported."""
        request_id, why = request.request_id, None
        if request_id not in receipts.records:
            return
        by_origin = self.sources(request_id, num_tokens)
        load = None
        if num_tokens and is_restored and self.offload is not None:
            total_bytes, digest = self.offload.restore_of(request_id)
            origin = "+".join(by_origin)
            load = LoadPart(origin=origin, tokens=num_tokens, ended="", bytes=total_bytes, digest=digest)
        elif num_tokens:
            loads = self.draft.loads
            if loads and loads[-1].request_id == request_id:
                loads[-1] = msgspec.structs.replace(loads[-1], wants_outcome=True)
                tier = "device" if self.pulls is None else self.pulls.tier_of(request_id) or "device"
                load = _part_of(loads[-1], num_tokens, tier)
            else:
                # It was parked, perhaps for a request of the same prompt, and is copied from host memory.
                load = receipts.parked(request_id, num_tokens)
        elif self.decode is not None:
            why = self.decode.refusal_of(request_id)
        receipts.admitted(request, load, by_origin, "" if why is None else why.cause.value)

    def _note_parking(self, receipts: Receipts) -> None:
        """Pass the loads into host memory to the receipts, and have their outcomes reported."""
        for index, load in enumerate(self.draft.loads):
            if load.parks and load.request_id in receipts.records:
                self.draft.loads[index] = msgspec.structs.replace(load, wants_outcome=True)
                receipts.parking(load.request_id, _part_of(load, load.num_tokens, "device"))

    def checkpoints(self, request: RequestView) -> Sequence[int]:
        """Ascending token counts after which the state of an admitted request is to be stored."""
        return () if self.offload is None else self.offload.checkpoints(request)

    @property
    def due(self) -> Mapping[str, int]:
        """The requests that ``launched`` must name: each if it got blocks, or reached this many tokens.

        Every call of ``launched`` may change it.
        """
        sent = {} if self.prefill is None else self.prefill.due
        kept = {} if self.offload is None else self.offload.due
        if not kept or not sent:
            return kept or sent
        return {**kept, **{name: min(due, kept.get(name, due)) for name, due in sent.items()}}

    def launched(self, step: Step) -> None:
        """Take the steps that the device was given before the step of the next orders."""
        for launched in self._launched:
            launched(step)

    def overwritten(self, block_ids: Collection[int]) -> None:
        """Note blocks that the step of the next orders overwrites before a worker receives the orders."""
        if self.offload is not None:
            self.offload.overwritten(block_ids)

    def preempted(self, request_id: str) -> None:
        """A running request lost its blocks, and will be computed anew."""
        for preempted in self._preempted:
            preempted(request_id)
        if self.receipts is not None and self.receipts.records:
            self.receipts.preempted(request_id)

    def is_restored(self, request_id: str) -> bool:
        """Whether the tokens last offered to a request are in this node's tiers; until the request ends."""
        return self.offload is not None and self.offload.is_restored(request_id)

    def sources(self, request_id: str, num_external_tokens: int) -> dict[str, int]:
        """Of ``num_external_tokens`` that a request takes: how many come from which tier, or from a peer."""
        if self.offload is not None and self.offload.is_restored(request_id):
            return self.offload.sources(request_id, num_external_tokens)
        return {PEER: num_external_tokens} if num_external_tokens else {}

    def build_orders(self) -> Orders:
        """The orders since the last call."""
        for ordered in self._ordered:
            ordered()
        if self.pulls is not None and self.pulls.requests:
            self.pulls.ordered()
        if self.receipts is not None and self.receipts.records:
            self._note_parking(self.receipts)
        offload = NO_OFFLOAD if self.offload is None else self.offload.build_orders()
        orders = self.draft.take()
        if offload:
            orders = msgspec.structs.replace(orders, offload=offload)
        return orders

    def request_finished(
        self, request: RequestView, block_ids: BlockIdsByGroup, *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, and its blocks are about to be freed. Exactly once per request.

        ``delivered``: it ended normally, so that the parameters returned here reach the client. Returns
        whether the blocks must be kept until ``Results.sent`` has the request, and the parameters for D.
        """
        done = None if self.offload is None else self.offload.request_finished(request, block_ids)
        if self._shared is not None:
            self._shared.request_finished(request)
        is_loading = self.decode is not None and self.decode.request_finished(request)
        if self.pulls is not None and self.pulls.requests:
            is_loading |= self.pulls.request_finished(request.request_id)
        is_held, params, asked = False, None, transfer_params(request)
        if self.prefill is not None:
            is_held, params = self.prefill.request_finished(
                request, block_ids, delivered=delivered and not is_loading
            )
        if isinstance(reported := asked.get(RESULTS_KEY), dict):
            # The results of the hints at the prefill node, which a router passes on.
            done = {**(done or {}), "prefill": reported}
        if done and delivered:
            params = {**(params or {}), RESULTS_KEY: done}
        if self.receipts is not None and self.receipts.records:
            receipt = self.receipts.finished(request, params, delivered=delivered)
            if receipt is not None:
                params = {**(params or {}), RECEIPT_KEY: receipt} if delivered else params
                self.draft.receipts.append(receipt)
        return is_held, params

    def update_results(self, results: Results) -> None:
        """Take the workers' results, once all ranks have reported."""
        for update_results in self._update_results:
            update_results(results)
        if self.receipts is not None and self.receipts.records:
            self.receipts.update_results(results)
        if self.pulls is not None and (self.pulls.requests or self.pulls.loading):
            self.pulls.update_results(results)

    def reset(self) -> None:
        """The weights may have changed: nothing that the device holds now may be used with later KV."""
        for reset in self._reset:
            reset()

    def take_events(self) -> Sequence[Any]:
        return () if self.offload is None else self.offload.take_events()

    @property
    def pending(self) -> bool:
        return self.offload is not None and self.offload.pending

    def state(self) -> dict[str, int]:
        """Counts of the requests in all parts. All zero when idle."""
        parts = (*self._parts, *((self.receipts,) if self.receipts is not None else ()))
        return {name: count for part in parts for name, count in part.state().items()}


def _part_of(order: Load, num_tokens: int, tier: str) -> LoadPart:
    """What a receipt has of a load from a peer that is ordered."""
    engine_id, host, port = order.peer
    return LoadPart(
        origin=PEER,
        tokens=num_tokens,
        ended="",
        engine_id=engine_id,
        address=join_address(host, port) if host else "",
        by="lease" if order.prefix is None else "name",
        tier=tier,
    )


def _hooks(parts: Sequence[object], name: str) -> list[Callable[..., None]]:
    """One hook, of all parts that have it."""
    return [getattr(part, name) for part in parts if hasattr(part, name)]

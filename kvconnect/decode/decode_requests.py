"""The requests whose KV D fetches from a prefill node, from their arrival to their end.

A handle is good for one fetch, and several requests may name it: a serving stack splits a request that wants
several answers, and a router may send a request twice. One of them loads; the others wait, and then use the
local prefix cache. Pure bookkeeping, empty when idle: D forgets a handle with the last request that names it.

With ``parking`` the KV of a request that has waited for blocks is loaded into host memory, so that P need not
hold it, and restored from there once the request has blocks. If that fails, the request waits as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvconnect.cache.identity import marks_differ
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.handles import Handles, PeerTrust
from kvconnect.plan.blocks import BlockIdsByGroup
from kvconnect.timeline import Moment
from kvconnect.transfer.kept import Parked, Parking
from kvconnect.transfer.orders import Await, LetGo, Load, OrdersDraft, Results, blocks_of
from kvconnect.transfer.params import MOST_LATER_PROMPTS, RemotePrefill, read_remote_prefill, transfer_params
from kvconnect.transfer.stack import LongestRequest, RequestView, StackTraits

_MOST_PARKED_AT_ONCE = 4
"""Requests whose KV is on its way into host memory: they take slots from loads of requests with blocks."""


@dataclass(eq=False)
class _Share:
    """A handle and this node's requests that name it; each request with unusable parameters has its own.

    ``undecided``: requests that may still fetch, each with its computed tokens when it was offered the load.
    ``decided``: requests that got their blocks. ``is_spent``: a fetch was ordered, or the handle was
    released. ``loader``: the request whose load is under way; ``is_cancelled``: that load was ordered to end;
    ``failure``: why it failed otherwise. ``is_asked``: D asked P to report when the handle is settled;
    ``is_settled``: P did. ``parked``: its KV in host memory, or on its way there, ordered for the request
    ``parker``; ``is_unparkable``: that failed once, or there is nothing to park.
    """

    remote: RemotePrefill
    undecided: dict[str, int | None] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    loader: str = ""
    is_spent: bool = False
    is_cancelled: bool = False
    failure: Reason | None = None
    is_asked: bool = False
    is_settled: bool = False
    parked: Parked | None = None
    parker: str = ""
    is_unparkable: bool = False


class EarlyLoads:
    """Early loads, which get their blocks on D before P is known to hold the KV, and the room for more.

    Where a router sends a request to both nodes at once, an early load saves time. It holds blocks of D while
    it waits for P to get blocks. Every other request does the opposite: P holds blocks for it while it waits
    for blocks of D. Without a bound both pools could fill, and each node would wait for the other.

    Why no cycle of waits remains. Early loads never take the reserve, which is the blocks that the longest
    request needs, nor the last of the places for loads under way on a worker. All other blocks of D belong to
    requests that run, or that fetch KV which P holds, and these end without P. Then the reserve suffices for
    any one request, so the first in D's queue gets its blocks, and its load a place: D fetches all KV that P
    holds, in the end. That frees blocks on P, and prefills that wait there get them in turn. A request that
    may not begin early waits in D's queue without a block until P holds its KV or never will, which P is
    asked to report.

    Two nodes that both prefill and decode for each other have one pool for both ends; there a wait may last
    until a lease expires.

    All cache groups share one pool. Without a ``longest`` request nothing is reserved.
    """

    def __init__(self, cache: KVCacheConfig, longest: LongestRequest | None, max_loads: int) -> None:
        self._groups = [group for group in cache.groups if group.has_cache]
        reserve = self._blocks(longest.num_tokens, longest.step_tokens) if longest is not None else 0
        self._most_blocks = max(0, cache.num_blocks - 1 - reserve)
        self._most_loads = max(0, max_loads - 1)
        self._blocks_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._blocks_of)

    def may_begin(self, num_tokens: int) -> bool:
        """Whether there is room for an early load of ``num_tokens``."""
        has_place = len(self._blocks_of) < self._most_loads
        return has_place and sum(self._blocks_of.values()) + self._blocks(num_tokens) <= self._most_blocks

    def begin(self, request_id: str, num_tokens: int) -> None:
        """Count the blocks of an early load, which is ordered now."""
        self._blocks_of[request_id] = self._blocks(num_tokens)

    def end(self, request_id: str) -> None:
        """Return the blocks of a load that has ended, if it was early."""
        self._blocks_of.pop(request_id, None)

    def _blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """The most blocks that a request of ``num_tokens`` takes, over all groups."""
        return sum(group.most_blocks(num_tokens, step_tokens) for group in self._groups)


class DecodeRequests:
    """The requests that D fetches, and the handles that D releases."""

    def __init__(
        self,
        config: TransferConfig,
        cache_config: KVCacheConfig,
        stack: StackTraits,
        handles: Handles,
        trust: PeerTrust | None,
        draft: OrdersDraft,
        parking: Parking | None = None,
    ) -> None:
        self._groups = cache_config.groups
        self._recomputes = config.kv_load_failure_policy == "recompute"
        self._stack, self._handles, self._trust, self._draft = stack, handles, trust, draft
        rank0 = draft.directory[0]
        self._own = (rank0.host, rank0.port) if config.is_producer else None
        self._early = EarlyLoads(cache_config, stack.longest, config.extra.max_loads)
        self._shares: dict[str, _Share] = {}
        self._by_handle: dict[str, _Share] = {}
        self._loading: dict[str, _Share] = {}
        self._parking = parking
        # With parking: requests without blocks, oldest first, and since when; and handles being parked.
        self._waiting: dict[str, tuple[RequestView, float]] = {}
        self._being_parked: list[_Share] = []
        self._is_short = False

    def share(self, request: RequestView) -> _Share | None:
        """The handle that a request names, and all requests that name it; None if its KV is not fetched.

        Called on arrival, so that requests of one handle are known together before the first is admitted.
        """
        params = transfer_params(request)
        if not params:
            return None
        share = self._shares.get(request.request_id)
        if share is not None or not params.get("do_remote_prefill"):
            return share
        prompt = self._stack.prompt_digest(request, max(1, self._wanted_tokens(request)))
        batch_of = self._stack.batch_of
        is_later = batch_of is not None and 0 < batch_of(request.request_id)[1] <= MOST_LATER_PROMPTS
        remote = read_remote_prefill(params, self._handles, prompt, is_later_prompt=is_later)
        if remote is None:
            return None
        remote = self._checked(remote, request.request_id)
        if remote.duplicate:
            self._draft.let_go.append(LetGo(remote.duplicate, remote.peer))
        share = self._by_handle.get(remote.handle)
        if share is None:
            # A handle of another prompt is spent for this request, and is left to that prompt's requests.
            share = _Share(remote, is_spent=remote.is_of_other_prompt)
            if remote.handle:
                self._by_handle[remote.handle] = share
        share.undecided[request.request_id] = None
        self._shares[request.request_id] = share
        self._draft.note(Moment.QUEUED, remote.handle, request.request_id, request.num_tokens)
        if not share.is_spent and not remote.refusal:
            self._await(share.remote)
            if self._parking is not None and self._stack.clock is not None:
                self._waiting[request.request_id] = request, self._stack.clock()
        return share

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> int | None:
        """The tokens that can be fetched beyond those computed; unchanged until the request is admitted.

        None: ask again. Another request fetches the same KV, or P computes it and an early load has no room.
        """
        share = self.share(request)
        count = self._wanted_tokens(request) - num_computed_tokens
        if share is None or request.request_id not in share.undecided or count <= 0:
            return 0
        if share.remote.peer[1:] == self._own:
            # The prompt was prefilled here, and is in this node's prefix cache; engines do not reach
            # themselves.
            return 0
        if share.remote.refusal is not None and self._recomputes:
            return 0
        # After a failure every sibling orders a load, which is refused: the serving stack's policy then
        # decides whether the sibling is computed.
        if share.is_spent and not (share.loader or share.failure or share.parked):
            return 0
        if share.loader or not (share.is_spent or self._may_load(share, request.num_tokens)):
            return None
        if share.parked is not None and not share.parked.is_ready:
            return None
        share.undecided[request.request_id] = num_computed_tokens
        return count

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        """A request got blocks: order the load of the first ``num_external_tokens`` offered tokens."""
        request_id, share = request.request_id, self.share(request)
        if share is None or request_id not in share.undecided:
            return
        first = share.undecided.pop(request_id)
        share.decided.add(request_id)
        self._waiting.pop(request_id, None)
        if num_external_tokens <= 0:
            if share.is_cancelled and not share.failure:
                # The cancelled load left nothing in the prefix cache: its siblings compute their prompts.
                text = "the load under its handle ended with another request, whose client left"
                self._draft.computed(request_id, share.remote.peer, Cause.FETCHED_BEFORE(text))
            self._let_go_if_unwanted(share)
            return
        remote, wanted = share.remote, self._wanted_tokens(request)
        if first is None:
            first = wanted - num_external_tokens
        handle, refusal = remote.handle, self._refusal(remote, wanted, num_external_tokens, wanted - first)
        self._loading[request_id] = share
        groups = blocks_of(self._groups, block_ids, first, first + num_external_tokens)
        parked = share.parked
        if parked is not None and parked.is_ready and refusal is None and self._parking is not None:
            share.loader, share.parked = request_id, None
            self._parking.restore(request_id, parked, groups)
            self._draft.note(Moment.LOAD_ORDERED, handle, request_id, num_external_tokens)
            return
        if share.is_spent:
            # Two requests were offered the load before either got its blocks, or the loader has failed. The
            # load is ordered without the handle: a worker releases the handle of a load that fails, and this
            # handle belongs to another request.
            handle = ""
            refusal = share.failure or (refusal if parked is not None else None)
            refusal = refusal or Cause.FETCHED_BEFORE(
                "another request of this node has fetched under its handle"
            )
            if parked is not None and not share.undecided:
                self._unpark(share)
        else:
            if remote.is_announced and not share.is_settled:
                self._early.begin(request_id, request.num_tokens)
            share.loader, share.is_spent, share.is_asked = request_id, True, False
        self._draft.awaited.pop(handle, None)
        self._draft.loads.append(Load(request_id, handle, remote.peer, wanted, groups, refusal))
        self._draft.note(Moment.LOAD_ORDERED, handle, request_id, num_external_tokens)

    def request_finished(self, request: RequestView) -> bool:
        """A request ended. Returns whether its load is under way, which is then ordered to end."""
        request_id, share = request.request_id, self.share(request)
        self._waiting.pop(request_id, None)
        if share is not None:
            del self._shares[request_id]
            share.undecided.pop(request_id, None)
            share.decided.discard(request_id)
            self._forget_if_over(share)
            # The request was rejected or aborted before it got blocks: P need not wait for it.
            self._let_go_if_unwanted(share)
        is_loading = request_id in self._loading
        if is_loading:
            self._draft.aborted.append(request_id)
        return is_loading

    def ordered(self) -> None:
        """Before the draft is taken: park, and mark the loads that it aborts: no sibling fails with them."""
        if self._waiting or self._being_parked:
            self._park()
        for request_id in self._draft.aborted:
            share = self._loading.get(request_id)
            if share is not None and share.loader == request_id:
                share.is_cancelled = True

    def update_results(self, results: Results) -> None:
        """Take the workers' results: ended loads, and settled handles."""
        for request_id in results.received:
            self._early.end(request_id)
            share = self._loading.pop(request_id, None)
            if share is None or share.loader != request_id:
                continue
            self._draft.note(Moment.LOADED, share.remote.handle, request_id, request_id not in results.failed)
            share.loader = ""
            failure = results.failed.get(request_id)
            if failure is not None and not share.is_cancelled:
                share.failure = failure.after("the request that fetched for this one failed: ")
            self._forget_if_over(share)
        for handle in results.settled:
            share = self._by_handle.get(handle)
            if share is not None and share.is_asked:
                share.is_settled = True

    def refusal_of(self, request_id: str) -> Reason | None:
        """Why a request computes the KV that it names, until it ends; None: it is here, or none is named."""
        share = self._shares.get(request_id)
        if share is None or share.remote.peer[1:] == self._own:
            return None
        fetched = Cause.FETCHED_BEFORE("another request has fetched under its handle")
        return share.remote.refusal or share.failure or (fetched if share.is_cancelled else None)

    def state(self) -> dict[str, int]:
        """Counts of the requests kept here. All zero when idle."""
        asked = sum(share.is_asked for share in self._by_handle.values())
        return {
            "loading": len(self._loading),
            "sharing": len(self._shares),
            "early": len(self._early) + asked,
        }

    def reset(self) -> None:
        """The weights may have changed: what is parked was of the old ones, and is computed here."""
        for share in list(self._by_handle.values()):
            if share.parked is not None:
                reason = Cause.REPLACED("its KV was in host memory when the caches were reset")
                for request_id in share.undecided or (share.parker,):
                    self._draft.computed(request_id, share.remote.peer, reason)
                self._unpark(share)

    def _park(self) -> None:
        """Have the KV of requests that have waited long enough parked, some at a time."""
        assert self._parking is not None
        assert self._stack.clock is not None
        for share in self._being_parked:
            parked = share.parked
            if parked is not None and parked.is_ready:
                self._draft.note(Moment.PARKED, share.remote.handle, share.parker)
            elif parked is not None and parked.is_lost:
                # The request waits on: a load once it has blocks finds out whether P still has the KV.
                share.parked, share.is_spent, share.is_unparkable = None, False, True
                self._await(share.remote)
        self._being_parked = [
            share for share in self._being_parked if share.parked and not share.parked.is_ready
        ]
        until = self._stack.clock() - self._parking.after_s
        for request_id, (request, since) in list(self._waiting.items()):
            if since > until or len(self._being_parked) >= _MOST_PARKED_AT_ONCE:
                break
            share = self._shares[request_id]
            if self._is_parkable(share, request) and not self._begin_parking(share, request):
                break

    def _is_parkable(self, share: _Share, request: RequestView) -> bool:
        remote, wanted = share.remote, self._wanted_tokens(request)
        if share.is_spent or share.is_unparkable:
            return False
        if not self._is_held(share):
            return False
        is_own = remote.peer[1:] == self._own
        share.is_unparkable = is_own or wanted <= 0 or bool(self._refusal(remote, wanted, wanted, wanted))
        return not share.is_unparkable

    def _begin_parking(self, share: _Share, request: RequestView) -> bool:
        """Order a load into rows of host memory. False: they do not fit now."""
        assert self._parking is not None
        wanted, request_id = self._wanted_tokens(request), request.request_id
        # One token more than the next token reads: where the stack computes the last token again.
        parked = self._parking.park(
            {
                index: group.retention.blocks(wanted, group.block_size, 1)
                if not group.is_state
                else (range(1),)
                for index, group in enumerate(self._groups)
                if group.has_cache
            }
        )
        if parked is None:
            if not self._is_short:
                self._draft.failures.append("park_rows_short")
            self._is_short = True
            return False
        self._is_short = False
        remote = share.remote
        share.parked, share.parker, share.is_spent, share.is_asked = parked, request_id, True, False
        self._being_parked.append(share)
        self._draft.awaited.pop(remote.handle, None)
        self._draft.loads.append(
            Load(request_id, remote.handle, remote.peer, wanted, parked.groups, parks=parked.parks)
        )
        return True

    def _unpark(self, share: _Share) -> None:
        """No request takes parked KV: end its load, or free its rows."""
        assert self._parking is not None
        assert share.parked is not None
        if not share.parked.is_ready:
            self._draft.aborted.append(share.parker)
        self._parking.leave(share.parked)
        share.parked = None

    def _may_load(self, share: _Share, num_tokens: int) -> bool:
        """Whether a load may get blocks now."""
        return self._early.may_begin(num_tokens) or self._is_held(share)

    def _is_held(self, share: _Share) -> bool:
        """Whether P holds the KV, or never will. While that is unknown P is asked, once, to report it."""
        if not share.remote.is_announced or share.is_settled:
            return True
        if not share.is_asked:
            share.is_asked = True
            self._await(share.remote, reports=True)
        return False

    def _await(self, remote: RemotePrefill, *, reports: bool = False) -> None:
        """Have P's lease renewed for a request that waits for blocks, unless it ends within the step."""
        self._draft.awaited[remote.handle] = Await(remote.handle, remote.peer, reports)

    def _let_go_if_unwanted(self, share: _Share) -> None:
        """A request does not fetch. If no other request may fetch under the handle, release it on P."""
        if share.undecided:
            return
        if share.parked is not None:
            self._unpark(share)
        if share.is_spent:
            return
        share.is_spent, share.is_asked = True, False
        remote = share.remote
        if not remote.refusal:
            self._draft.awaited.pop(remote.handle, None)
            self._draft.let_go.append(LetGo(remote.handle, remote.peer))

    def _forget_if_over(self, share: _Share) -> None:
        if not (share.undecided or share.decided or share.loader):
            self._by_handle.pop(share.remote.handle, None)

    def _wanted_tokens(self, request: RequestView) -> int:
        return request.num_tokens - self._stack.held_back

    def _checked(self, remote: RemotePrefill, request_id: str) -> RemotePrefill:
        """The same parameters, with a refusal if they cannot be trusted or used, which is then reported."""
        peer, why = remote.peer, None
        if remote.is_of_other_prompt:
            # Nodes that count tokens differently leave another number of them to D.
            if differ := marks_differ(self._stack.identity().marks, remote.identity):
                why = Cause.OTHER_IDENTITY(f"KV means something else there: {', '.join(differ)} differ")
            else:
                why = Cause.OTHER_PROMPT("the handle is of another prompt")
            remote = msgspec.structs.replace(remote, refusal=why)
        elif not remote.refusal and self._trust is not None:
            refusal = self._trust.refusal(*remote.peer[1:], vouched=remote.vouched)
            if refusal is not None:
                remote = RemotePrefill(refusal=refusal)
        if remote.refusal is not None and self._recomputes:
            # Nothing is offered: vLLM would count the offered tokens as a hit, and nothing is fetched.
            why = remote.refusal
        if why is not None:
            self._draft.computed(request_id, peer, why)
        return remote

    def _refusal(self, remote: RemotePrefill, wanted: int, taken: int, offered: int) -> Reason | None:
        """Why a load is refused, or None. The KV of another prompt is worse than none."""
        if remote.refusal:
            return remote.refusal
        # Where the parameters have no length, P compares the lengths.
        if remote.num_tokens not in (0, max(1, wanted)):
            return Cause.OTHER_PROMPT(
                f"kv_transfer_params.remote_num_tokens is {remote.num_tokens}, this prompt needs "
                f"{max(1, wanted)}: they are not of this prompt, or the two nodes run different models"
            )
        # A peer holds windows and states as of the last token of the whole prompt.
        is_whole = all(group.retention.sees_all for group in self._groups)
        if taken == offered or (taken < offered and is_whole):
            return None
        return Cause.BLOCKS(
            f"blocks were given for {taken} of the {offered} tokens that were offered; accepted: all of them"
            + ", or fewer" * is_whole
        )

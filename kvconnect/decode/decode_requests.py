"""The requests whose KV D fetches from a prefill node, from their arrival to their end.

A handle is good for one fetch. A serving stack makes several requests of one where several answers are
wanted, and a router may send one twice: one of them loads, the others wait and then use the local prefix
cache. Pure bookkeeping, empty when idle: a handle is forgotten with the last request that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.cache.identity import marks_differ
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.handles import Handles, PeerTrust
from kvconnect.plan.blocks import BlockIdsByGroup
from kvconnect.timeline import Moment
from kvconnect.transfer.orders import Await, LetGo, Load, OrdersDraft, Results, blocks_of
from kvconnect.transfer.params import (
    MOST_LATER_PROMPTS,
    RemotePrefill,
    read_remote_prefill,
    transfer_params,
)
from kvconnect.transfer.stack import LongestRequest, RequestView, StackTraits

logger = logging.getLogger(__name__)

WINDOW_S = 60.0


class FetchOutcomes:
    """Requests that asked for KV in the current minute: those that got it, and those that did not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = clock()
        self._got = self._missed = 0

    def got(self) -> None:
        """The KV of a request arrived."""
        self._judge()
        self._got += 1

    def missed(self) -> None:
        """A request is computed here, or fails, though it asked for KV."""
        self._judge()
        self._missed += 1

    def _judge(self) -> None:
        now = self._clock()
        if now - self._began_at < WINDOW_S:
            return
        if self._missed and not self._got:
            logger.warning(
                "none of the %d requests that asked for KV within a minute got it: their prompts were "
                "computed here, or they failed; kvconnect_failures counts the reasons",
                self._missed,
            )
        self._began_at, self._got, self._missed = now, 0, 0


@dataclass(eq=False)
class _Share:
    """A handle and the requests of this node that name it. What cannot be used has none, and is not shared.

    ``undecided`` requests may still fetch: with each the tokens that it had when it was offered the load.
    ``decided`` ones got their blocks. ``is_spent`` once a fetch was ordered, or P let go. ``loader`` is the
    request whose load is under way, ``is_cancelled`` whether that is ordered to end, and ``failure`` why it
    failed otherwise. ``is_asked``: a request has to wait until P holds the KV, or never will; then it
    ``is_settled``.
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


class EarlyLoads:
    """Loads that may get their blocks on D before P holds what they fetch, and the room for more of them.

    Where a router asks both nodes at once, a load that has its blocks when P has computed the first chunk
    saves time. It also holds blocks of D while it waits for blocks of P, and every other request does the
    opposite: P holds blocks for it while it waits for blocks of D. Unbounded, both pools fill, and each waits
    for the other.

    Why no cycle remains. A load is early if it was ordered before P was known to hold its KV, and the reserve
    is what the longest request needs. Early loads never take the reserve, nor the last place among the loads
    that a worker fetches at one time. So all that P holds is fetched in the end: D's blocks, those of early
    loads apart, are of requests that run, or that fetch what P holds, and these end without P; then the
    reserve is enough for any one request, so that the first in D's queue gets its blocks, and its load a
    place. What was fetched is free again on P, and what waits there, prefills of early loads too, gets it in
    its turn: prefills that run on P wait for each other only, and are preempted. A request that may not begin
    early waits in D's queue without a block, which closes no cycle, until P holds its KV or never will; P is
    asked for that when it first has to wait.

    That is so between nodes that prefill and nodes that decode. Two that do both for each other have one pool
    for both ends; there a wait may last until a lease is over.

    All groups share one pool. Without a ``longest`` request nothing is reserved.
    """

    def __init__(self, cache: KVCacheConfig, longest: LongestRequest | None, max_loads: int) -> None:
        self._groups = [group for group in cache.groups if group.has_cache]
        reserve = self._blocks(longest.num_tokens, longest.step_tokens) if longest is not None else 0
        self._most_blocks = max(0, cache.num_blocks - 1 - reserve)
        self._most_loads = max(0, max_loads - 1)
        self._blocks_of: dict[str, int] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._blocks_of)

    def may_begin(self, num_tokens: int) -> bool:
        """Whether there is room for a request of so many tokens."""
        if len(self._blocks_of) >= self._most_loads or self._num_blocks >= self._most_blocks:
            return False
        return self._num_blocks + self._blocks(num_tokens) <= self._most_blocks

    def begin(self, request_id: str, num_tokens: int) -> None:
        """An early load is ordered."""
        self.end(request_id)
        self._blocks_of[request_id] = blocks = self._blocks(num_tokens)
        self._num_blocks += blocks

    def end(self, request_id: str) -> None:
        """A load is over."""
        self._num_blocks -= self._blocks_of.pop(request_id, 0)

    def _blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Blocks of a request of so many tokens, at most."""
        return sum(group.most_blocks(num_tokens, step_tokens) for group in self._groups)


class DecodeRequests:
    """What D fetches, and what it lets go of."""

    def __init__(
        self,
        config: TransferConfig,
        cache_config: KVCacheConfig,
        stack: StackTraits,
        handles: Handles,
        trust: PeerTrust | None,
        draft: OrdersDraft,
    ) -> None:
        self._groups = cache_config.groups
        self._recomputes = config.kv_load_failure_policy == "recompute"
        self._stack, self._handles, self._trust, self._draft = stack, handles, trust, draft
        rank0 = draft.directory[0]
        self._own = (rank0.host, rank0.port) if config.is_producer else None
        self._outcomes = FetchOutcomes(handles.clock)
        self._early = EarlyLoads(cache_config, stack.longest, config.extra.max_loads)
        self._shares: dict[str, _Share] = {}
        self._by_handle: dict[str, _Share] = {}
        self._loading: dict[str, _Share] = {}
        # Requests that load, or did, and have no token since, with the tokens that they had then; and those
        # of them that are loaded, which get one soon.
        self._tokenless: dict[str, tuple[RequestView, int, str]] = {}
        self._loaded: dict[str, None] = {}

    def new_request(self, request: RequestView) -> None:
        """A request with parameters has come."""
        self.share(request)

    def share(self, request: RequestView) -> _Share | None:
        """The handle that a request names, with all that name it; None if it is not fetched.

        Called when it arrives: requests of one handle know of each other before the first is admitted.
        """
        params = transfer_params(request)
        if not params:
            return None
        share = self._shares.get(request.request_id)
        if share is not None or not params.get("do_remote_prefill"):
            return share
        prompt = self._stack.prompt_digest(request, max(1, self._wanted_tokens(request)))
        is_later = False
        if self._stack.batch_of is not None:
            is_later = 0 < self._stack.batch_of(request.request_id)[1] <= MOST_LATER_PROMPTS
        remote = read_remote_prefill(params, self._handles, prompt, is_later_prompt=is_later)
        if remote is None:
            return None
        remote = self._checked(remote)
        if remote.duplicate:
            self._draft.let_go.append(LetGo(request.request_id, remote.duplicate, *remote.peer))
        share = self._by_handle.get(remote.handle)
        if share is None:
            # What was made for another prompt is spent for this one, and its handle is left to that.
            share = _Share(remote, is_spent=remote.is_of_other_prompt)
            if remote.handle:
                self._by_handle[remote.handle] = share
        share.undecided[request.request_id] = None
        self._shares[request.request_id] = share
        self._draft.note(Moment.QUEUED, remote.handle, request.request_id, request.num_tokens)
        if not share.is_spent and not remote.refusal:
            self._await(share.remote)
        return share

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> int | None:
        """Tokens that can be fetched beyond those computed; the same until the request is admitted.

        None: ask again, another request fetches the same, or P is computing it and there is no room for that.
        """
        share = self.share(request)
        count = self._wanted_tokens(request) - num_computed_tokens
        if share is None or request.request_id not in share.undecided or count <= 0:
            return 0
        if share.remote.peer[1:] == self._own:
            # Prefilled here, and so in this node's own prefix cache; no engine reaches itself.
            return 0
        if share.remote.refusal is not None and self._recomputes:
            return 0
        # After a failure every sibling orders a load, which can only be refused: whether it is computed then
        # is for the serving stack's policy to decide.
        if share.is_spent and not (share.loader or share.failure):
            return 0
        if share.loader or not (share.is_spent or self._may_load(share, request.num_tokens)):
            return None
        share.undecided[request.request_id] = num_computed_tokens
        return count

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        """Blocks were given to a request, of the tokens that it was offered for the first so many."""
        request_id, share = request.request_id, self.share(request)
        if share is None or request_id not in share.undecided:
            return
        first = share.undecided.pop(request_id)
        share.decided.add(request_id)
        if num_external_tokens <= 0:
            if share.is_cancelled and not share.failure:
                # Nothing of it is in the prefix cache: its siblings compute what they asked for.
                self._outcomes.missed()
                text = "a request is computed here: the load under its handle ended with another request"
                self._draft.warn(Cause.FETCHED_BEFORE.value, text)
            self._let_go_if_unwanted(request_id, share)
            return
        remote, wanted = share.remote, self._wanted_tokens(request)
        if first is None:
            first = wanted - num_external_tokens
        handle, refusal = remote.handle, self._refusal(remote, wanted, num_external_tokens, wanted - first)
        self._loading[request_id] = share
        if share.is_spent:
            # Two were offered the load before either got its blocks, or the one that fetched has failed.
            # Without the handle: a worker lets go of what it could not load, and this is another's.
            handle = ""
            refusal = share.failure or Cause.FETCHED_BEFORE(
                "another request of this node has fetched under its handle"
            )
        else:
            if remote.is_announced and not share.is_settled:
                self._early.begin(request_id, request.num_tokens)
            share.loader, share.is_spent, share.is_asked = request_id, True, False
        self._draft.awaited.pop(handle, None)
        groups = blocks_of(self._groups, block_ids, first, first + num_external_tokens)
        self._draft.loads.append(Load(request_id, handle, *remote.peer, wanted, groups, refusal))
        self._draft.note(Moment.LOAD_ORDERED, handle, request_id, num_external_tokens)
        self._tokenless[request_id] = request, request.num_tokens, handle

    def request_finished(self, request: RequestView) -> bool:
        """A request ended. Whether its load is under way: then it is ordered to end."""
        request_id, share = request.request_id, self.share(request)
        self._look_for_token(request_id)
        self._tokenless.pop(request_id, None)
        self._loaded.pop(request_id, None)
        if share is not None:
            del self._shares[request_id]
            share.undecided.pop(request_id, None)
            share.decided.discard(request_id)
            self._forget_if_over(share)
            # Rejected or aborted before it got blocks: P need not wait for it.
            self._let_go_if_unwanted(request_id, share)
        is_loading = request_id in self._loading
        if is_loading:
            self._draft.aborted.append(request_id)
        return is_loading

    def ordered(self) -> None:
        """The draft is about to be taken: the loads that it aborts decide nothing about their handles."""
        for request_id in list(self._loaded):
            self._look_for_token(request_id)
        for request_id in self._draft.aborted:
            share = self._loading.get(request_id)
            if share is not None and share.loader == request_id:
                share.is_cancelled = True

    def update_results(self, results: Results) -> None:
        """What the workers reported."""
        for request_id in results.received:
            self._early.end(request_id)
            if request_id in self._tokenless:
                self._loaded[request_id] = None
            share = self._loading.pop(request_id, None)
            if share is None or share.loader != request_id:
                continue
            self._draft.note(Moment.LOADED, share.remote.handle, request_id, request_id not in results.failed)
            share.loader = ""
            failure = results.failed.get(request_id)
            if failure is None:
                self._outcomes.got()
            elif not share.is_cancelled:
                self._outcomes.missed()
                share.failure = failure.after("the request that fetched for this one failed: ")
            self._forget_if_over(share)
        for handle in results.settled:
            share = self._by_handle.get(handle)
            if share is not None and share.is_asked:
                share.is_settled = True

    def state(self) -> dict[str, int]:
        """Counts of what is remembered. All zero when idle."""
        asked = sum(share.is_asked for share in self._by_handle.values())
        return {
            "loading": len(self._loading),
            "sharing": len(self._shares),
            "early": len(self._early) + asked,
        }

    def _look_for_token(self, request_id: str) -> None:
        """Record the first token of a request that was loaded, once it is there."""
        request, num_tokens, handle = self._tokenless.get(request_id, (None, 0, ""))
        if request is not None and request.num_tokens > num_tokens:
            del self._tokenless[request_id]
            self._loaded.pop(request_id, None)
            self._draft.note(Moment.FIRST_TOKEN, handle, request_id)

    def _may_load(self, share: _Share, num_tokens: int) -> bool:
        """Whether a load may have blocks now; otherwise P is asked for when it may."""
        if not share.remote.is_announced or share.is_settled or self._early.may_begin(num_tokens):
            return True
        if not share.is_asked:
            share.is_asked = True
            self._await(share.remote, reports=True)
        return False

    def _await(self, remote: RemotePrefill, *, reports: bool = False) -> None:
        """A request waits for blocks: what P holds for it is kept. Not sent if it is over within the step."""
        self._draft.awaited[remote.handle] = Await(remote.handle, *remote.peer, reports)

    def _let_go_if_unwanted(self, request_id: str, share: _Share) -> None:
        """A request does without. If none fetches any more, P is let go."""
        if share.is_spent or share.undecided:
            return
        share.is_spent, share.is_asked = True, False
        remote = share.remote
        if not remote.refusal:
            self._draft.awaited.pop(remote.handle, None)
            self._draft.let_go.append(LetGo(request_id, remote.handle, *remote.peer))

    def _forget_if_over(self, share: _Share) -> None:
        if not (share.undecided or share.decided or share.loader):
            self._by_handle.pop(share.remote.handle, None)

    def _wanted_tokens(self, request: RequestView) -> int:
        return request.num_tokens - self._stack.held_back

    def _checked(self, remote: RemotePrefill) -> RemotePrefill:
        """The same, refused and counted if it is not to be trusted."""
        if remote.is_of_other_prompt:
            self._outcomes.missed()
            # Where the nodes see tokens differently they leave another number of them to D.
            if differ := marks_differ(self._stack.identity_marks, remote.identity):
                self._draft.warn(
                    "other_identity",
                    "KV means something else there: %s differ between the prefill node that made a "
                    "request's handle and this one, which computes it; `kvconnect doctor --peer` of the two "
                    "names the values",
                    ", ".join(differ),
                )
            else:
                self._draft.warn(
                    "prompt_differs", "a request has the handle of another prompt, and is computed"
                )
        elif not remote.refusal and self._trust is not None:
            refusal = self._trust.refusal(remote.host, remote.port, vouched=remote.vouched)
            if refusal is not None:
                remote = RemotePrefill(refusal=refusal)
        if remote.refusal is not None and self._recomputes:
            # Nothing is fetched, and vLLM would count what it is offered as a hit.
            self._outcomes.missed()
            cause = remote.refusal.cause.value
            self._draft.warn(cause, "a request is computed here: %s", remote.refusal)
        return remote

    def _refusal(self, remote: RemotePrefill, wanted: int, taken: int, offered: int) -> Reason | None:
        """Why a load is not fetched, or None. The KV of another prompt is worse than none."""
        if remote.refusal:
            return remote.refusal
        # Where its length was not given, P compares.
        if remote.num_tokens not in (0, max(1, wanted)):
            return Cause.OTHER_PROMPT(
                f"kv_transfer_params.remote_num_tokens is {remote.num_tokens}, this prompt needs "
                f"{max(1, wanted)}: they are not of this prompt, or the two nodes run different models"
            )
        # A peer holds windows and states as they are after the last token of all that it holds.
        is_whole = all(group.retention.sees_all for group in self._groups)
        if taken == offered or (taken < offered and is_whole):
            return None
        return Cause.BLOCKS(
            f"blocks were given for {taken} of the {offered} tokens that were offered; accepted: all of them"
            + ", or fewer" * is_whole
        )

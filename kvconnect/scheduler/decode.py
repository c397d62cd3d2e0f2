"""The requests whose KV D fetches from a prefill node, from their arrival to their end.

Pure bookkeeping, empty when idle.
"""

from __future__ import annotations

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import ExtraConfig
from kvconnect.orders import Await, LetGo, Load, Results
from kvconnect.scheduler.blocks import blocks_of
from kvconnect.scheduler.draft import OrdersDraft
from kvconnect.scheduler.early import EarlyLoads
from kvconnect.scheduler.handles import Handles
from kvconnect.scheduler.params import RemotePrefill, read_remote_prefill, transfer_params
from kvconnect.scheduler.shares import Share, Shares, Turn
from kvconnect.scheduler.stack import BlockIdsByGroup, RequestView, StackTraits
from kvconnect.scheduler.trust import PeerTrust


class DecodeRequests:
    """What D fetches, and what it tells P that it will not."""

    def __init__(
        self,
        extra: ExtraConfig,
        cache_config: KVCacheConfig,
        stack: StackTraits,
        handles: Handles,
        trust: PeerTrust | None,
        draft: OrdersDraft,
    ) -> None:
        self._groups = cache_config.groups
        self._stack, self._handles, self._trust, self._draft = stack, handles, trust, draft
        self._shares = Shares()
        self._early = EarlyLoads(self._groups, cache_config.num_blocks, stack.longest, extra.max_loads)

    def share(self, request: RequestView) -> Share | None:
        """The handle that a request names, with all that name it; None if it is not fetched.

        Called when it arrives, so that requests of one handle know of each other before the first is
        admitted.
        """
        params = transfer_params(request)
        if not params:
            return None
        share = self._shares.of(request.request_id)
        if share is not None or not params.get("do_remote_prefill"):
            return share
        prompt = self._stack.prompt_digest(request, max(1, self._wanted_tokens(request)))
        remote = read_remote_prefill(params, self._handles, prompt)
        if remote is None:
            return None
        share = self._shares.join(request.request_id, self._checked(remote))
        if not share.spent and not share.remote.refusal:
            self._await(share.remote)
        return share

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> int | None:
        """Tokens that can be fetched beyond those computed; the same until the request is admitted.

        None: ask again, another request of this node is fetching the same, or P is still computing it and
        there is no room for more of that kind.
        """
        share = self.share(request)
        if share is None:
            return 0
        count = self._wanted_tokens(request) - num_computed_tokens
        turn = self._shares.turn(request.request_id, share)
        if count <= 0 or turn is Turn.COMPUTE:
            return 0
        if turn is Turn.WAIT or not (share.spent or self._may_load(share.remote, request.num_tokens)):
            return None
        share.starts[request.request_id] = num_computed_tokens
        return count

    def admitted(self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int) -> None:
        """Blocks were given to a request.

        ``num_external_tokens`` may be less than ``matched_tokens`` offered: the first of these tokens; it is
        0 whenever nothing is to be fetched.
        """
        request_id, share = request.request_id, self.share(request)
        if share is None or request_id in share.decided:
            return
        remote = share.remote
        if num_external_tokens <= 0:
            if self._shares.compute(request_id, share):
                self._release(request_id, remote)
            return
        wanted = self._wanted_tokens(request)
        first = share.starts.get(request_id, wanted - num_external_tokens)
        refusal = (
            remote.refusal
            or self._prompt_refusal(request, remote)
            or self._part_refusal(num_external_tokens, wanted - first)
        )
        handle = remote.handle
        if not self._shares.fetch(request_id, share):
            # Without the handle: a worker lets go of what it could not load, and this is another's.
            handle = ""
            refusal = share.failure or "another request of this node has fetched under its handle"
        self._draft.awaited.pop(handle, None)
        if remote.is_announced and handle:
            self._early.begin(request_id, handle, request.num_tokens)
        self._draft.loads.append(
            Load(
                request_id=request_id,
                handle=handle,
                engine_id=remote.engine_id,
                host=remote.host,
                port=remote.port,
                num_tokens=wanted,
                groups=blocks_of(self._groups, block_ids, first, first + num_external_tokens),
                refusal=refusal,
            )
        )

    def finished(self, request: RequestView) -> bool:
        """A request ended. Whether its load is under way: then it is ordered to end."""
        request_id = request.request_id
        if self.share(request) is not None and (unwanted := self._shares.leave(request_id)):
            # Rejected or aborted before it got blocks: P need not wait for it.
            self._release(request_id, unwanted.remote)
        is_loading = self._shares.is_loading(request_id)
        if is_loading:
            self._draft.aborted.append(request_id)
        return is_loading

    def ordered(self) -> None:
        """The draft is about to be taken: the loads that it aborts say nothing of their handles any more."""
        for request_id in self._draft.aborted:
            self._shares.cancel(request_id)

    def update_results(self, results: Results) -> None:
        """What the workers reported."""
        for request_id in results.received:
            self._shares.loaded(request_id, results.failed.get(request_id, ""))
            self._early.end(request_id)
        self._early.settled(results.settled)

    def state(self) -> dict[str, int]:
        """Counts of what is remembered. All zero when idle."""
        return {
            "loading": self._shares.num_loading,
            "sharing": len(self._shares),
            "early": len(self._early),
        }

    def _may_load(self, remote: RemotePrefill, num_tokens: int) -> bool:
        """Whether a load may have blocks now; otherwise P is asked for when it may."""
        if not remote.is_announced or self._early.may_begin(remote.handle, num_tokens):
            return True
        if self._early.wait(remote.handle):
            self._await(remote, reports=True)
        return False

    def _await(self, remote: RemotePrefill, *, reports: bool = False) -> None:
        """A request waits for blocks: what P holds for it is kept. Not sent if it is over within the step."""
        order = Await(remote.handle, remote.engine_id, remote.host, remote.port, reports)
        self._draft.awaited[remote.handle] = order

    def _release(self, request_id: str, remote: RemotePrefill) -> None:
        self._draft.awaited.pop(remote.handle, None)
        self._early.forget(remote.handle)
        self._draft.let_go.append(
            LetGo(request_id, remote.handle, remote.engine_id, remote.host, remote.port)
        )

    def _wanted_tokens(self, request: RequestView) -> int:
        return request.num_tokens - self._stack.held_back

    def _checked(self, remote: RemotePrefill) -> RemotePrefill:
        """The same, refused and counted if it is not to be trusted."""
        if remote.is_of_other_prompt:
            self._draft.warn("prompt_differs", "a request has the handle of another prompt, and is computed")
        elif remote.refusal:
            self._draft.failures.append("parameters_refused")
        elif self._trust is not None:
            refusal = self._trust.refusal(remote.host, remote.port, vouched=remote.vouched)
            if refusal:
                self._draft.failures.append("peer_not_trusted")
                return RemotePrefill(refusal=refusal)
        return remote

    def _prompt_refusal(self, request: RequestView, remote: RemotePrefill) -> str:
        """The KV of another prompt is worse than none. Where its length was not given, P compares."""
        expected = max(1, self._wanted_tokens(request))
        if remote.num_tokens not in (0, expected):
            return (
                f"kv_transfer_params.remote_num_tokens is {remote.num_tokens}, this prompt needs {expected}: "
                "they are not of this prompt, or the two nodes run different models"
            )
        return ""

    def _part_refusal(self, taken: int, offered: int) -> str:
        """A peer holds windows and states as they are after the last token of all that it holds."""
        is_whole = all(group.retention.sees_all for group in self._groups)
        if taken == offered or (taken < offered and is_whole):
            return ""
        return (
            f"blocks were given for {taken} of the {offered} tokens that were offered; accepted: all of them"
            + ", or fewer" * is_whole
        )

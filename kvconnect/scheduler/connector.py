"""The scheduler half of the connector: what to fetch, what to hold, what to tell the worker.

Lives beside a request scheduler, in the terms of vLLM's contract, so that the class that vLLM loads
is thin. It has no engine, no socket and no tensor; no hook waits for anything. Randomness is an
argument.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, KeysView, Mapping, Sequence
from typing import Any

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.errors import LocalError
from kvconnect.orders import (
    Await,
    Expect,
    Hold,
    LetGo,
    Load,
    Orders,
    RankAddress,
    RequestView,
    Results,
    Withdraw,
)
from kvconnect.scheduler.blocks import BlockIdsByGroup, blocks_of
from kvconnect.scheduler.early import EarlyLoads, LongestRequest
from kvconnect.scheduler.handles import MOST_TOKENS, Claims, Handles
from kvconnect.scheduler.held import Held
from kvconnect.scheduler.params import (
    HANDLE_KEY,
    TRANSFER_KEY,
    RemotePrefill,
    read_remote_prefill,
    read_transfer_id,
    transfer_name,
    transfer_params,
)
from kvconnect.scheduler.promises import Promises
from kvconnect.scheduler.prompts import PROMPT_BYTES, PromptDigest, untold
from kvconnect.scheduler.shares import Share, Shares, Turn
from kvconnect.scheduler.streams import Streams
from kvconnect.scheduler.trust import PeerTrust

logger = logging.getLogger(__name__)


class SchedulerConnector:
    """Decides, per request, whether its KV is fetched, computed or handed out.

    Args:
        config: the parsed ``kv_transfer_config``.
        cache_config: the cache as the scheduler knows it; only block sizes and kinds are read.
        directory: where the worker ranks listen, rank 0 first.
        held_back: tokens at the end of a prompt that P must not compute and D always computes itself, for
            a serving stack's own reasons; caches with recurrent state need 1 in any case.
        new_handle: makes an unguessable string.
        handles: makes the handles of requests, and reads those of peers.
        trust: whom to fetch from; left out, whoever a request names.
        parent_of: what the ids of requests have in common that a serving stack made of one.
        prompt_digest: what the prompt of a request is called; asked only about those that are handed over.
        longest: the longest request that may come; see ``EarlyLoads``.

    Raises:
        ConfigError: engine id and host are too long for a handle.
    """

    def __init__(
        self,
        config: TransferConfig,
        cache_config: KVCacheConfig,
        kernel_block_sizes: Mapping[int, int],
        *,
        directory: Sequence[RankAddress],
        held_back: int = 0,
        new_handle: Callable[[], str] = lambda: secrets.token_urlsafe(24),
        handles: Handles | None = None,
        trust: PeerTrust | None = None,
        parent_of: Callable[[str], str] = str,
        prompt_digest: PromptDigest = untold,
        longest: LongestRequest | None = None,
    ) -> None:
        if not directory:
            raise LocalError("the scheduler half needs the address of rank 0 at least")
        self._config = config
        self._groups = cache_config.groups
        # A recurrent state cannot be rolled back by the token that D computes itself.
        self._held_back = max(held_back, int(any(group.is_state for group in cache_config.groups)))
        self._directory = tuple(sorted(directory, key=lambda address: address.rank))
        self._directory_sent = False
        self._new_handle = new_handle
        self._handles = handles or Handles()
        self._trust = trust
        self._parent_of = parent_of
        self._prompt_digest = prompt_digest
        self._epoch = new_handle()
        if config.is_producer:
            # Said now if it cannot be: later it would end the scheduler. With the longest that it may sign.
            self._sign(transfer_name(""), MOST_TOKENS, bytes(PROMPT_BYTES))
        self._holds: list[Hold] = []
        self._loads: list[Load] = []
        self._let_go: list[LetGo] = []
        self._awaited: dict[str, Await] = {}
        self._aborted: list[str] = []
        self._expected: list[Expect] = []
        self._withdrawn: list[Withdraw] = []
        self._failures: list[str] = []
        self._held = Held()
        self._shares = Shares()
        self._promises = Promises()
        extra = config.extra
        self._early = EarlyLoads(self._groups, cache_config.num_blocks, longest, extra.max_loads)
        self._streams = Streams(self._groups, extra.stream_min_tokens if extra.has_slots else 0)
        self._began_before_reset: dict[str, bool] = {}
        self._said: set[str] = set()
        self._draining = False

    def drain(self) -> None:
        """Hold nothing any more: requests that end are answered without parameters. From any thread."""
        self._draining = True

    def new_request(self, request: RequestView) -> None:
        """A request arrived; before anything else is asked about it. Raises nothing.

        On P a router's transfer id is taken note of here: without this call nothing is held for it. On
        D it makes requests of one handle known to each other before the first of them is admitted.
        """
        if not transfer_params(request):
            return
        self._share(request)
        if self._wants_decode(request):
            self._promise(request)

    def prefill_tokens(self, request: RequestView) -> int:
        """How many tokens of its prompt P computes: all but those that it has to leave to D."""
        if self._wants_decode(request):
            return max(1, request.num_tokens - self._held_back)
        return request.num_tokens

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed_tokens`` that can be fetched, and whether that is asynchronous.

        Asked on every attempt to admit the request; answers the same until it was admitted. None: ask
        again, another request of this node is fetching the same, or P is still computing it and there is no
        room for more of that kind.
        """
        share = self._share(request)
        if share is None:
            return 0, False
        count = self._wanted_tokens(request) - num_computed_tokens
        turn = self._shares.turn(request.request_id, share)
        if count <= 0 or turn is Turn.COMPUTE:
            return 0, False
        if turn is Turn.WAIT or not (share.spent or self._may_load(share.remote, request.num_tokens)):
            return None, False
        share.starts[request.request_id] = num_computed_tokens
        return count, True

    def _may_load(self, remote: RemotePrefill, num_tokens: int) -> bool:
        """Whether a load may have blocks now; otherwise P is asked for when it may."""
        if not remote.is_announced or self._early.may_begin(remote.handle, num_tokens):
            return True
        if self._early.wait(remote.handle):
            self._await(remote, reports=True)
        return False

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        """Blocks were given to a request.

        ``block_ids`` are those of the whole request, per group and by position; 0 where a position
        has no block. ``num_external_tokens`` may be less than ``matched_tokens`` offered: the first of
        these tokens; it is 0 whenever nothing is to be fetched.
        """
        if self._wants_decode(request):
            self._began_before_reset[request.request_id] = False
        share = self._share(request)
        if share is None or request.request_id in share.decided:
            return
        remote = share.remote
        if num_external_tokens <= 0:
            if self._shares.compute(request.request_id, share):
                self._release(request.request_id, remote)
            return
        wanted = self._wanted_tokens(request)
        first = share.starts.get(request.request_id, wanted - num_external_tokens)
        end = first + num_external_tokens
        refusal = (
            remote.refusal
            or self._prompt_refusal(request, remote)
            or self._part_refusal(num_external_tokens, wanted - first)
        )
        handle = remote.handle
        if not self._shares.fetch(request.request_id, share):
            # Without the handle: a worker lets go of what it could not load, and this is another's.
            handle = ""
            refusal = share.failure or "another request of this node has fetched under its handle"
        self._awaited.pop(handle, None)
        if remote.is_announced and handle:
            self._early.begin(request.request_id, handle, request.num_tokens)
        self._loads.append(
            Load(
                request_id=request.request_id,
                handle=handle,
                engine_id=remote.engine_id,
                host=remote.host,
                port=remote.port,
                num_tokens=wanted,
                groups=blocks_of(self._groups, block_ids, first, end),
                refusal=refusal,
            )
        )

    @property
    def streaming(self) -> KeysView[str]:
        """Requests whose progress is of interest. A view: it stays true, and may be kept."""
        return self._streams.request_ids

    def progress(
        self, request_id: str, num_computed_tokens: int, new_block_ids: BlockIdsByGroup | None
    ) -> None:
        """A prefill went on: what the device was given before the next orders makes so many tokens.

        ``new_block_ids`` are, by group and position, the blocks that the request got since this was last
        called for it, or was preempted; None for no new ones. Of a request that is not in ``streaming``
        nothing is taken note of.
        """
        self._streams.progress(request_id, num_computed_tokens, new_block_ids)

    def preempted(self, request_id: str) -> None:
        """A running request lost its blocks, and will be computed anew."""
        self._streams.preempted(request_id)

    def reset(self) -> None:
        """What the device holds may be of other weights than what it computes next.

        Requests that have blocks now are not handed over, unless they lose these and begin anew.
        """
        self._began_before_reset = dict.fromkeys(self._began_before_reset, True)
        self._held.reset()

    def build_orders(self) -> Orders:
        """The orders since the last call; once per step, also for a step without tokens."""
        preempted, progress = self._streams.take()
        for request_id in self._aborted:
            self._shares.cancel(request_id)
        orders = Orders(
            holds=tuple(self._holds),
            loads=tuple(self._loads),
            let_go=tuple(self._let_go),
            aborted=tuple(self._aborted),
            directory=() if self._directory_sent else self._directory,
            expected=tuple(self._expected),
            withdrawn=tuple(self._withdrawn),
            failures=tuple(self._failures),
            preempted=preempted,
            progress=progress,
            awaited=tuple(self._awaited.values()),
        )
        self._directory_sent = True
        self._holds, self._loads, self._let_go, self._aborted = [], [], [], []
        self._expected, self._withdrawn, self._failures, self._awaited = [], [], [], {}
        return orders

    def request_finished(
        self, request: RequestView, block_ids: BlockIdsByGroup, *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, and its blocks are about to be freed. Asked exactly once per request.

        ``delivered`` says that it ended normally, so that the parameters returned here reach the
        client. Returns whether the blocks must be kept until ``Results.sent`` has the request, and
        the parameters for D.
        """
        request_id = request.request_id
        if self._share(request) is not None and (unwanted := self._shares.leave(request_id)):
            # Rejected or aborted before it got blocks: P need not wait for it.
            self._release(request_id, unwanted.remote)
        if self._shares.is_loading(request_id):
            self._aborted.append(request_id)
        if not self._wants_decode(request):
            return False, None
        self._streams.end(request_id)
        kept, params = False, None
        reason = "the prefill was aborted, or failed"
        if self._began_before_reset.pop(request_id, False):
            reason = "the prefill began before the caches were reset"
        elif delivered and not self._shares.is_loading(request_id):
            params = self._held.params(self._parent_of(request_id))
            if params is None:
                kept, params, reason = self._hold(request, block_ids)
        if not kept and (handle := self._promises.of(request_id)) is not None:
            self._promises.end(request_id)
            self._withdraw(handle, reason)
        return kept, params

    def update_results(self, results: Results) -> None:
        """What the workers reported, after all of them did."""
        for request_id in results.sent:
            self._held.sent(request_id)
            self._promises.end(request_id)
        for request_id in results.received:
            self._shares.loaded(request_id, results.failed.get(request_id, ""))
            self._early.end(request_id)
        self._early.settled(results.settled)

    def state(self) -> dict[str, int]:
        """Counts of what is remembered. All zero when idle."""
        return {
            "held": len(self._held),
            "promised": len(self._promises),
            "loading": self._shares.num_loading,
            "sharing": len(self._shares),
            "streaming": len(self._streams),
            "computing": len(self._began_before_reset),
            "early": len(self._early),
        }

    def _wants_decode(self, request: RequestView) -> bool:
        return self._config.is_producer and bool(transfer_params(request).get("do_remote_decode"))

    def _share(self, request: RequestView) -> Share | None:
        """The handle that a request names on D, with all that name it; None if it is not fetched."""
        if not self._config.is_consumer or not transfer_params(request):
            return None
        share = self._shares.of(request.request_id)
        if share is not None:
            return share
        params = transfer_params(request)
        if not params.get("do_remote_prefill"):
            return None
        prompt = self._prompt_digest(request, max(1, self._wanted_tokens(request)))
        remote = read_remote_prefill(params, self._handles, prompt)
        if remote is None:
            return None
        share = self._shares.join(request.request_id, self._checked(remote))
        if not share.spent and not share.remote.refusal:
            self._await(share.remote)
        return share

    def _await(self, remote: RemotePrefill, *, reports: bool = False) -> None:
        """A request waits for blocks: what P holds for it is kept. Not told if it is over within the step."""
        order = Await(remote.handle, remote.engine_id, remote.host, remote.port, reports)
        self._awaited[remote.handle] = order

    def _checked(self, remote: RemotePrefill) -> RemotePrefill:
        """The same, refused and counted if it is not to be trusted."""
        if remote.is_of_other_prompt:
            self._complain("prompt_differs", "a request has the handle of another prompt, and is computed")
        elif remote.refusal:
            self._failures.append("parameters_refused")
        elif self._trust is not None:
            refusal = self._trust.refusal(remote.host, remote.port, vouched=remote.vouched)
            if refusal:
                self._failures.append("peer_not_trusted")
                return RemotePrefill(refusal=refusal)
        return remote

    def _promise(self, request: RequestView) -> None:
        """Take note of a router's transfer id: whoever fetches under it may come before the KV is there."""
        params = transfer_params(request)
        if params.get(TRANSFER_KEY) is None:
            return
        prompt = self._prompt_digest(request, self.prefill_tokens(request)) or b""
        transfer = read_transfer_id(params, prompt)
        if transfer is None:
            return
        if transfer.refusal:
            self._complain("transfer_id", "%s; its KV is not held", transfer.refusal)
        elif not self._promises.make(request.request_id, transfer.handle):
            owner = self._promises.owner(transfer.handle)
            if self._parent_of(owner) != self._parent_of(request.request_id):
                self._complain(
                    "transfer_id_in_use",
                    "request %s has a transfer id that another request is using; its KV is not held",
                    request.request_id,
                )
        elif len(self._promises) > self._config.extra.max_leases:
            self._promises.end(request.request_id)
            self._withdraw(transfer.handle, self._complain_full())
        else:
            self._expected.append(Expect(transfer.handle))
            self._streams.begin(request.request_id, transfer.handle, self.prefill_tokens(request))

    def _withdraw(self, handle: str, reason: str) -> None:
        # Ordered before what is expected: an id that is withdrawn may be used again in the same step.
        self._expected = [expected for expected in self._expected if expected.handle != handle]
        self._withdrawn.append(Withdraw(handle, f"no KV comes under this handle: {reason}"))

    def _complain(self, reason: str, text: str, *values: object) -> None:
        """Log a reason once, count it always."""
        self._failures.append(reason)
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(
                text + " (further ones are only counted, as failures with reason %s)", *values, reason
            )

    def _complain_full(self) -> str:
        reason = f"max_leases is {self._config.extra.max_leases}, and that many requests wait to be fetched"
        self._complain("max_leases", "%s: more are answered without KV until some are", reason)
        return reason

    def _wanted_tokens(self, request: RequestView) -> int:
        return request.num_tokens - self._held_back

    def _prompt_refusal(self, request: RequestView, remote: RemotePrefill) -> str:
        """The KV of another prompt is worse than none. Where its length was not told, P compares."""
        expected = max(1, self._wanted_tokens(request))
        if remote.num_tokens not in (0, expected):
            return (
                f"kv_transfer_params.remote_num_tokens is {remote.num_tokens}, this prompt needs {expected}: "
                "they are not of this prompt, or the two nodes run different models"
            )
        return ""

    def _part_refusal(self, taken: int, offered: int) -> str:
        """A peer holds windows and states as they are after the last token of all that it holds."""
        is_whole = not any(group.is_state or group.sliding_window for group in self._groups)
        if taken == offered or (taken < offered and is_whole):
            return ""
        return (
            f"blocks were given for {taken} of the {offered} tokens that were offered; accepted: all of them"
            + ", or fewer" * is_whole
        )

    def _release(self, request_id: str, remote: RemotePrefill) -> None:
        self._awaited.pop(remote.handle, None)
        self._early.forget(remote.handle)
        self._let_go.append(LetGo(request_id, remote.handle, remote.engine_id, remote.host, remote.port))

    def _hold(
        self, request: RequestView, block_ids: BlockIdsByGroup
    ) -> tuple[bool, dict[str, Any] | None, str]:
        """Whether a request is held, the parameters for D, and why it is not held."""
        # The last sampled token has no KV yet.
        num_tokens = request.num_tokens - 1
        if num_tokens < 1 or not any(any(ids) for ids in block_ids):
            return False, None, "the prompt left none"
        if self._draining:
            return False, None, "the prefill node is stopping"
        if len(self._held) >= self._config.extra.max_leases:
            return False, None, self._complain_full()
        handle = self._promises.of(request.request_id)
        prompt = self._prompt_digest(request, num_tokens) or b""
        if handle is None:
            if transfer_params(request).get(TRANSFER_KEY) is not None:
                return False, None, "its transfer id was refused"
            token = handle = self._sign(self._new_handle(), num_tokens, prompt)
        else:
            token = self._sign(transfer_name(handle), num_tokens, prompt)
        hold = Hold(
            request_id=request.request_id,
            handle=handle,
            num_tokens=num_tokens,
            groups=blocks_of(self._groups, block_ids, 0, num_tokens),
            lease_s=self._config.extra.lease_s,
        )
        self._holds.append(hold)
        params = self._params(hold, block_ids, token)
        if self._promises.of(request.request_id) is not None:
            params[TRANSFER_KEY] = transfer_params(request)[TRANSFER_KEY]
        self._held.add(request.request_id, self._parent_of(request.request_id), params)
        return True, params, ""

    def _sign(self, name: str, num_tokens: int, prompt: bytes) -> str:
        """What vouches to D for a request that is held."""
        address = self._directory[0]
        return self._handles.make(
            Claims(
                engine_id=self._config.engine_id,
                epoch=self._epoch,
                name=name,
                num_tokens=num_tokens,
                host=address.host,
                port=address.port,
                expires_at=self._handles.expiry(self._config.extra.lease_s),
                prompt=prompt,
            )
        )

    def _params(self, hold: Hold, block_ids: BlockIdsByGroup, token: str) -> dict[str, Any]:
        """What the router passes on to D: the shape that routers know, and our handle."""
        address = self._directory[0]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._config.engine_id,
            "remote_request_id": hold.request_id,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_host": address.host,
            "remote_port": address.port,
            "remote_num_tokens": hold.num_tokens,
            "tp_size": len(self._directory),
            HANDLE_KEY: token,
        }

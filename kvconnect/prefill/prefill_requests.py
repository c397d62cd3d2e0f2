"""The requests whose prompt P computes for a decode node, from their arrival until D has fetched them.

Long prompts that a router announced are streamed: their blocks and count of computed tokens go to the workers
step by step. Pure bookkeeping, bounded by ``max_leases``, empty when idle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvconnect.addresses import join_address
from kvconnect.cache.specs import KVCacheGroup, div_ceil
from kvconnect.config import RELEASE_KEY, TransferConfig
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.bootstrap import Bootstrap
from kvconnect.peer.handles import MOST_TOKENS, PROMPT_BYTES, Claims, Handles
from kvconnect.plan.blocks import BlockIdsByGroup, GroupBlocks
from kvconnect.timeline import Moment
from kvconnect.transfer.orders import Hold, OrdersDraft, Progress, Results, blocks_of
from kvconnect.transfer.params import (
    BATCH_KEY,
    HANDLE_KEY,
    MOST_LATER_PROMPTS,
    SOURCES_KEY,
    TRANSFER_KEY,
    is_release,
    read_release,
    read_transfer_id,
    transfer_name,
    transfer_params,
)
from kvconnect.transfer.stack import RequestView, StackTraits, Step

_ABORTED = Cause.PREFILL_ENDED("the prefill was aborted, or failed")
_STOPPING = Cause.STOPPING("the prefill node is stopping")
_PAUSED = Cause.STOPPING("the prefill node is paused, and frees all blocks, as before it sleeps")
_RELEASED = Cause.ABORTED("the router released it, as its client left")


@dataclass(eq=False)
class _Prefill:
    """One request that has not ended; ``handle`` is that of its transfer id, if the request owns one.

    ``release_name``: the router's name to release it by; ``is_released``: no decode node will fetch it.
    ``is_refused``: there was no room for it. ``has_blocks``: it was admitted; ``is_stale``: the caches were
    reset since. The device was given ``computed`` of its tokens by the end of ``step``. Where
    ``is_streamed``: ``known`` counts, by cache group, the block positions that were ordered.
    """

    handle: str = ""
    release_name: str = ""
    is_released: bool = False
    num_tokens: int = 0
    has_blocks: bool = False
    is_stale: bool = False
    is_refused: bool = False
    is_streamed: bool = False
    step: int = 0
    known: dict[int, int] = field(default_factory=dict)
    computed: int = 0


class PrefillRequests:
    """The requests that P computes for others: which are held, and the parameters for D.

    Only one request at a time may use a transfer id: a second one is computed, and not held. Where a stack
    splits a request into several with the same prompt, the router receives the parameters of the last that
    ends: so the first that ends is held, and all others answer with its parameters. Of a batch of prompts the
    router receives the first prompt's parameters, which name the batch: the later prompts are held under that
    name as under a transfer id. Without room for them, the batch is not named. A promised request keeps its
    place.
    """

    def __init__(
        self,
        config: TransferConfig,
        groups: Sequence[KVCacheGroup],
        stack: StackTraits,
        handles: Handles,
        new_handle: Callable[[], str],
        draft: OrdersDraft,
    ) -> None:
        self._config, self._groups, self._draft = config, groups, draft
        self._extra, self._batch_of = config.extra, stack.batch_of
        self._stack, self._handles, self._new_handle = stack, handles, new_handle
        self._directory = tuple(draft.directory)
        self._epoch, self._batch_secret = new_handle(), new_handle()
        # With the longest claims, so that an error is raised now: later it would end the scheduler.
        self._sign(transfer_name(""), MOST_TOKENS, bytes(PROMPT_BYTES))
        self._requests: dict[str, _Prefill] = {}
        # By handle the request that is held under it, or was promised it as the handle of its transfer id.
        self._owners: dict[str, str] = {}
        # By id the handle of each held request, and the router's name to release it by.
        self._held: dict[str, tuple[str, str]] = {}
        # The requests of each such name, as keys: in the sequence of their arrival.
        self._releasable: dict[str, dict[str, None]] = {}
        # Handles of held requests that are to be given up, with the reason.
        self._given_up: dict[str, Reason] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._draining: Reason | None = None
        self.bootstrap: Bootstrap | None = None
        """Serves routers that use Mooncake's protocol, until the node drains."""
        self.keeps_named = False
        """Peers may fetch what this node keeps by name."""
        # States are not streamed: they are sent last.
        tokens = {i: g.block_size for i, g in enumerate(groups) if g.has_cache and not g.is_state}
        self._streamed_groups = tokens if config.extra.stream_min_tokens else {}
        self.due: dict[str, int] = {}
        """By request: computed tokens from which ``launched`` has to name it; 0 (streamed): in every step."""

    def drain(self) -> None:
        """Hold no further request. Callable from any thread."""
        if self.bootstrap is not None:
            self.bootstrap.close()
        self._draining = _STOPPING

    def pause(self) -> None:
        """The stack waits until no request holds blocks: give up those that are held, and hold none."""
        self._draining = self._draining or _PAUSED
        self._given_up.update((handle, _PAUSED) for handle, _ in self._held.values())

    def resume(self) -> None:
        """The stack goes on after a pause."""
        if self._draining is _PAUSED:
            self._draining = None

    def prefill_tokens(self, request: RequestView) -> int:
        """The prompt tokens that P computes: all but those that P has to leave to D."""
        prefill = self._requests.get(request.request_id)
        return request.num_tokens if prefill is None else prefill.num_tokens

    def new_request(self, request: RequestView) -> None:
        """Note a request to be held, and a router's transfer id, under which a peer may fetch early.

        A request that releases others is carried out at once.
        """
        asked = transfer_params(request)
        if not asked.get("do_remote_decode"):
            if is_release(asked):
                self._release(request)
            return
        num_tokens, request_id = max(1, request.num_tokens - self._stack.held_back), request.request_id
        self._requests[request_id] = prefill = _Prefill(num_tokens=num_tokens)
        self._draft.note(Moment.QUEUED, "", request_id, num_tokens)
        params, is_routers = self._named(request)
        if RELEASE_KEY in params and (name := self._release_name(request)):
            prefill.release_name = name
            self._releasable.setdefault(name, {})[request_id] = None
        if params.get(TRANSFER_KEY) is None:
            return
        try:
            handle = read_transfer_id(params, self._stack.prompt_digest(request, num_tokens) or b"")
        except PeerError as error:
            self._draft.warn("transfer_id", "%s; its KV is not held", error)
            return
        parent_of, owner = self._stack.parent_of, self._owners.get(handle, request_id)
        if owner != request_id:
            # A batch may have one prompt twice: a decode node fetches it once, so this is no error.
            if is_routers and parent_of(owner) != parent_of(request_id):
                self._draft.warn(
                    "transfer_id_in_use",
                    "request %s has a transfer_id that another request is using, and its KV is not held: the "
                    "router has to name each by its own",
                    request_id,
                )
        elif self._is_full:
            prefill.is_refused = True
            self._draft.withdraw(handle, self._refuse_full())
        else:
            self._owners[handle] = request_id
            prefill.handle = handle
            self._draft.expected.append(handle)
            if is_routers and self._streamed_groups and num_tokens >= self._extra.stream_min_tokens:
                prefill.is_streamed = True
                self.due[request_id] = 0

    def update_after_alloc(self, request: RequestView) -> None:
        """A request was given blocks, and begins anew with them."""
        if (prefill := self._requests.get(request.request_id)) is not None:
            prefill.has_blocks, prefill.is_stale = True, False
            self._draft.note(Moment.ADMITTED, prefill.handle, request.request_id)
            self.preempted(request.request_id)
            self.due[request.request_id] = 0 if prefill.is_streamed else prefill.num_tokens

    def launched(self, step: Step) -> None:
        """Take a step that was given to the device: the requests it computes, and their new blocks."""
        for request_id, computed_tokens, new_block_ids in step.computed:
            prefill = self._requests.get(request_id)
            if prefill is None:
                continue
            before = prefill.computed
            if prefill.computed < prefill.num_tokens:
                prefill.computed = max(prefill.computed, min(computed_tokens, prefill.num_tokens))
                prefill.step = self._draft.step
                self._draft.note(Moment.LAUNCHED, prefill.handle, request_id, prefill.computed)
                if prefill.computed == prefill.num_tokens and not prefill.is_streamed:
                    self.due.pop(request_id, None)
            if prefill.is_streamed:
                groups = tuple(self._new_blocks(prefill, new_block_ids or ()))
                if groups or prefill.computed > before:
                    self._draft.progress.append(
                        Progress(prefill.handle, prefill.num_tokens, prefill.computed, groups)
                    )

    def _new_blocks(self, prefill: _Prefill, new_block_ids: BlockIdsByGroup) -> Iterator[GroupBlocks]:
        for group, tokens in self._streamed_groups.items() if new_block_ids else ():
            known = prefill.known.get(group, 0)
            # Blocks beyond the prompt are never sent.
            wanted = tuple(new_block_ids[group][: max(0, div_ceil(prefill.num_tokens, tokens) - known)])
            if wanted:
                prefill.known[group] = known + len(wanted)
                yield GroupBlocks(group, known, wanted)

    def _take_back(self, prefill: _Prefill) -> None:
        """A request lost its blocks, or has ended: progress that the workers have not received is void."""
        progress = self._draft.progress
        progress[:] = [order for order in progress if order.handle != prefill.handle]

    def preempted(self, request_id: str) -> None:
        """A prefill lost its blocks."""
        prefill = self._requests.get(request_id)
        # Without blocks sent to the workers or tokens computed, the request begins anew all the same.
        if prefill is None or not (prefill.computed or prefill.known):
            return
        if prefill.is_streamed and prefill.handle not in self._draft.preempted:
            self._draft.preempted.append(prefill.handle)
        self._take_back(prefill)
        prefill.known, prefill.computed = {}, 0

    def ordered(self) -> None:
        """Before the draft is taken: give up held requests.

        One that is held by these orders waits, as holds are taken last.
        """
        if not self._given_up:
            return
        given_up, self._given_up = self._given_up, {}
        begun = {hold.handle for hold in self._draft.holds}
        for handle, reason in given_up.items():
            if handle in begun:
                self._given_up[handle] = reason
            else:
                self._draft.withdraw(handle, reason)

    def reset(self) -> None:
        """The caches were reset: requests with blocks are not held, unless they lose these and begin anew."""
        for prefill in self._requests.values():
            prefill.is_stale = prefill.has_blocks
        self._answers.clear()

    def request_finished(
        self, request: RequestView, block_ids: BlockIdsByGroup, *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Returns whether its blocks are held, and the parameters for D."""
        request_id, asked = request.request_id, transfer_params(request)
        if not asked.get("do_remote_decode"):
            if not (self.keeps_named and delivered and asked.get("do_remote_prefill")):
                return False, None
            # It was fetched here, and this node may prefill the next turn too.
            rank0 = self._directory[0]
            return False, {SOURCES_KEY: [join_address(rank0.host, rank0.port)]}
        prefill = self._requests.pop(request_id, None) or _Prefill()
        self.due.pop(request_id, None)
        self._take_back(prefill)
        if prefill.handle in self._draft.preempted:
            # The workers have not received this preemption, and need it no more.
            self._draft.preempted.remove(prefill.handle)
        parent = self._stack.parent_of(request_id)
        params, reason = None, _ABORTED
        if prefill.is_stale:
            reason = Cause.REPLACED("the prefill began before the caches were reset")
        elif prefill.is_released:
            reason = _RELEASED
        elif delivered:
            if (answer := self._answers.get(parent)) is not None:
                params = dict(answer)
            else:
                held = self._hold(request, block_ids, prefill)
                if not isinstance(held, Reason):
                    self._answers[parent] = dict(held)
                    return True, held
                reason = held
        self._forget(prefill.release_name, request_id)
        if prefill.handle:
            del self._owners[prefill.handle]
            self._draft.withdraw(prefill.handle, reason)
        return False, params

    def update_results(self, results: Results) -> None:
        """Take the workers' results: free the requests whose leases have ended."""
        for request_id in results.sent:
            if (held := self._held.pop(request_id, None)) is not None:
                handle, release_name = held
                self._draft.note(Moment.FREED, "", request_id)
                del self._owners[handle]
                self._forget(release_name, request_id)
                self._answers.pop(self._stack.parent_of(request_id), None)

    def state(self) -> dict[str, int]:
        """Counts of the requests kept here. All zero when idle."""
        return {
            "held": len(self._held),
            "promised": len(self._owners) - len(self._held),
            "streaming": sum(prefill.is_streamed for prefill in self._requests.values()),
            "computing": sum(prefill.has_blocks for prefill in self._requests.values()),
            "releasable": sum(map(len, self._releasable.values())),
        }

    def _release(self, request: RequestView) -> None:
        """End what is held for the requests of a router's name, and hold none of those that are computed."""
        for request_id in self._releasable.pop(self._release_name(request), ()):
            if request_id in self._held:
                self._given_up[self._held[request_id][0]] = _RELEASED
            else:
                self._requests[request_id].is_released = True

    def _forget(self, release_name: str, request_id: str) -> None:
        """A request can no longer be released."""
        named = self._releasable.get(release_name, {})
        named.pop(request_id, None)
        if not named:
            self._releasable.pop(release_name, None)

    def _release_name(self, request: RequestView) -> str:
        """The router's name that a request has; empty without one, or one that cannot be used."""
        try:
            return read_release(transfer_params(request))
        except PeerError as error:
            self._draft.warn("release", "%s; nothing is released by it", error)
            return ""

    @property
    def _is_full(self) -> bool:
        """``max_leases`` requests are held or promised: each of them has its place."""
        return len(self._owners) >= self._extra.max_leases

    def _refuse_full(self) -> Reason:
        reason = Cause.BUSY(
            f"{self._extra.max_leases} requests wait to be fetched, and the prefill node holds no more"
        )
        self._draft.warn("max_leases", "%s: prompts are answered without KV until some are fetched", reason)
        return reason

    def _hold(
        self, request: RequestView, block_ids: BlockIdsByGroup, prefill: _Prefill
    ) -> dict[str, Any] | Reason:
        """Hold a request. Returns the parameters for D, or why it is not held."""
        # The last sampled token has no KV yet.
        num_tokens, handle = request.num_tokens - 1, prefill.handle
        if num_tokens < 1 or not any(any(ids) for ids in block_ids):
            return Cause.NOT_HELD("the prompt leaves no KV to hold")
        if self._draining:
            return self._draining
        if not handle and self._is_full:
            return self._refuse_full()
        transfer_id = self._named(request)[0].get(TRANSFER_KEY)
        if transfer_id is not None and not handle:
            return Cause.PARAMETERS("its transfer id was refused")
        prompt = self._stack.prompt_digest(request, num_tokens) or b""
        token = self._sign(transfer_name(handle) if handle else self._new_handle(), num_tokens, prompt)
        groups = blocks_of(self._groups, block_ids, 0, num_tokens)
        # A stack that runs ahead has given the device more steps since the prompt was complete.
        step = prefill.step if prefill.computed >= num_tokens else self._draft.step
        self._draft.holds.append(Hold(request.request_id, handle or token, num_tokens, groups, step))
        self._draft.note(Moment.COMPUTED, handle or token, request.request_id, num_tokens)
        # The router passes these on to D: the keys that routers know, and P's handle.
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._config.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_host": self._directory[0].host,
            "remote_port": self._directory[0].port,
            "remote_num_tokens": num_tokens,
            "tp_size": len(self._directory),
            HANDLE_KEY: token,
        }
        batch, number = self._batch_of(request.request_id) if self._batch_of is not None else ("", 0)
        if handle:
            params[TRANSFER_KEY] = transfer_id
        elif batch and not number and self._takes_all_of(batch):
            params[BATCH_KEY] = self._batch_id(batch)
        self._held[request.request_id] = handle or token, prefill.release_name
        self._owners[handle or token] = request.request_id
        return params

    def _takes_all_of(self, batch: str) -> bool:
        """Whether P can hold the later prompts of a batch: none that came was refused, and there is room."""
        refused = (request_id for request_id, prefill in self._requests.items() if prefill.is_refused)
        batch_of = self._batch_of
        return not self._is_full and not any(batch_of and batch_of(one)[0] == batch for one in refused)

    def _named(self, request: RequestView) -> tuple[Mapping[str, Any], bool]:
        """A request's parameters; and False for a batch's later prompt, whose transfer id is the batch's."""
        params = transfer_params(request)
        if self._batch_of is None or params.get(TRANSFER_KEY) is not None:
            return params, True
        batch, number = self._batch_of(request.request_id)
        if not 0 < number <= MOST_LATER_PROMPTS:
            return params, True
        return {**params, TRANSFER_KEY: self._batch_id(batch)}, False

    def _batch_id(self, batch: str) -> str:
        """The id of a batch, with a secret: clients may choose the stack's name of it, but not this id."""
        return hashlib.sha256(f"{self._batch_secret} {batch}".encode()).hexdigest()[:32]

    def _sign(self, name: str, num_tokens: int, prompt: bytes) -> str:
        """The signed token that proves to D what P holds under ``name``."""
        return self._handles.make(
            Claims(
                engine_id=self._config.engine_id,
                epoch=self._epoch,
                name=name,
                num_tokens=num_tokens,
                host=self._directory[0].host,
                port=self._directory[0].port,
                expires_at=self._handles.clock() + self._extra.lease_s,
                prompt=prompt,
                identity=self._stack.identity().marks,
            )
        )

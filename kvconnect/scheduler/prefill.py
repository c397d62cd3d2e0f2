"""The requests whose prompt P computes for a decode node, from their arrival until they were fetched.

Pure bookkeeping, bounded by ``max_leases``, empty when idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect.cache.specs import KVCacheGroup
from kvconnect.config import TransferConfig
from kvconnect.orders import Expect, Hold, RankAddress
from kvconnect.scheduler.blocks import blocks_of
from kvconnect.scheduler.draft import OrdersDraft
from kvconnect.scheduler.handles import MOST_TOKENS, Claims, Handles
from kvconnect.scheduler.params import (
    HANDLE_KEY,
    TRANSFER_KEY,
    read_transfer_id,
    transfer_name,
    transfer_params,
)
from kvconnect.scheduler.prompts import PROMPT_BYTES
from kvconnect.scheduler.stack import BlockIdsByGroup, RequestView, StackTraits
from kvconnect.scheduler.streams import Streams


@dataclass(eq=False)
class _Prefill:
    """One request that has not ended. ``handle`` is that of the transfer id that it owns.

    ``has_blocks`` since it was admitted; ``is_stale`` once caches were reset after that.
    """

    handle: str = ""
    has_blocks: bool = False
    is_stale: bool = False


class PrefillRequests:
    """What P holds and hands out.

    A transfer id is good for one request at a time: a second one that names it is computed, and holds
    nothing. Where a stack makes several requests of one, all have the same prompt, and the router is given
    the parameters of whichever ends last: the first that ends is held, and the others are answered with its
    parameters.

    Raises:
        ConfigError: engine id and host are too long for a handle.
    """

    def __init__(
        self,
        config: TransferConfig,
        groups: Sequence[KVCacheGroup],
        directory: Sequence[RankAddress],
        stack: StackTraits,
        handles: Handles,
        new_handle: Callable[[], str],
        draft: OrdersDraft,
    ) -> None:
        self._config, self._groups, self._directory = config, groups, directory
        self._stack, self._handles, self._new_handle = stack, handles, new_handle
        self._draft = draft
        self._epoch = new_handle()
        # Raised now if it must be: later it would end the scheduler. With the longest that it may sign.
        self._sign(transfer_name(""), MOST_TOKENS, bytes(PROMPT_BYTES))
        extra = config.extra
        self.streams = Streams(groups, extra.stream_min_tokens if extra.has_slots else 0)
        self._requests: dict[str, _Prefill] = {}
        self._owners: dict[str, str] = {}
        self._held: dict[str, tuple[str, str]] = {}
        """Leases by request: its parent, and the handle of its transfer id."""
        self._answers: dict[str, dict[str, Any]] = {}
        self._draining = False

    def drain(self) -> None:
        """Hold nothing any more. From any thread."""
        self._draining = True

    def prefill_tokens(self, request: RequestView) -> int:
        """How many tokens of its prompt P computes: all but those that it has to leave to D."""
        if _wants_decode(request):
            return max(1, request.num_tokens - self._stack.held_back)
        return request.num_tokens

    def arrive(self, request: RequestView) -> None:
        """Take note of a router's transfer id: a peer may fetch under it before the KV is there."""
        params = transfer_params(request)
        if not _wants_decode(request) or params.get(TRANSFER_KEY) is None:
            return
        num_tokens = self.prefill_tokens(request)
        transfer = read_transfer_id(params, self._stack.prompt_digest(request, num_tokens) or b"")
        if transfer is None:
            return
        handle, request_id = transfer.handle, request.request_id
        parent_of, owner = self._stack.parent_of, self._owners.get(transfer.handle, request_id)
        if transfer.refusal:
            self._draft.warn("transfer_id", "%s; its KV is not held", transfer.refusal)
        elif owner != request_id:
            if parent_of(owner) != parent_of(request_id):
                self._draft.warn(
                    "transfer_id_in_use",
                    "request %s has a transfer id that another request is using; its KV is not held",
                    request_id,
                )
        elif len(self._owners) >= self._config.extra.max_leases:
            self._draft.withdraw(handle, self._refuse_full())
        else:
            self._owners[handle] = request_id
            self._requests.setdefault(request_id, _Prefill()).handle = handle
            self._draft.expected.append(Expect(handle))
            self.streams.begin(request_id, handle, num_tokens)

    def admitted(self, request: RequestView) -> None:
        """Blocks were given to a request, and it begins anew with them."""
        if _wants_decode(request):
            prefill = self._requests.setdefault(request.request_id, _Prefill())
            prefill.has_blocks, prefill.is_stale = True, False
            self.streams.preempted(request.request_id)

    def reset(self) -> None:
        """Requests that have blocks now are not handed over, unless they lose these and begin anew."""
        for prefill in self._requests.values():
            prefill.is_stale = prefill.has_blocks
        self._answers.clear()

    def finished(
        self, request: RequestView, block_ids: BlockIdsByGroup, *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks are held, and the parameters for D."""
        if not _wants_decode(request):
            return False, None
        request_id = request.request_id
        self.streams.end(request_id)
        prefill = self._requests.pop(request_id, None) or _Prefill()
        parent = self._stack.parent_of(request_id)
        params, reason = None, "the prefill was aborted, or failed"
        if prefill.is_stale:
            reason = "the prefill began before the caches were reset"
        elif delivered:
            if (answer := self._answers.get(parent)) is not None:
                params = dict(answer)
            else:
                params, reason = self._hold(request, block_ids, prefill.handle)
                if params is not None:
                    self._held[request_id] = (parent, prefill.handle)
                    self._answers[parent] = dict(params)
                    return True, params
        if prefill.handle:
            del self._owners[prefill.handle]
            self._draft.withdraw(prefill.handle, reason)
        return False, params

    def sent(self, request_id: str) -> None:
        """A lease is over."""
        if request_id in self._held:
            parent, handle = self._held.pop(request_id)
            self._owners.pop(handle, None)
            self._answers.pop(parent, None)

    def state(self) -> dict[str, int]:
        """Counts of what is remembered. All zero when idle."""
        return {
            "held": len(self._held),
            "promised": len(self._owners),
            "streaming": len(self.streams),
            "computing": sum(prefill.has_blocks for prefill in self._requests.values()),
        }

    def _refuse_full(self) -> str:
        reason = f"max_leases is {self._config.extra.max_leases}, and that many requests wait to be fetched"
        self._draft.warn("max_leases", "%s: more are answered without KV until some are", reason)
        return reason

    def _hold(
        self, request: RequestView, block_ids: BlockIdsByGroup, handle: str
    ) -> tuple[dict[str, Any] | None, str]:
        """Hold a request: the parameters for D, or None and why it is not held."""
        # The last sampled token has no KV yet.
        num_tokens = request.num_tokens - 1
        if num_tokens < 1 or not any(any(ids) for ids in block_ids):
            return None, "the prompt left none"
        if self._draining:
            return None, "the prefill node is stopping"
        if len(self._held) >= self._config.extra.max_leases:
            return None, self._refuse_full()
        transfer_id = transfer_params(request).get(TRANSFER_KEY)
        if transfer_id is not None and not handle:
            return None, "its transfer id was refused"
        prompt = self._stack.prompt_digest(request, num_tokens) or b""
        name = transfer_name(handle) if handle else self._new_handle()
        token = self._sign(name, num_tokens, prompt)
        groups = blocks_of(self._groups, block_ids, 0, num_tokens)
        lease_s = self._config.extra.lease_s
        self._draft.holds.append(Hold(request.request_id, handle or token, num_tokens, groups, lease_s))
        # What the router passes on to D: the shape that routers know, and our handle.
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
        if handle:
            params[TRANSFER_KEY] = transfer_id
        return params, ""

    def _sign(self, name: str, num_tokens: int, prompt: bytes) -> str:
        """What vouches to D for a request that is held."""
        return self._handles.make(
            Claims(
                engine_id=self._config.engine_id,
                epoch=self._epoch,
                name=name,
                num_tokens=num_tokens,
                host=self._directory[0].host,
                port=self._directory[0].port,
                expires_at=self._handles.expiry(self._config.extra.lease_s),
                prompt=prompt,
            )
        )


def _wants_decode(request: RequestView) -> bool:
    return bool(transfer_params(request).get("do_remote_decode"))

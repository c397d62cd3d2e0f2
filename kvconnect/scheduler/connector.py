"""The scheduler half of the connector: what to fetch, what to hold, what to tell the worker.

Lives beside a request scheduler, in the terms of vLLM's contract, so that the class that vLLM loads
is thin. It has no engine, no socket and no tensor; no hook waits for anything. Randomness is an
argument.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.errors import LocalError
from kvconnect.orders import (
    GroupBlocks,
    Hold,
    LetGo,
    Load,
    Orders,
    RankAddress,
    RequestView,
    Results,
)
from kvconnect.scheduler.params import HANDLE_KEY, RemotePrefill, read_remote_prefill

logger = logging.getLogger(__name__)

BlockIdsByGroup = Sequence[Sequence[int]]


class SchedulerConnector:
    """Decides, per request, whether its KV is fetched, computed or handed out.

    Args:
        config: the parsed ``kv_transfer_config``.
        cache_config: the cache as the scheduler knows it; only block sizes and kinds are read.
        directory: where the worker ranks listen, rank 0 first.
        new_handle: makes an unguessable string.
    """

    def __init__(
        self,
        config: TransferConfig,
        cache_config: KVCacheConfig,
        kernel_block_sizes: Mapping[int, int],
        *,
        directory: Sequence[RankAddress],
        new_handle: Callable[[], str] = lambda: secrets.token_urlsafe(24),
    ) -> None:
        if not directory:
            raise LocalError("the scheduler half needs the address of rank 0 at least")
        self._config = config
        self._groups = cache_config.groups
        self._has_state = any(group.is_state for group in cache_config.groups)
        self._directory = tuple(sorted(directory, key=lambda address: address.rank))
        self._directory_sent = False
        self._new_handle = new_handle
        self._holds: list[Hold] = []
        self._loads: list[Load] = []
        self._let_go: list[LetGo] = []
        self._aborted: list[str] = []
        self._held: set[str] = set()
        self._loading: set[str] = set()
        self._settled: set[str] = set()
        self._said_full = False

    def prefill_tokens(self, request: RequestView) -> int:
        """How many tokens of its prompt P computes.

        A recurrent state cannot be rolled back, and D computes the last token itself: P stops one
        token earlier then.
        """
        if self._has_state and self._wants_decode(request):
            return max(1, request.num_tokens - 1)
        return request.num_tokens

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed_tokens`` that can be fetched, and whether that is asynchronous.

        Asked on every attempt to admit the request; answers the same until it was admitted.
        """
        remote = self._remote_prefill(request)
        if remote is None:
            return 0, False
        count = self._wanted_tokens(request) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        """Blocks were given to a request.

        ``block_ids`` are those of the whole request, per group and by position; 0 where a position
        has no block. ``num_external_tokens`` may be less than ``matched_tokens`` offered, and is 0
        whenever nothing is to be fetched.
        """
        remote = self._remote_prefill(request)
        if remote is None:
            return
        self._settled.add(request.request_id)
        if num_external_tokens <= 0:
            self._release(request.request_id, remote)
            return
        wanted = self._wanted_tokens(request)
        self._loading.add(request.request_id)
        self._loads.append(
            Load(
                request_id=request.request_id,
                handle=remote.handle,
                engine_id=remote.engine_id,
                host=remote.host,
                port=remote.port,
                num_tokens=wanted,
                groups=self._blocks(block_ids, wanted - num_external_tokens, wanted),
                refusal=remote.refusal or self._prompt_refusal(request, remote),
            )
        )

    def build_orders(self) -> Orders:
        """The orders since the last call; once per step, also for a step without tokens."""
        orders = Orders(
            holds=tuple(self._holds),
            loads=tuple(self._loads),
            let_go=tuple(self._let_go),
            aborted=tuple(self._aborted),
            directory=() if self._directory_sent else self._directory,
        )
        self._directory_sent = True
        self._holds, self._loads, self._let_go, self._aborted = [], [], [], []
        return orders

    def request_finished(
        self, request: RequestView, block_ids: BlockIdsByGroup, *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, and its blocks are about to be freed. Asked exactly once per request.

        ``delivered`` says that it ended normally, so that the parameters returned here reach the
        client. Returns whether the blocks must be kept until ``Results.sent`` has the request, and
        the parameters for D.
        """
        remote = self._remote_prefill(request)
        if remote is not None:
            # Rejected or aborted before it got blocks: P need not wait for it.
            self._release(request.request_id, remote)
        self._settled.discard(request.request_id)
        if request.request_id in self._loading:
            self._aborted.append(request.request_id)
            return False, None
        if not delivered or not self._wants_decode(request):
            return False, None
        return self._hold(request, block_ids)

    def update_results(self, results: Results) -> None:
        """What the workers reported, after all of them did."""
        self._held.difference_update(results.sent)
        self._loading.difference_update(results.received)

    def state(self) -> dict[str, int]:
        """Counts of what is remembered. All zero when idle."""
        return {"held": len(self._held), "loading": len(self._loading), "settled": len(self._settled)}

    def _wants_decode(self, request: RequestView) -> bool:
        params = request.kv_transfer_params
        return self._config.is_producer and params is not None and bool(params.get("do_remote_decode"))

    def _remote_prefill(self, request: RequestView) -> RemotePrefill | None:
        """Where to fetch a request from, or None if it is not fetched, or was."""
        if not self._config.is_consumer or request.request_id in self._settled:
            return None
        return read_remote_prefill(request.kv_transfer_params)

    def _wanted_tokens(self, request: RequestView) -> int:
        return request.num_tokens - 1 if self._has_state else request.num_tokens

    def _prompt_refusal(self, request: RequestView, remote: RemotePrefill) -> str:
        """The KV of another prompt is worse than none."""
        expected = max(1, self._wanted_tokens(request))
        if remote.num_tokens != expected:
            return (
                f"kv_transfer_params.remote_num_tokens is {remote.num_tokens}, this prompt needs {expected}: "
                "they are not of this prompt, or the two nodes run different models"
            )
        return ""

    def _blocks(
        self, block_ids: BlockIdsByGroup, first_token: int, end_token: int
    ) -> tuple[GroupBlocks, ...]:
        """The blocks of every group that hold tokens ``first_token`` to ``end_token - 1``."""
        made = []
        for index, (group, ids) in enumerate(zip(self._groups, block_ids, strict=True)):
            if not group.has_cache:
                continue
            if group.is_state:
                made.append(GroupBlocks(index, 0, tuple(ids[-1:])))
                continue
            first = first_token // group.block_size
            end = div_ceil(end_token, group.block_size)
            made.append(GroupBlocks(index, first, tuple(ids[first:end])))
        return tuple(made)

    def _release(self, request_id: str, remote: RemotePrefill) -> None:
        if not remote.refusal:
            self._let_go.append(LetGo(request_id, remote.handle, remote.engine_id, remote.host, remote.port))

    def _hold(self, request: RequestView, block_ids: BlockIdsByGroup) -> tuple[bool, dict[str, Any] | None]:
        # The last sampled token has no KV yet.
        num_tokens = request.num_tokens - 1
        if num_tokens < 1 or not any(any(ids) for ids in block_ids):
            return False, None
        if len(self._held) >= self._config.extra.max_leases:
            if not self._said_full:
                self._said_full = True
                logger.warning(
                    "max_leases is %d and that many requests wait to be fetched: "
                    "more are answered without KV until some are",
                    self._config.extra.max_leases,
                )
            return False, None
        hold = Hold(
            request_id=request.request_id,
            handle=self._new_handle(),
            num_tokens=num_tokens,
            groups=self._blocks(block_ids, 0, num_tokens),
            lease_s=self._config.extra.lease_s,
        )
        self._holds.append(hold)
        self._held.add(request.request_id)
        return True, self._params(hold, block_ids)

    def _params(self, hold: Hold, block_ids: BlockIdsByGroup) -> dict[str, Any]:
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
            HANDLE_KEY: hold.handle,
        }

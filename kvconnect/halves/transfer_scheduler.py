"""The scheduler half of the connector: what to fetch, what to hold, and the orders for the workers.

It has no engine, no tensor, and no socket but that of ``Bootstrap``; no hook waits for anything. Time and
randomness are arguments. The hooks are those of ``SchedulerHooks`` that concern transfers; ``prefill`` and
``decode`` are the two sides.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvconnect.addresses import join_address
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.decode.decode_requests import DecodeRequests
from kvconnect.decode.pulls import PullRequests
from kvconnect.errors import LocalError
from kvconnect.orders import Orders, RankAddress, Results
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.bootstrap import Bootstrap
from kvconnect.peer.handles import Handles, PeerTrust
from kvconnect.peer.keyring import load_keyring
from kvconnect.prefill.prefill_requests import PrefillRequests
from kvconnect.transfer.orders_draft import OrdersDraft
from kvconnect.transfer.params import SOURCES_KEY, transfer_params
from kvconnect.transfer.stack import BlockIdsByGroup, RequestView, StackTraits, Step


def bootstrap_answer(rank0: RankAddress, handles: Handles) -> bytes:
    """Where Mooncake's bootstrap has an engine's id, which routers give to D as it is, is a handle of ours.

    It stays good while P listens on that port, also for the process after this one.
    """
    engine_id = handles.introduce(rank0.host, rank0.port)
    where = {"0": {"0": f"tcp://{rank0.host}:{rank0.port}"}}
    return msgspec.json.encode({"0": {"engine_id": engine_id, "worker_addr": where}})


class SchedulerConnector:
    """Decides, per request, whether its KV is fetched, computed or handed out.

    Of ``cache_config`` only block sizes and kinds are read. ``directory`` is where the worker ranks listen.
    Without ``trust`` any address that a request names is fetched from. ``new_handle`` is unguessable.
    Raises ``ConfigError``: engine id and host are too long for a handle.
    """

    def __init__(
        self,
        config: TransferConfig,
        cache_config: KVCacheConfig,
        stack: StackTraits | None = None,
        *,
        directory: Sequence[RankAddress],
        handles: Handles | None = None,
        trust: PeerTrust | None = None,
        new_handle: Callable[[], str] = lambda: secrets.token_urlsafe(24),
    ) -> None:
        if not directory:
            raise LocalError("the scheduler half needs the address of rank 0 at least")
        stack, groups = stack or StackTraits(), cache_config.groups
        # A recurrent state cannot be rolled back by the token that D computes itself.
        has_states = any(group.is_state for group in groups)
        stack = dataclasses.replace(stack, held_back=max(stack.held_back, int(has_states)))
        handles = handles or Handles()
        self._draft = draft = OrdersDraft(sorted(directory, key=lambda address: address.rank), stack.clock)
        self._prefill = PrefillRequests(config, groups, stack, handles, new_handle, draft)
        self._decode = DecodeRequests(config, cache_config, stack, handles, trust, draft)
        self._pulls: PullRequests | None = None
        if config.is_consumer and stack.names and stack.naming and stack.clock:
            self._pulls = PullRequests(config, groups, stack, trust, new_handle, draft)
        offers = config.is_producer and config.extra.offload is not None and stack.naming is not None
        own = join_address(draft.directory[0].host, draft.directory[0].port)
        self._offered = {SOURCES_KEY: [own]} if offers else None
        self._bootstrap: Bootstrap | None = None

    @classmethod
    def configured(
        cls,
        config: TransferConfig,
        cache_config: KVCacheConfig,
        stack: StackTraits,
        *,
        directory: Sequence[RankAddress],
        environ: Mapping[str, str],
        clock: Callable[[], float],
    ) -> SchedulerConnector:
        """With the cluster's secret, from files or ``environ``, and the peers that the configuration allows.

        Raises ``ConfigError``: keys or allowed peers are not valid, or engine id and host are too long.
        """
        extra = config.extra
        keyring = load_keyring(extra, environ)
        handles = Handles(keyring.handle_secret if keyring else b"", clock)
        trust = PeerTrust(AllowList(extra.allow_peers), extra.max_peers)
        made = cls(config, cache_config, stack, directory=directory, handles=handles, trust=trust)
        if extra.bootstrap_port and config.is_producer:
            answer = bootstrap_answer(min(directory, key=lambda address: address.rank), handles)
            made._bootstrap = Bootstrap(extra.here(0).listens_at, extra.bootstrap_port, answer)
        return made

    def drain(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()
        self._prefill.drain()

    def new_request(self, request: RequestView, *, reads: bool = True) -> None:
        if self._pulls is not None and reads:
            self._pulls.arrive(request)
        if transfer_params(request):
            self._decode.arrive(request)
            self._prefill.arrive(request)

    def prefill_tokens(self, request: RequestView) -> int:
        return self._prefill.prefill_tokens(request)

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._decode.matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def pulled_tokens(self, request: RequestView, num_computed_tokens: int, local_tokens: int) -> int | None:
        """Tokens that a peer keeps by name, if they are worth more than ``local_tokens``; None: ask again."""
        if self._pulls is None:
            return 0
        return self._pulls.matched_tokens(request, num_computed_tokens, local_tokens)

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        self._prefill.admitted(request)
        self._decode.admitted(request, block_ids, num_external_tokens)
        if self._pulls is not None:
            self._pulls.admitted(request, block_ids, num_external_tokens)

    @property
    def due(self) -> Mapping[str, int]:
        return self._prefill.due

    def launched(self, step: Step) -> None:
        for request_id, num_tokens, new_block_ids in step.computed:
            self._prefill.progress(request_id, num_tokens, new_block_ids)

    def preempted(self, request_id: str) -> None:
        self._prefill.preempted(request_id)
        if self._pulls is not None:
            self._pulls.preempted(request_id)

    def reset(self) -> None:
        self._prefill.reset()
        if self._pulls is not None:
            self._pulls.reset()

    def build_orders(self) -> Orders:
        self._decode.ordered()
        if self._pulls is not None:
            self._pulls.ordered()
        self._prefill.ordered()
        return self._draft.take()

    def request_finished(
        self, request: RequestView, block_ids: BlockIdsByGroup, *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        is_loading = self._decode.finished(request)
        if self._pulls is not None:
            is_loading |= self._pulls.finished(request.request_id)
        kept, params = self._prefill.finished(request, block_ids, delivered=delivered and not is_loading)
        if params is None and delivered and transfer_params(request).get("do_remote_prefill"):
            # To the router that named the prefill node: the next turn may be computed there.
            params = self._offered
        return kept, params

    def update_results(self, results: Results) -> None:
        for request_id in results.sent:
            self._prefill.sent(request_id)
        self._decode.update_results(results)
        if self._pulls is not None:
            self._pulls.update_results(results)

    def state(self) -> dict[str, int]:
        pulls = {} if self._pulls is None else self._pulls.state()
        return {**self._prefill.state(), **self._decode.state(), **pulls}

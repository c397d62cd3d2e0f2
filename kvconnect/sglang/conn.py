"""The classes that SGLang calls: a manager per rank, and a view of one room for each request.

SGLang polls all of them in its scheduler's loop, and frees pages as it sees a request fail. So no call waits:
what needs the network is done on threads, and a state that cannot be given yet is the one before it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

from kvconnect.addresses import RankAddress, join_address
from kvconnect.cache.shard import layer_number
from kvconnect.halves.building import build_worker_half, configured_trust
from kvconnect.halves.multiprocess_metrics import MultiprocessMetrics
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.outcome import Cause
from kvconnect.peer.messages import CacheMeaning
from kvconnect.sglang.environment import read_settings
from kvconnect.sglang.prefill_directory import KEY, PrefillDirectory
from kvconnect.sglang.rank_pools import RankShape, dtype_of, read_pools
from kvconnect.sglang.room_ledger import FAILED, SUCCESS, RoomLedger
from kvconnect.sglang.served_model import read_identity
from kvconnect.transfer.attached_rows import AttachedRows

_STALE = (Cause.OUT_OF_REACH, Cause.LOST, Cause.NOT_HELD)
"""Failures after which a prefill node's address is asked for anew."""


class KVConnectManager(BaseKVManager):
    """One rank's transfers, in its scheduler's process. Raises ``ConfigError``, which ends the server."""

    enable_deferred_decode_kv_release = True
    supports_deferred_decode_kv_release = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args, self.disaggregation_mode = args, disaggregation_mode
        self.prefill_info_table = _AnyServer()
        parallel, group = get_parallel(), _dp_rank(args)
        first_rank = group * parallel.attn_tp_size * parallel.pp_size
        config = read_settings(disaggregation_mode.value, os.environ, first_rank)
        model = ModelConfig.from_server_args(server_args)
        tensor, rank = parallel.attn_tp_size, parallel.attn_tp_rank
        heads, layers = int(model.get_total_num_kv_heads()), int(model.num_hidden_layers)
        device, dtype = server_args.device, dtype_of(args.kv_cache_dtype_str, model.dtype)
        device = device if device == "cpu" else f"{device}:{args.gpu_id}"
        is_latent = bool(is_mla_backend or getattr(args, "is_hybrid_mla_backend", False))
        shape = RankShape(None if is_latent else heads, rank, tensor, layers, dtype, device)
        pools, aux = read_pools(args, shape), AttachedRows(args.aux_data_ptrs, args.aux_item_lens)
        bound = tensor if pools.cut_by_rank else 0
        identity = read_identity(model, server_args, args, dtype, bound, config.extra.convert_dtype)
        number = parallel.pp_rank * tensor + rank
        numbers = [found for name in pools.cache.tensors if (found := layer_number(name)) is not None]
        first = min(numbers) if parallel.pp_rank else 0
        every = [one for of, *one in _all_ranks((group, number, first, config.engine_id)) if of == group]
        stages = tuple(sorted({stage for _, stage, _ in every}))
        # All ranks of a node have one name, that of the first.
        config = msgspec.structs.replace(config, engine_id=min(every)[2])
        meaning = CacheMeaning(identity, shape.num_heads, tensor, stages=stages, draft_from=pools.draft_from)
        sent = SentCache(pools.cache, meaning)
        traits = RankTraits(number, tensor * parallel.pp_size, sent=sent, reports_fetches=True)
        self.worker = build_worker_half(config, traits)
        address = self.worker.address()
        assert address is not None, "a rank with an engine listens"
        assert self.worker.transfer is not None
        trust = configured_trust(config, os.environ, time.time)
        addresses = _all_ranks((group, number, address.host, address.port))
        ranks = sorted(where for of, *where in addresses if of == group)
        # Before any peer asks, which may be before the first orders.
        self.worker.transfer.know_ranks(RankAddress(*where) for where in ranks)
        self.ledger = RoomLedger(
            self.worker,
            pools,
            aux,
            bootstrap_timeout_s=envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(),
            clock=time.monotonic,
            replicated=is_latent and tensor > 1,
        )
        self.page_bytes = pools.page_bytes
        self.directory = PrefillDirectory(trust, config.extra.handshake_timeout_s)
        if getattr(server_args, "enable_metrics", False):
            MultiprocessMetrics(self.worker.changes, number)
        if disaggregation_mode.value == "prefill":
            self._introduction = trust.handles.introduce(address.host, address.port)
            self._address = address
            self.register_to_bootstrap()

    def register_to_bootstrap(self) -> None:
        """Register this rank, on a thread: its server may still be starting."""
        parallel, host = get_parallel(), get_serving().host
        if parallel.dist_init_addr:
            host = parallel.dist_init_addr.rpartition(":")[0].strip("[]")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        copied = ("attn_tp_size", "attn_tp_rank", "attn_dp_size", "attn_dp_rank", "pp_size", "pp_rank")
        rank = {name: getattr(parallel, name) for name in (*copied, "load_balance_method")}
        rank |= {"attn_cp_size": 1, "attn_cp_rank": 0, "page_size": self.kv_args.page_size}
        rank |= {"system_dp_size": parallel.dp_size, "system_dp_rank": self.kv_args.system_dp_rank or 0}
        rank |= {"rank_ip": self._address.host, "rank_port": self._address.port, KEY: self._introduction}
        rank |= {"kv_cache_dtype": self.kv_args.kv_cache_dtype_str, "prefill_http_port": get_serving().port}
        port = get_disagg().disaggregation_bootstrap_port
        self.directory.register(f"http://{join_address(host, port)}", rank)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int = 0) -> bool:
        """Whether nothing writes to D's pages of a failed request any more."""
        return not self.ledger.is_loading(bootstrap_room)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Nothing: the room is forgotten when its load has ended."""

    def submit_prefill_recompute(self, receiver: KVConnectReceiver, payload: Any) -> None:
        """SGLang has a retracted request computed anew by P, which this backend does not support."""
        receiver.abort()

    def deregister_buffer_to_engine(self) -> None:
        """SGLang frees the pools: no page is read or written until they are there again."""
        assert self.worker.transfer is not None
        self.worker.transfer.sleep()

    def register_buffer_to_engine(self) -> None:
        assert self.worker.transfer is not None
        self.worker.transfer.wake()


class _AnyServer(dict[str, Any]):
    """SGLang's table of prefill servers, in which all are known: they are asked for off its thread."""

    def get(self, key: str, default: Any = None) -> Any:
        return SimpleNamespace(dp_size=1, follow_bootstrap_room=True)


class KVConnectSender(BaseKVSender):
    """P's view of one request."""

    def __init__(
        self, mgr: KVConnectManager, bootstrap_addr: str, bootstrap_room: int, *has_dp_rank: Any, **more: Any
    ) -> None:
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self._room, self._aux_index = mgr.ledger.open_prefill(bootstrap_room), 0
        self._early_send_wait_event: Any = None
        self._early: list[tuple[Any, Sequence[int]]] = []
        parallel = get_parallel()
        is_named = any(has_dp_rank) or more.get("req_has_disagg_prefill_dp_rank")
        is_divided = max(parallel.dp_size, parallel.attn_dp_size) > 1 and not is_named
        if is_divided and parallel.load_balance_method != "follow_bootstrap_room":
            mgr.directory.register_room(bootstrap_addr, bootstrap_room, _dp_rank(mgr.kv_args))

    def poll(self) -> int:
        self._send_early()
        return self.kv_mgr.ledger.poll_prefill(self._room)

    poll_pp_consensus = poll

    def pop_decode_prefix_len(self) -> int:
        return self._room.first_token

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._aux_index = aux_index or 0
        self._room.num_pages = num_kv_indices

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: Any = None, *num_kv_tokens: Any, **more: Any) -> None:
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if event is not None and not event.query():
            # A cached prefix, which the device may not have computed yet.
            self._early.append((event, kv_indices))
            return
        self._send_early(at_once=True)
        self.kv_mgr.ledger.send(self._room, kv_indices, state_indices, self._aux_index)

    def _send_early(self, at_once: bool = False) -> None:
        """Send what waited for the device; what is sent after it was computed later."""
        while self._early and (at_once or self._early[0][0].query()):
            _, pages = self._early.pop(0)
            self.kv_mgr.ledger.send(self._room, pages, None, self._aux_index)

    def get_transfer_metric(self) -> Any:
        room = self._room
        total_bytes = len(room.pages) * self.kv_mgr.page_bytes
        return KVTransferMetric(transfer_latency_s=room.seconds, transfer_total_bytes=total_bytes)

    def abort(self) -> None:
        self.kv_mgr.ledger.fail(self._room)

    # SGLang frees the pages: of a request that has not ended, no more is sent.
    clear = abort

    def failure_exception(self) -> None:
        is_own = self._room.state == FAILED
        # Another rank has failed, and SGLang frees the pages of all.
        self.kv_mgr.ledger.fail(self._room)
        raise _error(self.bootstrap_room, self._room.reason if is_own else None)


class KVConnectReceiver(BaseKVReceiver):
    """D's view of one request. ``bootstrap_infos`` are the ranks whose end of writes is awaited: our own."""

    bootstrap_infos = (None,)
    require_staging = False
    conclude_state: int | None = None

    def __init__(self, mgr: KVConnectManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, int(bootstrap_room or 0)
        self.abort_notified = False
        found = mgr.directory.find(bootstrap_addr, self.bootstrap_room)
        self._room = mgr.ledger.open_decode(self.bootstrap_room, found)

    def init(self, prefill_dp_rank: int) -> None:
        """Nothing: the prefill node is being asked for."""

    def send_metadata(
        self, kv_indices: Any, aux_index: Any = None, state_indices: Any = None, *prefix: Any, **more: Any
    ) -> None:
        first_token = more.get("decode_prefix_len") or next(iter(prefix), None) or 0
        self.kv_mgr.ledger.load(self._room, kv_indices, state_indices, aux_index or 0, first_token)

    def poll(self) -> int:
        return self.kv_mgr.ledger.poll_decode(self._room)

    def abort(self) -> None:
        self.kv_mgr.ledger.abort(self._room)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Another rank has failed: end the load, and have SGLang hold the pages until it has ended."""
        self.kv_mgr.ledger.abort(self._room)
        self.abort_notified = self._room.is_loading

    def failure_exception(self) -> None:
        room = self._room
        if room.reason is not None and room.reason.cause in _STALE:
            self.kv_mgr.directory.forget(self.bootstrap_addr)
        raise _error(self.bootstrap_room, room.reason if room.state == FAILED else None)

    def clear(self) -> None:
        if self._room.state != SUCCESS:
            self.kv_mgr.ledger.abort(self._room)


def _error(room: int, reason: Any) -> KVTransferError:
    text = "it failed on another rank" if reason is None else f"{reason.text} {reason.label}"
    return KVTransferError(room, text, is_from_another_rank=reason is None)


def _dp_rank(args: Any) -> int:
    """The number of this rank's data-parallel engine, as bootstrap servers count them."""
    parallel = get_parallel()
    return int(parallel.attn_dp_rank if parallel.dp_size == 1 else args.system_dp_rank or 0)


def _all_ranks(value: Any) -> list[Any]:
    """Each rank's value. A collective call."""
    parallel = get_parallel()
    if parallel.tp_size * parallel.pp_size == 1:
        return [value]
    return list(parallel.world_group.all_gather_object(value))

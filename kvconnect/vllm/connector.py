"""``KVConnect``, the class that vLLM loads: each hook translates vLLM's call for one of the halves.

vLLM makes one object in its scheduler process and one in each worker. No hook waits for a transfer.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvconnect.errors import ConfigError
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.halves.worker_half import WorkerHalf
from kvconnect.outcome import Cause, Reason
from kvconnect.transfer.orders import joined
from kvconnect.vllm import settings
from kvconnect.vllm.geometry import running_states, scheduler_config, transferred_groups
from kvconnect.vllm.metadata import (
    PEER_SOURCE,
    AddressMetadata,
    OrdersMetadata,
    ReportMetadata,
    hit_sources,
)
from kvconnect.vllm.offload import kept_groups
from kvconnect.vllm.plugin import check_vllm, follow_pauses, register, warn_of_known_faults
from kvconnect.vllm.requests import introduce, shorten
from kvconnect.vllm.spans import Spans
from kvconnect.vllm.stats import TransferPromMetrics, TransferStats
from kvconnect.vllm.steps import PartlyFilled, Recovery, Steps
from kvconnect.vllm.traits import make_scheduler_half, make_worker_half
from kvconnect.vllm.weights import LoadedWeights, all_ranks, loaded_weights, own_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_DRAIN_S = 3.0
"""How long ``shutdown`` may delay vLLM's exit: about as long as vLLM waits for its workers."""
_DELIVERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")

_ZEROES_LOADS = not hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")
"""vLLM before 0.32 zeroes all new blocks, those of a load too, in the step that orders the load."""

_UNKNOWN = Cause.INTERNAL("a worker has logged why")
_NOTHING_YET = SchedulerHalf()

# A configuration may name our module path only, and a MultiConnector looks the class up by name all the same.
register()


class KVConnect(KVConnectorBase_V1, SupportsHMA):
    """Transfers KV caches between vLLM servers, and offloads them to tiers below the device's memory.

    See vLLM's base class for the hooks. Raises ``ConfigError`` for a wrong or refused configuration.
    """

    _cache_hit_source = PEER_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings.log_like_vllm()
        check_vllm(base)
        self._vllm = vllm_config
        self._cache = kv_cache_config
        self._config = settings.read_config(vllm_config)
        settings.refuse_unsupported(vllm_config, kv_cache_config, self._config)
        if role is KVConnectorRole.SCHEDULER:
            settings.recompute_if_alone(vllm_config, self._config)
            warn_of_known_faults(vllm_config)
            follow_pauses()
        self._kept = kept_groups(kv_cache_config) if self._config.extra.offload else ()
        self._scheduler: SchedulerHalf | None = None
        self._workers: dict[int, AddressMetadata] = {}
        self._early: dict[str, Request] = {}
        self._was_reset = self._has_warned = False
        self._reasons: dict[str, Reason] = {}
        zeroes_first = bool(getattr(vllm_config, "use_v2_model_runner", True))
        self._steps = Steps(zeroes_first, PartlyFilled(scheduler_config(kv_cache_config).groups))
        self._spans = Spans(time.monotonic, time.time_ns)
        self._recovery = Recovery(expects=self._awaits_workers, clock=time.monotonic)
        self._worker = WorkerHalf()
        self._own: AddressMetadata | None = None
        self._weights: LoadedWeights | None = None
        self._report = ReportMetadata()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: no engine has registered the cache's pages, so vLLM may free and restore them."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        # A copy: vLLM gives one dictionary to several loggers, and each adds to the object made from it.
        return TransferStats(copy.deepcopy(data or {}))

    @classmethod
    def build_prom_metrics(cls, *labels: Any, **more: Any) -> TransferPromMetrics:
        return TransferPromMetrics(*labels, **more)

    @property
    def requires_kv_delivery(self) -> bool:
        """True on a prefill node, whose peers need the KV. A block that is only offloaded may be dropped."""
        return self._config.is_producer and self._config.extra.engine != "none"

    # The scheduler's half

    def _paused(self, *, is_paused: bool) -> None:
        """See ``follow_pauses``."""
        self._half.pause(is_paused=is_paused)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take the workers' addresses. May be called again; other connectors' metadata is ignored."""
        for meta in metadata.values():
            for worker in (meta, *meta.others) if isinstance(meta, AddressMetadata) else ():
                self._add_worker(worker)
        engine = self._config.extra.engine
        if not self._workers and engine != "none":
            kinds = sorted({type(meta).__name__ for meta in metadata.values()})
            raise ConfigError(
                f"the workers announce where they listen by {', '.join(kinds)}, which is not ours: of a "
                f"MultiConnector vLLM passes on the handshake of one connector only, and engine is "
                f"{engine!r}; accepted beside that connector: engine 'none', with offload"
            )
        if self._config.extra.bootstrap_port and self._workers and self._scheduler is None:
            # A router asks the bootstrap port before any request comes.
            self._make_half()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._steps.windows.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Register a new request. P cuts the prompt to the tokens that it computes for D."""
        half = self._half
        if self._awaits_workers:
            self._early[request.request_id] = request
        if half.has_transfers and getattr(request, "resumable", False) and request.kv_transfer_params:
            # More of the prompt comes later, and vLLM does not report when the prompt is complete.
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "request %s streams its input, and its KV is neither held nor fetched: send its whole "
                    "prompt at once (further ones have no line)",
                    request.request_id,
                )
            request.kv_transfer_params = None
        introduce(half, request, names_adapters=self._names_adapters)
        self._steps.begin(request)
        self._spans.begin(request)
        excess = request.num_tokens - half.prefill_tokens(request)
        if excess > 0 and not request.get_skip_reading_prefix_cache():
            shorten(request, excess)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens loadable beyond ``num_computed_tokens`` (None: ask again), and whether asynchronously."""
        half = self._half
        if self._awaits_workers and self._recovery.is_under_way:
            return None, False
        count, in_background = half.matched_tokens(request, num_computed_tokens)
        if count is not None and half.notices and request.request_id in half.notices:
            # vLLM may have found more than whole blocks in its own cache.
            hit = max(count, settings.partial_hit_tokens(self._vllm))
            count, kept = half.settle_notice(request, num_computed_tokens, count)
            shorten(request, max(0, request.num_tokens - max(kept, num_computed_tokens + hit + 1)))
            in_background = bool(count)
        missing = request.num_tokens - num_computed_tokens - (count or 0)
        if count and missing > 1 and half.offload is not None and settings.computes_prompts_whole(self._vllm):
            half.offload.withdraw(request.request_id)
            return 0, False
        return count, in_background

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """The cache groups that a load fills: vLLM must neither zero nor replay their blocks."""
        is_restored = self._half.is_restored(request.request_id)
        return self._kept if is_restored else transferred_groups(self._cache)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        return hit_sources(self._half.sources(request.request_id, num_external_tokens))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM allocated blocks to a request."""
        self._early.pop(request.request_id, None)
        block_ids = running_states(self._cache, blocks.get_block_ids())
        self._steps.admitted(request.request_id)
        self._steps.windows.admitted(request.request_id, block_ids, num_external_tokens)
        self._half.update_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        """This step's orders for the workers."""
        half = self._half
        self._steps.tell(half, scheduler_output)
        orders = half.build_orders()
        self._spans.take(orders.notes)
        offload = orders.offload
        uses_kv = orders.loads or orders.holds or offload.restores or offload.fetches or offload.seeks
        # vLLM resets caches first, and replaces weights before the next step that has work.
        checks = self._was_reset and bool(scheduler_output.total_num_scheduled_tokens or uses_kv)
        self._was_reset = self._was_reset and not checks
        return OrdersMetadata(orders, self._awaits_workers, checks)

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the reports of all workers to the scheduler half."""
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if not isinstance(report, ReportMetadata):
            report = ReportMetadata()
        for address in report.addresses:
            self._add_worker(address)
        if not self._awaits_workers:
            self._recovery.reported(report.results.offload)
        self._steps.windows.reported(report.results.ragged)
        # A rank may report its reason some steps before the last rank reports that request.
        self._reasons.update(report.results.failed)
        failed = {one: self._reasons.get(one, _UNKNOWN) for one in connector_output.failed_recving or ()}
        for request_id in (*(connector_output.finished_recving or ()), *failed):
            self._reasons.pop(request_id, None)
        self._half.update_results(
            msgspec.structs.replace(
                report.results,
                sent=tuple(connector_output.finished_sending or ()),
                received=tuple(connector_output.finished_recving or ()),
                failed=failed,
            )
        )

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must step without tokens to compute: copies or reports are under way."""
        return bool(self._kept) and (self._half.pending or self._recovery.is_under_way)

    def reset_cache(self) -> bool | None:
        """Drop all kept blocks, since weights may be replaced. False: the workers are not known yet."""
        self._half.reset()
        self._was_reset = True
        return not self._awaits_workers

    def take_events(self) -> Iterable[Any]:
        return self._half.take_events()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether vLLM must keep its blocks, and the parameters for D or None."""
        delivered = request.status.name in _DELIVERED
        self._early.pop(request.request_id, None)
        half = self._half
        self._steps.end(half, request.request_id)
        running = running_states(self._cache, block_ids)
        kept, params = half.request_finished(request, running, delivered=delivered)
        if not kept:
            self._spans.end(request.request_id)
        return kept, params

    # The workers' half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and register this worker's caches, and begin to serve peers."""
        rank = own_rank()
        self._weights = loaded_weights(self._vllm)
        made = functools.partial(
            make_worker_half,
            *(self._vllm, self._cache, self._config, kv_caches),
            rank=rank,
            weights=self._weights,
        )
        self._worker = settings.outside_pools(self._vllm, made, next(iter(kv_caches.values())).device)
        row_bytes = {} if self._worker.offload is None else self._worker.offload.row_bytes
        self._own = AddressMetadata(rank, self._worker.address(), row_bytes)
        self._own.parks = self._worker.offload is not None and self._worker.offload.load_rows is not None
        self._own.identity = self._worker.identity
        if self._worker.transfer is not None:
            # A peer may connect before the first step.
            ranks = all_ranks(self._own)
            self._worker.transfer.know_ranks([worker.address for worker in ranks])
            # vLLM passes on the metadata of one prefill context parallel rank only.
            self._own.others = tuple(worker for worker in ranks if worker.rank != rank)
        if (self._kept or self._config.extra.sources) and not rank:
            settings.warn_if_restores_fail(self, settings.outermost(self), self._config)

    def unregister_kv_caches(self) -> None:
        """vLLM is about to free the pages: no copy touches them until they are back, peers get a refusal."""
        if self._worker.transfer is not None:
            self._worker.transfer.sleep()

    def restore_kv_caches(self) -> None:
        """vLLM restored the pages. Slots and side channel stayed as they were."""
        if self._worker.transfer is not None:
            self._worker.transfer.wake()

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        """Where this worker listens, and the bytes of its offload rows.

        A ``MultiConnector`` gives all its children the metadata of the first child that returns any, and not
        every child accepts another's. So a worker that does not listen returns None there, and announces
        itself when the scheduler half asks.
        """
        listens = self._own is not None and self._own.address is not None
        return self._own if listens or settings.outermost(self) is self else None

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        """Called before a step's kernels are launched, which may overwrite blocks that are to be stored.

        All kernels of earlier steps were launched, also those of a draft model, which run after a step's
        tokens are known.
        """
        if isinstance(kv_connector_metadata, OrdersMetadata):
            if kv_connector_metadata.asks_address and self._own is not None:
                self._report.addresses = (self._own,)
            if kv_connector_metadata.check_weights and self._weights is not None and self._weights.check():
                # Before any of this step's orders is carried out.
                self._worker.replace_weights(self._weights.names)
                if self._own is not None:
                    self._own.identity = self._worker.identity
                    self._report.addresses = (self._own,)
            self._worker.before_step(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """From now on the blocks that vLLM zeroes in this step can be filled."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, OrdersMetadata):
            self._worker.after_zeroing(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are asynchronous, and a request runs only once its load is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: pages are sent from where they lie, after the prefill."""

    def wait_for_save(self) -> None:
        """Does nothing: no step saves KV, because a draft model's KV is written after the step."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._worker.results()
        if results:
            own = msgspec.structs.replace(results, sent=(), received=())
            self._report.results = joined((self._report.results, own))
        return base.KVConnectorTransferResults(
            finished_sending=set(results.sent),
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
        )

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        report, self._report = self._report, ReportMetadata()
        return report if report else None

    def get_kv_connector_stats(self) -> TransferStats | None:
        changes = self._worker.changes()
        return TransferStats.of_worker(self._own.rank, changes) if self._own and changes else None

    def shutdown(self) -> None:
        """Stop serving peers, which first have ``_DRAIN_S`` to fetch held KV. Idempotent."""
        if self._scheduler is not None:
            self._scheduler.drain()
        self._worker.drain(_DRAIN_S)
        self._worker.close()

    @property
    def _names_adapters(self) -> bool:
        """False with KV events: these have vLLM's own hashes, which name an adapter by its path alone."""
        return not settings.wants_events(self._vllm)

    @property
    def _half(self) -> SchedulerHalf:
        """The scheduler half, made at the first hook after the workers have announced themselves."""
        if self._scheduler is None and self._awaits_workers:
            return _NOTHING_YET
        return self._scheduler or self._make_half()

    def _make_half(self) -> SchedulerHalf:
        zeroes_loads = _ZEROES_LOADS and not self._steps.is_zeroed_first
        self._scheduler = made = make_scheduler_half(
            *(self._vllm, self._cache, self._config, self._workers),
            zeroes_loads=zeroes_loads,
            pool=self._steps.windows.pool,
        )
        for request in self._early.values():
            introduce(made, request, names_adapters=self._names_adapters)
        self._early = {}
        return made

    @property
    def _awaits_workers(self) -> bool:
        """Whether row sizes are not known yet, because another connector has the handshake."""
        return self._config.extra.engine == "none" and not self._workers

    def _add_worker(self, worker: AddressMetadata) -> None:
        offload = self._config.extra.offload
        self._workers[worker.rank] = worker
        self._recovery.expect(expects=bool(offload and offload.disk_path))

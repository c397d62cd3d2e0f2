"""``KVConnect``, the class that vLLM loads: thin, over the scheduler and worker halves.

vLLM makes one object in its scheduler process and one in each worker. Every hook translates and
delegates; none waits for a transfer. Hooks that a prefill/decode connector has no use for answer what
means "nothing to do".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvconnect.config import TransferConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.orders import Orders, RankAddress, Results
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.keyring import load_keyring
from kvconnect.scheduler.connector import SchedulerConnector
from kvconnect.scheduler.handles import Handles
from kvconnect.scheduler.trust import PeerTrust
from kvconnect.vllm.geometry import (
    held_back,
    running_states,
    scheduler_config,
    transferred_groups,
    worker_cache,
)
from kvconnect.vllm.meaning import fingerprint, head_counts
from kvconnect.vllm.plugin import register
from kvconnect.vllm.stats import TransferPromMetrics, TransferStats
from kvconnect.vllm.steps import Steps
from kvconnect.vllm.values import attention_layers
from kvconnect.vllm.versions import check_vllm
from kvconnect.worker.connector import WorkerConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_OURS = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "engine_id",
    "kv_load_failure_policy",
    "kv_connector_extra_config",
)
_DRAIN_S = 3.0
"""How long vLLM is kept from ending: about as long as it waits for its workers."""
_DELIVERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


@dataclass
class OrdersMetadata(KVConnectorMetadata):
    """One step's orders, on their way from the scheduler to the workers."""

    orders: Orders


@dataclass
class AddressMetadata(KVConnectorHandshakeMetadata):
    """Where a worker listens, on its way from the worker to the scheduler."""

    address: RankAddress


try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    # Before 0.32 hits are not told apart by source.
    _HIT_SOURCE = None
else:
    _HIT_SOURCE = CacheHitSource.P2P


# Whoever names this class by its module may put it under a MultiConnector, which looks for it by name.
register()


class KVConnect(KVConnectorBase_V1, SupportsHMA):
    """Hands KV caches over between vLLM servers. See vLLM's base class for the hooks.

    Raises:
        ConfigError: the configuration is wrong, or names something that this version refuses.
    """

    _cache_hit_source = _HIT_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        check_vllm(base)
        self._vllm = vllm_config
        self._cache = kv_cache_config
        self._config = _read_config(vllm_config)
        _refuse_unsupported(vllm_config)
        self._moved = transferred_groups(kv_cache_config)
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        self._addresses: dict[int, RankAddress] = {}
        self._steps = Steps()

    # What vLLM asks the class

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No layer hook is used, so full CUDA graphs stay."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Registered memory must stay where it is."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """What a worker told, rebuilt in another process."""
        return TransferStats.of_data(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferPromMetrics:
        """The series of vLLM's ``/metrics``."""
        return TransferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """A prefill node's KV is wanted by others."""
        return self._config.is_producer

    # The scheduler's half

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """The workers' addresses, by tensor-parallel rank."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): meta for rank, meta in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """The workers' addresses. May be told again; another connector's metadata is not for us."""
        for meta in metadata.values():
            if isinstance(meta, AddressMetadata):
                self._addresses[meta.address.rank] = meta.address
        if not self._addresses:
            kinds = sorted({type(meta).__name__ for meta in metadata.values()})
            raise ConfigError(
                f"the workers told where they listen by {', '.join(kinds)}, which is not ours: vLLM passes "
                "on what the first connector of a MultiConnector says; put KVConnect first"
            )

    def on_new_request(self, request: Request) -> None:
        """A request arrived. One that is prefilled for others stops where they take over."""
        if getattr(request, "resumable", False) and request.kv_transfer_params:
            # More of its prompt comes later, and vLLM does not say when it is whole.
            logger.warning("request %s streams its input: it is neither held nor fetched", request.request_id)
            request.kv_transfer_params = None
        self._half.new_request(request)
        excess = request.num_tokens - self._half.prefill_tokens(request)
        # With prompt log probabilities D loads nothing, and computes the whole prompt itself.
        if excess > 0 and not request.get_skip_reading_prefix_cache():
            _shorten(request, excess)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be fetched beyond those computed here, asynchronously."""
        return self._half.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A load fills every group that is transferred; vLLM must neither zero nor replay it."""
        return self._moved

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request got blocks."""
        block_ids = running_states(self._cache, blocks.get_block_ids())
        self._half.update_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's orders for the workers."""
        half = self._half
        self._steps.tell(half, scheduler_output)
        return OrdersMetadata(half.build_orders())

    def update_connector_output(self, connector_output: Any) -> None:
        """What all workers have reported."""
        self._half.update_results(
            Results(
                sent=tuple(connector_output.finished_sending or ()),
                received=tuple(connector_output.finished_recving or ()),
            )
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks must be kept, and the parameters for D."""
        delivered = request.status.name in _DELIVERED
        self._steps.forget(request.request_id)
        running = running_states(self._cache, block_ids)
        return self._half.request_finished(request, running, delivered=delivered)

    # The workers' half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and register this worker's caches, and begin to serve peers."""
        rank, world_size = _tensor_rank(), self._vllm.parallel_config.tensor_parallel_size
        counts = head_counts(self._vllm)
        cache = worker_cache(
            self._cache,
            kv_caches,
            rank=rank,
            world_size=world_size,
            head_counts=counts,
            layers=attention_layers(self._vllm),
            convert_dtype=self._config.extra.convert_dtype,
        )
        self._worker = WorkerConnector(
            self._config,
            cache.config,
            cache.kernel_block_sizes,
            model=fingerprint(
                self._vllm,
                self._cache,
                bound_to=world_size if cache.rank_bound else None,
                convert_dtype=self._config.extra.convert_dtype,
            ),
            rank=rank,
            world_size=world_size,
            num_heads=counts.finest,
        )
        self._worker.register_kv_caches(cache.tensors, cache.heads, cache.scales)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where this worker listens."""
        return None if self._worker is None else AddressMetadata(self._worker.address())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before a step's kernels are launched: what its orders call computed was launched before.

        ``start_load_kv`` comes after the launch, and what is recorded there waits for this step too.
        """
        if self._worker is None or not isinstance(kv_connector_metadata, OrdersMetadata):
            return
        orders = kv_connector_metadata.orders
        if orders.progress or orders.holds:
            self._worker.mark()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Hand this step's orders to the worker half. Never waits."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, OrdersMetadata):
            self._worker.start(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only once all of it has arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pages are written from where they lie, after the prefill."""

    def wait_for_save(self) -> None:
        """Nothing is saved within a step.

        A draft model's KV is written after the step's results are known, but a request's order to hold
        comes with a later step: what is recorded on the device then comes after the draft's kernels too.
        """

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests sent, received and failed since the last call."""
        results = self._results()
        return base.KVConnectorTransferResults(
            finished_sending=set(results.sent),
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Failures are told by request, never by block: with several groups blocks would end vLLM."""
        return set()

    def get_kv_connector_stats(self) -> TransferStats | None:
        """What this worker's numbers have changed by since the last step, or None."""
        worker = self._worker
        changes = None if worker is None else worker.changes()
        if worker is None or changes is None:
            return None
        return TransferStats.of_worker(worker.address().rank, changes)

    def shutdown(self) -> None:
        """Stop serving peers, after a moment in which they may fetch what is held. Idempotent."""
        if self._worker is not None:
            self._worker.drain(_DRAIN_S)
            self._worker.close()

    # Helpers

    @property
    def _num_lookahead_tokens(self) -> int:
        # vLLM before 0.31 does not say; what it would say there is 1, since several modules are refused.
        return getattr(self._vllm, "num_prefill_lookahead_tokens", 0)

    @property
    def _half(self) -> SchedulerConnector:
        """The scheduler half, made at the first hook: by then the workers have told where they listen."""
        if self._scheduler is None:
            extra = self._config.extra
            keyring = load_keyring(extra, os.environ)
            self._scheduler = SchedulerConnector(
                self._config,
                scheduler_config(self._cache),
                {},
                directory=tuple(self._addresses.values()),
                held_back=held_back(self._cache, self._num_lookahead_tokens),
                handles=Handles(keyring.handle_secret if keyring else b"", time.time),
                trust=PeerTrust(AllowList(extra.allow_peers), extra.max_peers),
            )
        return self._scheduler

    def _results(self) -> Results:
        if self._worker is None:
            return Results()
        results = self._worker.results()
        for request_id, reason in results.failed.items():
            logger.warning("the KV of request %s could not be loaded: %s", request_id, reason)
        return results


def _log_like_vllm() -> None:
    """vLLM gives handlers to its own loggers only: what we say would be lost."""
    ours, theirs = logging.getLogger("kvconnect"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def _read_config(vllm_config: VllmConfig) -> TransferConfig:
    given = vllm_config.kv_transfer_config
    values = {name: getattr(given, name) for name in _OURS}
    extra = dict(values["kv_connector_extra_config"] or {})
    if extra.get("port"):
        # Every data-parallel engine of a host needs ports of its own.
        parallel = vllm_config.parallel_config
        extra["port"] += parallel.data_parallel_index * parallel.tensor_parallel_size
    return parse_kv_transfer_config({**values, "kv_connector_extra_config": extra})


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Settings under which KV would be lost or wrong are refused at start, by name."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name, value in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", getattr(parallel, "decode_context_parallel_size", 1)),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if value > 1:
            raise ConfigError(f"{name} is {value}, this version of kvconnect accepts 1")
    speculative = vllm_config.speculative_config
    if not hasattr(vllm_config, "num_prefill_lookahead_tokens") and _has_several_modules(speculative):
        raise ConfigError(
            "speculative_config has a drafter of several modules, and this version of vLLM does not say how "
            "far ahead of a prompt it reads; use vLLM 0.31 or newer, or num_speculative_tokens 1"
        )
    cache = vllm_config.cache_config
    if getattr(cache, "mamba_cache_mode", "none") == "all" and speculative is not None:
        raise ConfigError(
            "mamba_cache_mode is 'all' with speculative_config: which block holds the running state cannot "
            "be told; accepted: none, align"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales is on, but a prefill server's scales are not the decode server's; "
            "turn it off, and use a checkpoint with scales or none"
        )
    if getattr(model, "enable_sleep_mode", False):
        raise ConfigError(
            "enable_sleep_mode is on, but registered KV memory must stay where it is; turn it off"
        )


def _has_several_modules(speculative_config: Any) -> bool:
    ask = getattr(speculative_config, "use_multi_module_mtp", None)
    return bool(ask and ask())


def _shorten(request: Request, excess: int) -> None:
    """Cut the last ``excess`` tokens off a prompt that has not been scheduled yet, and compute no more."""
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:-excess]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-excess]
    if getattr(request, "prompt_is_token_ids", None) is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-excess]
    # In place: vLLM hands out read-only views of this list.
    del request._all_token_ids[-excess:]
    request.num_prompt_tokens -= excess
    request.max_tokens = 1


def _tensor_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())

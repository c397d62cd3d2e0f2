"""Reads vLLM's settings: parses kvconnect's part, and refuses settings that do not work with kvconnect."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from kvconnect.addresses import TAKEN, join_address, look_at_port
from kvconnect.cache.identity import Naming
from kvconnect.config import CONNECTOR, TransferConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.peer.keyring import load_keyring
from kvconnect.reading import refuse
from kvconnect.vllm.configuration import our_configs
from kvconnect.vllm.geometry import context_ranks, group_spec, head_counts, scheduler_config, stage_ranks
from kvconnect.vllm.offload import check_blocks, hash_block_tokens
from kvconnect.vllm.plugin import OURS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


def log_like_vllm() -> None:
    """Give our loggers vLLM's handlers: vLLM has handlers for its own loggers only."""
    ours, theirs = logging.getLogger("kvconnect"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def read_config(vllm_config: VllmConfig) -> TransferConfig:
    """kvconnect's configuration for this data-parallel engine. Raises ``ConfigError``."""
    given = vllm_config.kv_transfer_config
    values = {name: getattr(given, name) for name in OURS}
    extra = dict(values["kv_connector_extra_config"] or {})
    # Every data-parallel engine of a host needs its own ports and its own folder.
    parallel, offload = vllm_config.parallel_config, extra.get("offload")
    index = int(parallel.data_parallel_index)
    first_rank = index * parallel.pipeline_parallel_size * stage_ranks(vllm_config)
    if extra.get("port"):
        extra["port"] += first_rank
    if extra.get("bootstrap_port"):
        extra["bootstrap_port"] += index
    if index and isinstance(offload, dict) and offload.get("disk_path"):
        extra["offload"] = {**offload, "disk_path": f"{offload['disk_path']}/dp{index}"}
    config = parse_kv_transfer_config({**values, "kv_connector_extra_config": extra})
    numbered = msgspec.structs.replace(config.extra, first_rank=first_rank)
    return msgspec.structs.replace(config, kv_connector_extra_config=numbered)


def check_before_start(vllm_config: VllmConfig) -> None:
    """Refuse what can be known to fail before a model is loaded.

    Raises ``ConfigError`` with all of it: settings of vLLM, keys that cannot be read, addresses that are not
    of this machine, ports in use; in a MultiConnector mistakes of our configuration alone.
    """
    given = vllm_config.kv_transfer_config
    if given.kv_connector != CONNECTOR:
        our_configs({name: getattr(given, name) for name in OURS})
        return
    config = read_config(vllm_config)
    refuse([*_unsupported(vllm_config, config), *_start_mistakes(vllm_config, config)])


def _start_mistakes(vllm_config: VllmConfig, config: TransferConfig) -> Iterator[str]:
    """Keys and addresses that the workers of this machine could not use."""
    extra, parallel = config.extra, vllm_config.parallel_config
    try:
        load_keyring(extra, os.environ)
    except ConfigError as error:
        yield str(error)
    # Ranks of other machines have their ports there.
    if extra.engine == "none" or getattr(parallel, "nnodes", 1) > 1:
        return
    ports = [("port", rank, extra.port + rank) for rank in range(parallel.world_size) if extra.port]
    if extra.bootstrap_port and config.is_producer:
        ports.append(("bootstrap_port", 0, extra.bootstrap_port))
    for name, rank, port in ports or [("host", 0, 0)]:
        try:
            host = extra.here(rank).listens_at
        except ConfigError as error:
            yield str(error)
            return
        problem, where = look_at_port(host, port), f"kv_connector_extra_config.{name}"
        if problem == TAKEN:
            yield (
                f"{where}: rank {rank} would listen at {join_address(host, port)}, where another process "
                "does (ss -ltnp names it); accepted: a port that is free, 0 for any"
            )
        elif problem:
            yield (
                f"{where}: rank {rank} cannot listen at {join_address(host, port)}: {problem}; "
                "accepted: an address of this machine as host, or as bind"
            )


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: Any, config: TransferConfig) -> None:
    """Raise ``ConfigError``, with the accepted values, for settings that would lose or corrupt KV."""
    refuse(list(_unsupported(vllm_config, config)))
    if context_ranks(vllm_config) > 1:
        _refuse_turns(vllm_config, kv_cache_config, config)
    if config.extra.offload is not None:
        check_blocks(kv_cache_config, hash_block_tokens(vllm_config, kv_cache_config))


def _unsupported(vllm_config: VllmConfig, config: TransferConfig) -> Iterator[str]:
    """Settings of vLLM that do not work with kvconnect, whatever the cache."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if (value := getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        counts = head_counts(vllm_config)
        if counts.main is not None or counts.draft is not None:
            what = f"prefill_context_parallel_size is {value} for layers with KV heads"
            yield f"{what}; accepted: latent caches"
    speculative = vllm_config.speculative_config
    ask_modules = getattr(speculative, "use_multi_module_mtp", None)
    says_lookahead = hasattr(vllm_config, "num_prefill_lookahead_tokens")
    if not says_lookahead and ask_modules is not None and ask_modules():
        yield (
            "speculative_config has a drafter of several modules, and this version of vLLM does not say how "
            "far ahead of a prompt it reads; use vLLM 0.31 or newer, or num_speculative_tokens 1"
        )
    if getattr(cache, "mamba_cache_mode", "none") == "all" and speculative is not None:
        yield (
            "mamba_cache_mode is 'all' with speculative_config: which block holds the running state cannot "
            "be told; accepted: none, align"
        )
    if getattr(cache, "calculate_kv_scales", False):
        yield (
            "calculate_kv_scales is on, but a prefill server's scales are not the decode server's; "
            "turn it off, and use a checkpoint with scales or none"
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        yield from _sleep_mistakes(vllm_config.model_config)
    if config.extra.engine != "none":
        yield from _media_mistakes(vllm_config)


def _refuse_turns(vllm_config: VllmConfig, kv_cache_config: Any, config: TransferConfig) -> None:
    """``ConfigError`` with context parallelism: for offload, or a layer not kept in turns token by token."""
    count = f"decode_context_parallel_size is {context_ranks(vllm_config)}"
    if config.extra.offload is not None:
        raise ConfigError(f"{count}, with which this version of kvconnect accepts no offload")
    groups = scheduler_config(kv_cache_config).groups
    for index, (theirs, ours) in enumerate(zip(kv_cache_config.kv_cache_groups, groups, strict=True)):
        specs = [group_spec(theirs, layer) for layer in theirs.layer_names]
        is_even = all(getattr(spec, "tokens_per_state", 1) == 1 for spec in specs)
        is_divided = all(getattr(spec, "dcp_sharded", True) for spec in specs)
        if ours.is_state or not (ours.retention.sees_all and is_even and is_divided):
            kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
            raise ConfigError(
                f"{count}, and cache group {index} has layers whose tokens ranks do not keep in turns "
                f"({kinds}); accepted: attention that sees all tokens, a row for each, and no draft model "
                "that every rank keeps whole"
            )


def _media_mistakes(vllm_config: VllmConfig) -> Iterator[str]:
    """Settings with which vLLM names images by the request and not by their contents.

    A handle opens one prompt, images included: no two servers would agree on its digest.
    """
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    if media is None or getattr(media, "language_model_only", False):
        return
    if not (media.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching):
        yield (
            "mm_processor_cache_gb is 0 and enable_prefix_caching is off: vLLM names images by the request "
            "then, so that no peer can know an image prompt to have the same images; accepted: "
            "either of the two caches, or language_model_only"
        )


def _sleep_mistakes(model_config: Any) -> Iterator[str]:
    """Ways to sleep that would take memory away that slots or copies still use."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    backend = getattr(model_config, "sleep_mode_backend", "cumem")
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        why = "this version of vLLM tells no connector when it sleeps; accepted: vLLM 0.33 or newer"
    elif backend != "cumem":
        why = f"sleep_mode_backend {backend!r} does not leave slots as they are; accepted: cumem"
    else:
        return
    yield f"enable_sleep_mode is on, but {why}, or turn it off"


def outside_pools(vllm_config: VllmConfig, make: Callable[[], Made], device: torch.device) -> Made:
    """Returns ``make()``, whose GPU memory is in none of the pools that vLLM empties to sleep.

    vLLM has such a pool open while it makes connectors. PyTorch's pools and current streams belong to a
    thread, so ``make`` runs in a new thread with the caller's stream.
    """
    if not getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return make()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def made() -> Made:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1, "kvconnect-memory") as thread:
        return thread.submit(made).result()


def wants_events(vllm_config: VllmConfig) -> bool:
    """Whether vLLM publishes KV events."""
    wanted = getattr(vllm_config, "kv_events_config", None)
    return bool(wanted and wanted.enable_kv_cache_events)


def partial_hit_tokens(vllm_config: VllmConfig) -> int:
    """The most tokens beyond whole blocks that vLLM may find in its own prefix cache."""
    cache = vllm_config.cache_config
    return int(cache.block_size) if getattr(cache, "prefix_match_unit", None) else 0


def computes_prompts_whole(vllm_config: VllmConfig) -> bool:
    """Whether this vLLM computes either a whole prompt or only its last token.

    So it is where chunked prefill and prefix caching are off: some platforms set both for latent caches.
    """
    chunked = getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True)
    return not chunked and not vllm_config.cache_config.enable_prefix_caching


def why_unnamed(vllm_config: VllmConfig, naming: Naming | None) -> str:
    """Why no peer can ask this server for KV by name; empty if one can."""
    if context_ranks(vllm_config) > 1:
        return "its ranks keep tokens in turns"
    if naming is not None:
        return ""
    return (
        "its block hashes begin with a number of each process's own, or not all of its cache is kept under "
        "them. Set PYTHONHASHSEED to the same number on all servers, or prefix_caching_hash_algo to sha256"
    )


def usable_naming(vllm_config: VllmConfig, config: TransferConfig, naming: Naming | None) -> Naming | None:
    """The naming for pulls; None where this vLLM cannot pull, with a warning if it has ``sources``."""
    reason = why_unnamed(vllm_config, naming)
    if not reason and computes_prompts_whole(vllm_config):
        reason = "it cannot compute the rest of a prompt"
    if reason and config.extra.sources:
        logger.warning("the nodes of 'sources' are asked for nothing: this vLLM names no KV, as %s", reason)
    return None if reason else naming


def shared_naming(
    vllm_config: VllmConfig, kv_cache_config: Any, config: TransferConfig, naming: Naming | None, pool: Any
) -> Naming | None:
    """The naming of the blocks that peers may fetch from the prefix cache; None where they cannot.

    A worker takes a step's orders before the step writes to any block that it was given. That is not so where
    vLLM zeroes blocks, which its newer runner does first. ``pool`` is vLLM's block pool, None in a worker.
    """
    if not config.extra.share_prefix_cache:
        return None
    reason = why_unnamed(vllm_config, naming)
    if not vllm_config.cache_config.enable_prefix_caching:
        reason = "its prefix cache is off; set --enable-prefix-caching"
    elif not reason and kv_cache_config.needs_kv_cache_zeroing:
        reason = "vLLM zeroes blocks of this model before workers know of it: states, or types of two widths"
    if reason and pool is not None:
        logger.warning("peers get nothing of this server's prefix cache: %s", reason)
    return None if reason else naming


def recompute_if_alone(vllm_config: VllmConfig, config: TransferConfig) -> None:
    """Set the policy to recompute where no KV comes from peers: then a failed restore fails no request.

    Called before vLLM's scheduler reads the policy. Under a MultiConnector vLLM reads the outer one's.
    """
    if config.extra.engine == "none":
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"


def outermost(connector: Any) -> Any:
    """The connector that vLLM's worker calls: this one, or the MultiConnector that it is in."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else connector


def warn_if_restores_fail(connector: Any, outer: Any, config: TransferConfig) -> None:
    """Warn where the policy "fail", meant for loads from peers, also applies to restores and pulls.

    vLLM has one policy, that of the outermost connector, for all loads.
    """
    policy = outer._kv_transfer_config.kv_load_failure_policy
    is_alone = outer is connector and config.extra.engine == "none"
    if policy == "fail" and not is_alone:
        logger.warning(
            "kv_load_failure_policy is 'fail', and vLLM has no other for what offload restores, and what "
            "'sources' keep: a request whose blocks cannot be copied back, or were dropped there meanwhile, "
            "ends with an error. With 'recompute' (that of the MultiConnector, if there is one) it is "
            "computed, and so is one whose KV a peer fails to send"
        )

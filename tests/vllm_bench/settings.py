"""vLLM's own configuration for an engine without a model, and what a seed draws for it."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)

from tests.vllm_bench.model import Model

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}


@dataclass(frozen=True)
class EngineSettings:
    """What distinguishes one engine from another."""

    num_blocks: int = 64
    max_num_seqs: int = 8
    max_batch_tokens: int = 64
    is_async: bool = False
    is_v2: bool = False
    is_late: bool = False
    num_drafts: int = 0
    policy: str = "recompute"


class Speculation:
    """What vLLM's scheduler and the connector ask of a speculative configuration."""

    max_num_new_slots_for_drafting = 0
    num_speculative_tokens_per_batch_size = None
    draft_model_config = None

    def __init__(self, num_drafts: int) -> None:
        self.num_speculative_tokens = num_drafts

    def use_multi_module_mtp(self) -> bool:
        return False

    use_eagle = use_eagle_block_drop = needs_eagle_block_drop = use_multi_module_mtp
    use_dflash = use_dspark = uses_draft_model = use_multi_module_mtp
    disable_eagle_block_drop = False
    parallel_drafting = False


class _Config(VllmConfig):
    """One whose runner can be chosen: without a GPU vLLM always takes the older one."""

    is_v2 = False

    @property
    def use_v2_model_runner(self) -> bool:
        return self.is_v2


@functools.cache
def _base() -> VllmConfig:
    folder = Path(tempfile.mkdtemp(prefix="vllm-bench-"))
    (folder / "config.json").write_text(json.dumps(_MODEL))
    # What both nodes state their weights to be: one tensor, so that its name is soon known.
    header = json.dumps({"arithmetic": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1")
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float16", max_model_len=448)
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=448, max_num_batched_tokens=64, max_num_seqs=8, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
    )


def vllm_config(
    settings: EngineSettings,
    role: str,
    engine_id: str,
    extra: dict[str, Any],
    model: Model,
    fields: Mapping[str, Any],
) -> VllmConfig:
    """vLLM's configuration of one engine; parts of it are shared between engines and never changed."""
    base = _base()
    made = copy.copy(base)
    made.__class__ = _Config
    made.model_config = copy.copy(base.model_config)
    made.model_config.hf_config = copy.deepcopy(base.model_config.hf_config)
    made.model_config.hf_config.update(fields)
    made.cache_config = copy.copy(base.cache_config)
    made.cache_config.num_gpu_blocks = settings.num_blocks
    made.cache_config.kv_cache_layout = "LBNHC"
    made.cache_config.mamba_cache_mode = model.mamba_mode
    made.cache_config.enable_prefix_caching = model.caches_prefixes
    made.scheduler_config = copy.copy(base.scheduler_config)
    made.scheduler_config.max_num_seqs = settings.max_num_seqs
    made.scheduler_config.max_num_batched_tokens = settings.max_batch_tokens
    made.scheduler_config.async_scheduling = settings.is_async
    made.is_v2 = settings.is_v2
    made.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if settings.num_drafts:
        made.speculative_config = Speculation(settings.num_drafts)
    made.kv_transfer_config = KVTransferConfig(
        kv_connector="KVConnect",
        kv_connector_module_path="kvconnect.vllm",
        kv_role=role,
        engine_id=engine_id,
        kv_load_failure_policy=settings.policy,
        kv_connector_extra_config=extra,
    )
    return made

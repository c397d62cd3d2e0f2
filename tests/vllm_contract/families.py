"""The KV caches of the architectures that vLLM registers, from its own code, without weights and servers.

A configuration is a library's default, cut to a few layers. vLLM makes its model on a device that has no
memory, asks the layers what they keep, and groups and lays that out as its engine does.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="CRITICAL")

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.transformers_utils import config as configurations
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    # Before vLLM 0.33.
    from vllm.v1.core import kv_cache_utils as planning  # type: ignore[no-redef]

NUM_LAYERS = 8
NUM_BLOCKS = 20
GENERATING = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}
"""Architectures that generate, and so may keep KV. Draft models are no servers, and embedders keep none."""

NOT_INSTALLED = ("torchvision", "timm", "cutlass", "librosa", "soundfile", "cuda")
"""What some models import and no cache depends on."""


class NoConfigurationError(Exception):
    """Neither vLLM nor transformers has a configuration of an architecture: that comes with its weights."""


@dataclass(frozen=True)
class Worker:
    """What a connector's worker half is given, of one rank."""

    vllm_config: Any
    kv_cache_config: Any
    kv_caches: Mapping[str, torch.Tensor]
    rank: int
    world_size: int


@functools.cache
def _model_types() -> dict[str, str]:
    """The type of configuration of each architecture that transformers knows."""
    found: dict[str, str] = {}
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES"):
            for model_type, known in getattr(modeling_auto, name).items():
                for one in known if isinstance(known, (tuple, list)) else (known,):
                    found.setdefault(one, model_type)
    return found


def configuration(architecture: str) -> dict[str, Any]:
    """A small configuration of an architecture. Raises ``NoConfigurationError``."""
    model_type, more = STAND_INS.get(architecture, (None, {}))
    # Architectures of one class have configurations alike.
    alike = [name for name, place in GENERATING.items() if place == GENERATING[architecture]]
    model_type = model_type or next(filter(None, map(_model_types().get, [architecture, *alike])), None)
    if model_type is None:
        raise NoConfigurationError(architecture)
    own = configurations._CONFIG_REGISTRY.get(model_type)
    if isinstance(own, str):
        own = getattr(__import__("vllm.transformers_utils.configs", fromlist=[own]), own)
    made = AutoConfig.for_model(model_type) if own is None else own()
    values = json.loads(json.dumps(made.to_dict(), default=str))
    values.pop("quantization_config", None)
    values = _cut(values)
    for key, value in more.items():
        inner = values
        *path, last = key.split(".")
        for part in path:
            inner = inner[part]
        inner[last] = value
    return {**values, "architectures": [architecture], "model_type": model_type}


def _cut(values: dict[str, Any]) -> dict[str, Any]:
    """The same with few layers, at any depth."""
    whole = values.get("num_hidden_layers")
    if isinstance(whole, int) and whole > NUM_LAYERS:
        values["num_hidden_layers"] = NUM_LAYERS
        for name, value in values.items():
            if isinstance(value, list) and len(value) == whole:
                values[name] = value[:NUM_LAYERS]
    # Of layers by number, those that are left.
    by_layer = values.get("per_layer_config")
    if isinstance(by_layer, dict):
        values["per_layer_config"] = {at: one for at, one in by_layer.items() if int(at) < NUM_LAYERS}
    for value in values.values():
        if isinstance(value, dict):
            _cut(value)
    return values


@functools.lru_cache(maxsize=4)
def worker(architecture: str, rank: int = 0, world_size: int = 1) -> Worker | None:
    """A rank's caches of ``NUM_BLOCKS`` blocks; None for a model that keeps none. The last ones are kept."""
    _prepare()
    with ExitStack() as given:
        while True:
            try:
                return _worker(architecture, rank, world_size)
            except AttributeError as error:
                lacking = re.search(r"Config' object has no attribute '(\w+)'", str(error))
                if lacking is None or lacking[1] not in USUAL or hasattr(PreTrainedConfig, lacking[1]):
                    raise
                usual = {lacking[1]: USUAL[lacking[1]]}
                given.enter_context(mock.patch.multiple(PreTrainedConfig, create=True, **usual))


def _worker(architecture: str, rank: int, world_size: int) -> Worker | None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(configuration(architecture)))
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            max_num_batched_tokens=4096,
        ).create_engine_config()
        vllm_config.parallel_config.tensor_parallel_size = world_size
        as_rank = mock.patch.multiple(
            parallel_state.get_tp_group(), rank_in_group=rank, world_size=world_size
        )
        with set_current_vllm_config(vllm_config), as_rank:
            return _laid_out(vllm_config, rank, world_size)


def _laid_out(vllm_config: Any, rank: int, world_size: int) -> Worker | None:
    with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        # Layers enter themselves into the configuration.
        model = initialize_model(vllm_config)
    specs = get_kv_cache_spec(vllm_config)
    if not specs:
        return None
    backends = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
    resolve_kv_cache_layout(vllm_config, [[layout.name for layout in backends]], list(specs.values()))
    vllm_config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    # What a request can need is not to decide over how few blocks are enough here.
    with mock.patch.object(planning, "_check_enough_kv_cache_memory"):
        (config,) = planning.get_kv_cache_configs(
            vllm_config, [specs], [1 << 40], *_groups(vllm_config, specs)
        )
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, None)
    del model
    return Worker(vllm_config, config, caches, rank, world_size)


def _groups(vllm_config: Any, specs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What vLLM 0.33 wants to be given besides; older releases find it out there."""
    find = getattr(planning, "get_global_kv_cache_groups", None)
    return () if find is None else (find(vllm_config, [specs]),)


def again(worker: Worker) -> Worker:
    layout = worker.vllm_config.cache_config.get_resolved_kv_cache_layout()
    caches = allocate_kv_cache(worker.kv_cache_config, torch.device("cpu"), layout, None)
    return dataclasses.replace(worker, kv_caches=caches)


@functools.cache
def _prepare() -> None:
    """Once a process: a world of one rank, and models that are looked at in this process."""
    sys.meta_path.append(_Absent())
    from vllm.triton_utils import triton

    torch.cuda.Stream = mock.MagicMock  # type: ignore[misc,assignment]
    for activation in ("gelu_new", "gelu_fast", "gelu_quick"):
        # A GPU's build has these kernels in a library that needs one.
        if not hasattr(torch.ops._C, activation):
            setattr(torch.ops._C, activation, None)
    _let_sparse_attention_be()
    workspace.init_workspace_manager(torch.device("cpu"))
    triton.set_allocator = lambda allocator: None
    # vLLM looks at each class in a process of its own, which takes as long as all the rest.
    registry._run_in_subprocess = lambda look: look()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


def _let_sparse_attention_be() -> None:
    """A CPU has no kernel for it, which nothing here runs: the GPU's is asked what it keeps."""
    from vllm.platforms.cpu import CpuPlatform

    chosen = CpuPlatform.get_attn_backend_cls

    def choose(cls: Any, selected: Any, attn_selector_config: Any, **named: Any) -> str:
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return str(chosen(selected, attn_selector_config=attn_selector_config, **named))

    CpuPlatform.get_attn_backend_cls = classmethod(choose)  # type: ignore[method-assign,assignment]


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is not installed, as modules of which every name is a class that does nothing."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] in NOT_INSTALLED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        made = ModuleType(spec.name)
        # Classes are inherited from, and of others the names within are read.
        as_class = spec.name.split(".")[0] in ("torchvision", "timm")
        made.__getattr__ = lambda name: mock.MagicMock if as_class else mock.MagicMock()  # type: ignore
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


USUAL: dict[str, Any] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "apply_vit_abs_pos_embed": False,
    "attention_value_scale": 1.0,
    "deepstack_visual_indexes": [],
    "downsample_factor": 4,
    "embed_dim": 1024,
    "expert_hidden_dim": 1024,
    "ffn_hidden_size": 4096,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "heads": 16,
    "image_size": 224,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "mlp_ratio": 4,
    "moe_layer_freq": [0] * NUM_LAYERS,
    "n_group": 1,
    "n_layer": NUM_LAYERS,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_nextn_predict_layers": 0,
    "original_rope": True,
    "output_dim": 1024,
    "patch_size": 16,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "rotary_dim": 64,
    "route_norm": True,
    "score_func": "sigmoid",
    "scoring_func": "sigmoid",
    "sliding_window_size": 64,
    "swa_head_dim": 128,
    "swa_num_attention_heads": 32,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 1e4,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "v_head_dim": 128,
    "window_size": 64,
    "zero_expert_type": "identity",
}
"""What configurations of transformers lack and vLLM's models read."""

_CONV = {"block_dim": 1024, "conv_dim": 1024, "block_ff_dim": 4096, "block_multiple_of": 256}
_CONV |= {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True}
_HALF = ["conv", "full_attention"] * (NUM_LAYERS // 2)
STAND_INS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "AfmoeForCausalLM": (None, {"score_func": "sigmoid"}),
    "DbrxForCausalLM": (
        None,
        {
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 2048, "moe_num_experts": 4, "moe_top_k": 1},
        },
    ),
    "Llama4ForCausalLM": ("llama4_text", {}),
    "Glm4MoeForCausalLM": (None, {"head_dim": 128}),
    "Glm4MoeLiteForCausalLM": (None, {"first_k_dense_replace": 1}),
    "HYV3ForCausalLM": (None, {"first_k_dense_replace": 1}),
    "Lfm2VlForConditionalGeneration": (None, {f"text_config.{k}": v for k, v in _CONV.items()}),
    "Lfm2ForCausalLM": (None, {**_CONV, "layer_types": _HALF}),
    "Lfm2MoeForCausalLM": (None, {**_CONV, "layer_types": _HALF}),
    "MiniMaxM2ForCausalLM": (None, {"rotary_dim": 64}),
    "NemotronForCausalLM": (None, {"num_key_value_heads": 8}),
    "NemotronHForCausalLM": (None, {"hybrid_override_pattern": "M-M*M-M-", "layers_block_type": None}),
    "MiMoV2FlashForCausalLM": (None, {"hybrid_layer_pattern": [0, 1] * 4}),
    "Qwen4ExpForCausalLM": (None, {"output_gate_type": "silu"}),
    "KimiLinearForCausalLM": (
        None,
        {
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "kv_lora_rank": 512,
            "mla_use_nope": True,
            "linear_attn_config": {
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2, 3, 5, 6, 7],
                "full_attn_layers": [4, 8],
            },
        },
    ),
    "LongcatFlashForCausalLM": (None, {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}),
    "InternLM2ForCausalLM": ("llama", {"bias": False, "num_key_value_heads": 8}),
    "InternLM2VEForCausalLM": ("llama", {"bias": False}),
    "MiniCPMForCausalLM": (
        "llama",
        {"dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12, "num_experts": 0},
    ),
    "MiMoForCausalLM": ("qwen2", {}),
    "OrionForCausalLM": ("llama", {}),
    "MistralLarge3ForCausalLM": ("deepseek_v3", {}),
    "PhiMoEForCausalLM": ("phimoe", {}),
    "Rnj1ForCausalLM": ("gemma3_text", {}),
    "SolarForCausalLM": (
        "llama",
        {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [3], "bskcn_4": [4], "bskcn_tv": [0.9, 0.8]},
    ),
    "Step1ForCausalLM": ("llama", {"num_attention_groups": 4}),
    "Step3TextForCausalLM": ("step3_text", {}),
    "Step3p5ForCausalLM": ("step3p5", {}),
    "TeleChat2ForCausalLM": ("llama", {"n_head": 32, "bias": False}),
    "TeleChat3ForCausalLM": ("llama", {"n_head": 32, "bias": False}),
    "TeleFLMForCausalLM": ("llama", {"use_mup": False}),
    "PanguEmbeddedForCausalLM": ("llama", {"bias": True, "is_causal": True}),
    "PanguUltraMoEForCausalLM": ("deepseek_v3", {}),
    "SarvamMLAForCausalLM": ("deepseek_v3", {}),
    "DeepseekForCausalLM": ("deepseek_v2", {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0}),
    "ChatGLMModel": ("chatglm", {}),
    "ChatGLMForConditionalGeneration": ("chatglm", {}),
    "MuseGlimmerForCausalLM": ("muse_glimmer_text", {}),
    "ExaoneForCausalLM": (
        "llama",
        {"num_layers": NUM_LAYERS, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
    ),
    "BailingMoeForCausalLM": (
        "mixtral",
        {
            "num_experts": 4,
            "use_bias": False,
            "use_qkv_bias": False,
            "embedding_dropout": 0.0,
            "head_dim": 128,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
    ),
    "HrmTextForCausalLM": (None, {}),
}
"""Architectures whose configuration comes with their weights: the type of one that is like it, or None, and
what their models read besides."""

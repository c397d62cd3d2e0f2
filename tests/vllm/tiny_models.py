"""Tiny models with random weights for real vLLM servers, written to a folder.

Weights are drawn wide enough that greedy output is varied and depends on the whole prompt; with the
libraries' own initialisation it is one token for ever, and proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

_WEIGHT_SCALE = 0.2
VOCABULARY = 259
"""256 bytes, then padding, beginning and end of text."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 32768,
    "pad_token_id": VOCABULARY - 3,
    "bos_token_id": VOCABULARY - 2,
    "eos_token_id": VOCABULARY - 1,
    "tie_word_embeddings": False,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
STATE_HEADS = {"q": 2, "k": 2, "v": 4}
"""Of the hybrid model's recurrence, by projection, in the order of its convolution's channels."""
STATE_WIDTH, STATE_TAPS = 64, 3
_WHOLE = ("--max-num-batched-tokens", "4096")
"""vLLM's CPU build computes a prompt of a latent model in one piece or not at all."""

_Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """A model on disk, and the options that a server needs for it beyond the usual ones."""

    kind: str
    folder: Path
    options: tuple[str, ...] = ()


def write_model(kind: str, folder: Path) -> Recipe:
    """Write one of ``KINDS`` below ``folder``."""
    # Vectors (norms, decays of a recurrence) keep what the library draws for them.
    torch.manual_seed(1)
    target = folder / "target"
    target.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(target)
    return KINDS[kind](kind, target)


def _gqa(kind: str, folder: Path) -> Recipe:
    _save(Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=4, **_COMMON, **_HEADS)), folder)
    return Recipe(kind, folder)


def _moe(kind: str, folder: Path) -> Recipe:
    """A mixture of four experts, two of which take each token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, **experts, **_COMMON, **_HEADS)), folder)
    return Recipe(kind, folder)


def _fp8(kind: str, folder: Path) -> Recipe:
    return Recipe(kind, _gqa(kind, folder).folder, ("--kv-cache-dtype", "fp8"))


def _heavy(kind: str, folder: Path) -> Recipe:
    """128 KiB of KV per token, in 32 layers: what a model of eight thousand million parameters keeps."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    shape = {**_COMMON, **heads, "max_position_embeddings": 40960}
    _save(Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=32, **shape)), folder)
    return Recipe(kind, folder)


def _sliding(kind: str, folder: Path) -> Recipe:
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        num_hidden_layers=6, sliding_window=256, layer_types=layers, **_COMMON, **_HEADS
    )
    _save(Gemma3ForCausalLM(config), folder)
    return Recipe(kind, folder)


def _hybrid(kind: str, folder: Path) -> Recipe:
    config = Qwen3NextConfig(
        num_hidden_layers=4,
        linear_num_key_heads=STATE_HEADS["k"],
        linear_num_value_heads=STATE_HEADS["v"],
        linear_key_head_dim=STATE_WIDTH,
        linear_value_head_dim=STATE_WIDTH,
        linear_conv_kernel_dim=STATE_TAPS + 1,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0, 1, 2],
        **_COMMON,
        **_HEADS,
    )
    _save(Qwen3NextForCausalLM(config), folder)
    return Recipe(kind, folder)


def _latent_config(**more: Any) -> DeepseekV3Config:
    return DeepseekV3Config(
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        **{**_COMMON, **more},
    )


def _mla(kind: str, folder: Path) -> Recipe:
    _save(DeepseekV3ForCausalLM(_latent_config()), folder, num_nextn_predict_layers=0)
    return Recipe(kind, folder, _WHOLE)


def _mtp(kind: str, folder: Path) -> Recipe:
    """A latent model with a module that predicts one token more: its cache is a layer like the others."""
    model = DeepseekV3ForCausalLM(_latent_config())
    _save(model, folder, _module_weights(model.state_dict()), num_nextn_predict_layers=1)
    return Recipe(kind, folder, (*_WHOLE, *_speculate(method="mtp", num_speculative_tokens=1)))


def _mtp_gqa(kind: str, folder: Path) -> Recipe:
    """The same with heads of keys and values, of which vLLM's CPU build keeps prefixes."""
    config = Glm4MoeConfig(
        num_hidden_layers=3,
        # vLLM wants a layer with experts, and takes the module for one too.
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        partial_rotary_factor=0.5,
        **_COMMON,
        **_HEADS,
    )
    _save(Glm4MoeForCausalLM(config), folder, num_nextn_predict_layers=1)
    # On disk experts have other names than in memory.
    weights = _filled(_module_weights(load_file(folder / "model.safetensors")))
    save_file(weights, folder / "more.safetensors", {"format": "pt"})
    return Recipe(kind, folder, _speculate(method="mtp", num_speculative_tokens=1))


def _module_weights(model: Mapping[str, torch.Tensor]) -> _Weights:
    """The weights of a module like the last layer of three, and of what it has besides."""
    weights = {
        name.replace("layers.2.", "layers.3."): tensor
        for name, tensor in model.items()
        if "layers.2." in name
    }
    prefix = "model.layers.3."
    hidden, vocabulary = _COMMON["hidden_size"], _COMMON["vocab_size"]
    weights[prefix + "eh_proj.weight"] = torch.empty(hidden, 2 * hidden)
    weights[prefix + "embed_tokens.weight"] = torch.empty(vocabulary, hidden)
    weights[prefix + "shared_head.head.weight"] = torch.empty(vocabulary, hidden)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{prefix}{norm}.weight"] = torch.ones(hidden)
    return weights


def _eagle(kind: str, folder: Path) -> Recipe:
    _save(LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **_COMMON, **_HEADS)), folder)
    return Recipe(kind, folder, _speculate(method="eagle", model=_write_draft(folder, _HEADS)))


KINDS: dict[str, Callable[[str, Path], Recipe]] = {
    "gqa": _gqa,
    "moe": _moe,
    "fp8": _fp8,
    "heavy": _heavy,
    "sliding": _sliding,
    "hybrid": _hybrid,
    "mla": _mla,
    "mtp": _mtp,
    "mtp_gqa": _mtp_gqa,
    "eagle": _eagle,
}


def _speculate(num_speculative_tokens: int = 2, **config: Any) -> tuple[str, ...]:
    return ("--speculative-config", json.dumps({"num_speculative_tokens": num_speculative_tokens, **config}))


def _write_draft(target: Path, heads: dict[str, Any]) -> str:
    """An Eagle draft model of one layer. Its guesses are bad: only its cache counts."""
    folder = target.parent / "draft"
    folder.mkdir(exist_ok=True)
    config = LlamaConfig(num_hidden_layers=1, **{**_COMMON, **heads})
    model = LlamaForCausalLM(config)
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in model.state_dict().items()
        if "layers.0." in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.empty(config.hidden_size, 2 * config.hidden_size)
    config.architectures = ["LlamaForCausalLM"]
    save_file(_filled(weights), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(config.to_json_string())
    return str(folder)


def _save(model: PreTrainedModel, folder: Path, more: _Weights | None = None, **config: Any) -> None:
    model.to(torch.bfloat16)
    with torch.no_grad():
        for name, tensor in _filled(dict(model.named_parameters())).items():
            model.get_parameter(name).copy_(tensor)
    model.save_pretrained(folder)
    if more:
        save_file(_filled(more), folder / "more.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def _filled(weights: Mapping[str, torch.Tensor]) -> _Weights:
    """Random matrices, and the vectors as they are."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: (
            torch.randn(tensor.shape, generator=generator) * _WEIGHT_SCALE if tensor.dim() >= 2 else tensor
        )
        .to(torch.bfloat16)
        .contiguous()
        for name, tensor in weights.items()
    }


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<pad>", "<bos>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)

"""A dense model of any size with random weights, for servers on GPUs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.vllm.tiny_models import VOCABULARY, Recipe, _write_tokenizer

_WRITERS = 8
_SHARPNESS = 2.0
"""Weight of the query and key norms. Attention scores then spread by the square of it, and a few tokens of
any prompt decide what is attended to; with 1 a long prompt blurs into its average."""


@dataclass(frozen=True)
class Shape:
    """A dense model. The default has the layers of one with eight thousand million parameters."""

    layers: int = 36
    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    positions: int = 40960


def write_model(folder: Path, shape: Shape, device: str) -> Recipe:
    """Write a model with random weights, drawn on ``device``, unless ``folder`` has it already.

    Every part adds to the residual stream about as much as the others: no layer's KV drowns.
    """
    recipe = Recipe("gpu", folder)
    if (folder / "config.json").exists():
        return recipe
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY - 3,
        bos_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1,
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Qwen3ForCausalLM(config).named_parameters()}
    files: dict[str, dict[str, torch.Size]] = {}
    for name, size in shapes.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        files.setdefault(f"layer{layer[1]}" if layer else "rest", {})[name] = size

    def write(seed: int, name: str) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        weights = {key: _weight(key, size, generator).cpu() for key, size in files[name].items()}
        save_file(weights, folder / f"{name}.safetensors", {"format": "pt"})

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(len(files)), files))
    if device != "cpu":
        torch.cuda.empty_cache()
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16
    # Last: a folder that has it is whole.
    (folder / "config.json").write_text(config.to_json_string())
    return recipe


def _weight(name: str, size: torch.Size, generator: torch.Generator) -> torch.Tensor:
    weight = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    if weight.dim() < 2:
        return weight.fill_(_SHARPNESS if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
    scale = 1.0 if "embed_tokens" in name else size[1] ** -0.5
    return weight.normal_(0, scale, generator=generator)

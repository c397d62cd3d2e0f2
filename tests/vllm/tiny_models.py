"""Tiny models with random weights for real vLLM servers, written to a folder.

Weights are drawn wide enough that greedy output is varied and depends on the whole prompt; with the
libraries' own initialisation it is one token for ever, and proves nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_WEIGHT_SCALE = 0.2
VOCABULARY = 259
"""256 bytes, then padding, beginning and end of text."""


def write_model(kind: str, folder: Path) -> Path:
    """Write the model ``gqa`` (dense) or ``sliding`` (sliding-window and full layers) to ``folder``."""
    _write_tokenizer(folder)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "pad_token_id": VOCABULARY - 3,
        "bos_token_id": VOCABULARY - 2,
        "eos_token_id": VOCABULARY - 1,
        "tie_word_embeddings": False,
    }
    if kind == "gqa":
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=4, **common))
    else:
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=256, layer_types=layers, **common)
        model = Gemma3ForCausalLM(config)
    model.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _WEIGHT_SCALE)
    model.save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<pad>", "<bos>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)

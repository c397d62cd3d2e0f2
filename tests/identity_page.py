"""docs/vllm.md: its table of what KV depends on is made from the list, the texts around it stay.

python -m tests.identity_page
"""

from __future__ import annotations

import re
from pathlib import Path

from kvconnect.cache.identity import ENTRIES
from kvconnect.vllm.stated_identity import FREE_FIELDS, FREE_SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "vllm.md"
_TABLE = re.compile(r"(<!-- identity -->\n).*?(?=\n\n|\Z)", re.S)

SOURCES = {
    "model": "class of the running model: architecture, `--model-impl`",
    "configuration": "`hf_config` once the model is built: `config.json`, `--hf-overrides`, "
    "`--hf-config-path`, `--override-generation-config`, `--max-model-len` where a model reads these",
    "settings": "`ModelConfig`, `MultiModalConfig` and `additional_config` that are not at their defaults",
    "attention": "the attention layers: `--disable-sliding-window`, `--hf-overrides`",
    "rotary": "the rotary modules' tables; LongRoPE's choice by `--max-model-len`",
    "quantization": "`quant_config`: the checkpoint's, `--quantization`",
    "dtype": "`--dtype`",
    "cache dtype": "the layers and their specs: `--kv-cache-dtype`, `auto` resolved",
    "page order": "the backend's own cache update: `--attention-backend`, the processor, `VLLM_*` variables",
    "states": "the specs of recurrent layers, `VLLM_SSM_CONV_STATE_LAYOUT`, `--mamba-cache-dtype`",
    "ranks": "`--tensor-parallel-size` of layers whose division only vLLM knows",
    "weights": "the checkpoint's files, the tensors in memory",
    "adapters": "`adapter_config.json` and weights in the adapter's folder: `--lora-modules`",
    "draft": "`--speculative-config`",
    "names": "`--prefix-caching-hash-algo`, `PYTHONHASHSEED`, `offload.salt`",
    "block size": "`--block-size`; CPU attention's pages cannot be cut",
    "layout": "`VLLM_KV_CACHE_LAYOUT`",
    "parallelism": "`--tensor-parallel-size` and the like",
    "scales": "`k_scale` and `v_scale` of the checkpoint",
    "cache groups": "`--disable-hybrid-kv-cache-manager`",
}
"""By entry where in vLLM its value comes from, and what sets it."""


def table() -> str:
    """Of each entry its rule, and of what counts in none of them why."""
    rows = ["| what | rule | compared, or bridged | in vLLM |", "|---|---|---|---|"]
    rows += [f"| {one.name} | {one.rule.value} | {one.what} | {SOURCES[one.name]} |" for one in ENTRIES]
    for title, free in (("fields of the configuration", FREE_FIELDS), ("settings", FREE_SETTINGS)):
        for reason, names in free.items():
            listed = ", ".join(f"`{name}`" for name in names)
            rows.append(f"| {title} | does not matter | {reason} | {listed} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with its table as it should be."""
    return _TABLE.sub(lambda found: found[1] + table(), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

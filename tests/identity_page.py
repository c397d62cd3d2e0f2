"""docs/vllm.md: its table of what KV depends on is made from the list, the texts around it stay.

python -m tests.identity_page
"""

from __future__ import annotations

import re
from pathlib import Path

from kvconnect.cache.identity import ENTRIES, Rule
from kvconnect.runner_kit.model_configuration import FREE_FIELDS
from kvconnect.vllm.stated_identity import FREE_SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "vllm.md"
_TABLE = re.compile(r"(<!-- identity -->\n).*?(?=\n\n|\Z)", re.S)

SOURCES = {
    "model": "the architecture, `--model-impl`",
    "configuration": "`config.json`, `--hf-overrides`, `--hf-config-path`, "
    "`--override-generation-config`, `--max-model-len` where a model reads these",
    "settings": "`ModelConfig`, `MultiModalConfig`, `additional_config`",
    "attention": "`--disable-sliding-window`, `--hf-overrides`",
    "rotary": "`config.json`; of LongRoPE `--max-model-len`",
    "quantization": "the checkpoint, `--quantization`",
    "dtype": "`--dtype`",
    "cache dtype": "`--kv-cache-dtype`",
    "page order": "`--attention-backend`, the processor, `VLLM_*` variables",
    "states": "`VLLM_SSM_CONV_STATE_LAYOUT`, `--mamba-cache-dtype`",
    "ranks": "`--tensor-parallel-size` of layers whose division only vLLM knows",
    "weights": "the checkpoint's files, tensors in memory",
    "adapters": "`--lora-modules`: `adapter_config.json` and weights of each",
    "draft": "`--speculative-config`",
    "names": "`--prefix-caching-hash-algo`, `PYTHONHASHSEED`, `offload.salt`",
    "block size": "`--block-size`",
    "layout": "`VLLM_KV_CACHE_LAYOUT`",
    "parallelism": "`--tensor-parallel-size` and the like",
    "scales": "the checkpoint's `k_scale` and `v_scale`",
    "cache groups": "`--disable-hybrid-kv-cache-manager`",
}
"""By entry what sets it."""


def table() -> str:
    """Under each rule its entries, and under the last one fields and settings, by the reason for it."""
    rows = ["| what | compared, or bridged | set by |", "|---|---|---|"]
    for rule in Rule:
        if entries := [one for one in ENTRIES if one.rule is rule]:
            rows.append(f"| **{rule.value}** | | |")
            rows += [f"| {one.name} | {one.what} | {SOURCES[one.name]} |" for one in entries]
    rows.append(f"| **{Rule.FREE.value}** | | fields of the configuration, and settings |")
    for reason in {**FREE_FIELDS, **FREE_SETTINGS}:
        names = dict.fromkeys([*FREE_FIELDS.get(reason, ()), *FREE_SETTINGS.get(reason, ())])
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {reason} | | {listed} |")
    return "\n".join(rows)


def page(text: str) -> str:
    return _TABLE.sub(lambda found: found[1] + table(), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

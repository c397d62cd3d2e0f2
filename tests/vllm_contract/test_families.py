"""The caches of the architectures that vLLM registers: none that can be built here is refused."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")
pytest.importorskip("vllm.v1.worker.utils").__dict__.get("allocate_kv_cache") or pytest.skip(
    "this vLLM does not lay out caches by their configuration alone", allow_module_level=True
)

# One of each kind of cache, and of each way to group them.
SAMPLE = [
    "LlamaForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "MambaForCausalLM",
    "JambaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Lfm2ForCausalLM",
    "MiMoV2FlashForCausalLM",
    "HrmTextForCausalLM",
    "WhisperForConditionalGeneration",
]


def verdicts(names: list[str], timeout_s: float) -> list[tuple[str, str]]:
    """Architectures, each with a word and more about it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_contract.family_checks", *names],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0].isidentifier()]
    assert done.returncode == 0, done.stderr[-3000:]
    return [(name, verdict) for name, verdict in lines if ":" in verdict or verdict == "divided"]


@pytest.mark.timeout(600)
def test_a_cache_of_each_kind_passes_and_is_divided_over_ranks():
    found = verdicts(SAMPLE, 600)
    passed = {name for name, verdict in found if verdict.startswith("passes")}
    divided = {name for name, verdict in found if verdict == "divided"}
    assert (passed, divided) == (set(SAMPLE), set(SAMPLE)), found


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_cache_of_every_architecture():
    """What cannot be built here counts as nothing: docs/vllm.md has what that is."""
    found = verdicts([], 3600)
    print("\n".join(f"{name} {verdict}" for name, verdict in found))
    counts = Counter(verdict.split(":")[0] for _, verdict in found)
    print(dict(counts))
    assert not counts["refused"]
    assert counts["passes"] >= 100

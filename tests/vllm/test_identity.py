"""Real vLLM servers whose KV means different things exchange none; those that only look different do."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.vllm.servers import Server, random_prompt, running, transfer_config
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.servers]

ROPE = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}})
COUNTS = {
    "rope": (("--hf-overrides", ROPE), "configuration.rope_parameters.rope_theta is "),
    "norm": (("--hf-overrides", '{"rms_norm_eps": 0.5}'), "configuration.rms_norm_eps is "),
    "class": (("--model-impl", "transformers"), "model is "),
}
FREE = ("--kv-cache-dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "4", "--seed", "7")


@pytest.mark.parametrize(
    "what",
    ["rope", pytest.param("norm", marks=pytest.mark.full), pytest.param("class", marks=pytest.mark.full)],
)
def test_a_difference_is_refused_by_name_and_what_does_not_matter_is_not(tmp_path, what):
    recipe = write_model("gqa", tmp_path)
    flags, name = COUNTS[what]
    prefill = Server(recipe, tmp_path, "prefill", "0", transfer_config("producer", "nixl"))
    config = transfer_config("consumer", "nixl", kv_load_failure_policy="recompute")
    unlike = Server(recipe, tmp_path, "unlike", "1", config, flags)
    alike = Server(recipe, tmp_path, "alike", "1", config, FREE)
    with running(prefill, unlike, alike):
        prompt = random_prompt(300, 1)
        assert alike.tokens(prompt, kv_transfer_params=prefill.prefilled(prompt)) == prefill.local_tokens(
            prompt
        )
        assert alike.loaded_tokens() > 0
        for seed in (2, 3):
            prompt = random_prompt(300, seed)
            answer = unlike.tokens(prompt, kv_transfer_params=prefill.prefilled(prompt))
            assert answer == unlike.local_tokens(prompt)
        assert unlike.metrics(reason="other_identity").get("vllm:kvconnect_failures_total", 0) == 2
        assert f"KV means something else there: {name}" in unlike.log.read_text()

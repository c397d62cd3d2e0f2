"""Models with other pools than one of pages, as far as SGLang runs them on a CPU: sliding windows."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from tests.sglang.servers import Asked, SglangServer, pair, random_prompt, running
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers, pytest.mark.full]

LENGTHS = (1, 17, 600, 1500)


MORE = {"return_logprob": True, "top_logprobs_num": 5}


def likelihoods(answer):
    """Of each token but the first, which is P's, how likely it and others were."""
    rows = answer["meta_info"]["output_top_logprobs"][1:]
    return [value for row in rows for value, _, _ in row]


def test_sliding_window(tmp_path):
    """This model repeats one token, so likelihoods are compared: those of others depend on the window."""
    model = write_model("sliding", tmp_path).folder
    prompts = [random_prompt(length, length) for length in LENGTHS]
    with running(SglangServer(model, tmp_path, "plain")) as (plain,):
        expected = [likelihoods(plain.ask(prompt, **MORE)) for prompt in prompts]
    assert expected[2] != pytest.approx(expected[3], abs=0.3)
    with pair(model, tmp_path, "nixl") as (prefill, decode):
        for prompt, values in zip(prompts, expected, strict=True):
            with Asked(prefill, decode, prompt, **MORE) as asked:
                assert likelihoods(asked.answer()) == pytest.approx(values, abs=0.01)
        prefill.wait_idle()
        decode.wait_idle()

"""Pairs of real vLLM servers whose caches keep other types: what landed is torch's cast of what was held."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.vllm import servers
from tests.vllm.comparing import assert_bytes_landed
from tests.vllm.servers import pair, random_prompt
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.full, pytest.mark.servers]

FP8 = ("--kv-cache-dtype", "fp8")
LENGTHS = (2, 100, 128, 129, 300, 513, 1025)
CASES = {
    # The digests are of the decode server's type, so that its pages are hashed as they are.
    "to fp8": ((), FP8, "float8_e4m3fn"),
    "from fp8": (FP8, (), "bfloat16"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_page_that_landed_is_the_cast_of_the_one_that_was_held(case, tmp_path, monkeypatch):
    prefill_options, decode_options, digest_dtype = CASES[case]
    monkeypatch.setenv("KVCONNECT_TEST_DIGEST_DTYPE", digest_dtype)
    monkeypatch.setattr(servers, "OBSERVED", "tests.vllm.observed_values")
    recipe = write_model("gqa", tmp_path)
    with pair(
        recipe,
        tmp_path,
        "nixl",
        prefill_options=prefill_options,
        decode_options=decode_options,
        convert_dtype=True,
    ) as (prefill, decode):
        before = decode.loaded_tokens()
        for seed, length in enumerate(LENGTHS):
            prompt = random_prompt(length, seed)
            tokens = decode.from_prefill(prefill, prompt, max_tokens=12)
            assert len(tokens) == 12
        assert decode.loaded_tokens() - before >= sum(LENGTHS) - len(LENGTHS)
        assert len(assert_bytes_landed(prefill, decode, len(LENGTHS))) == 4

"""Which of vLLM's requests were made of one, and which are prompts of one batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvconnect.vllm.requests import batch_of, parent_of

CHOSEN = ["x", "a-1", "1_a", "a-1-0123abcd", "cmpl-a-1-0123abcd", "___prefill_addr_10.0.0.1:1_", "a b\nc-2"]
"""What clients may put between vLLM's own parts."""


@pytest.mark.parametrize("chosen", CHOSEN)
def test_children_have_their_parent_in_common_whatever_a_client_calls_it(chosen):
    for request_id in (f"cmpl-{chosen}-0-89abcdef", f"chatcmpl-{chosen}-89abcdef"):
        assert parent_of(request_id) == request_id
        assert {parent_of(f"{n}_{request_id}") for n in (0, 1, 12)} == {request_id}


@pytest.mark.parametrize("chosen", CHOSEN)
def test_prompts_of_a_batch_have_their_name_in_common_and_a_number(chosen):
    for child in ("", "0_", "3_"):
        assert batch_of(f"{child}chatcmpl-{chosen}-89abcdef") == ("", 0)
        for prompt in (0, 1, 2, 10, 2047):
            assert batch_of(f"{child}cmpl-{chosen}-{prompt}-89abcdef") == (f"cmpl-{chosen}", prompt)


def test_what_has_no_number_is_of_no_batch():
    assert batch_of("cmpl-a-1") == ("", 0), "nothing random: vLLM was told to keep ids as they come"


def test_vllm_makes_such_ids():
    pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    for prompt in (0, 1):
        made = SimpleNamespace(
            request_id=f"cmpl-a-{prompt}",
            external_req_id=None,
            params=SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY),
        )
        InputProcessor.assign_request_id(made)
        parent = ParentRequest(made)
        for index in range(2):
            child, _ = parent.get_child_info(index)
            assert parent_of(child) == made.request_id != "cmpl-a-1"
            assert batch_of(child) == ("cmpl-a", prompt)

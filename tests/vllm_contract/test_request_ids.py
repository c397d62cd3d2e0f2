"""Which of vLLM's requests were made of one, and whose parameters reach a router."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvconnect.vllm.requests import parent_of, reaches_router

CHOSEN = ["x", "a-1", "1_a", "a-1-0123abcd", "cmpl-a-1-0123abcd", "___prefill_addr_10.0.0.1:1_", "a b\nc-2"]
"""What clients may put between vLLM's own parts."""


def request(request_id, kind="FINAL_ONLY", params=None):
    sampling = None if kind is None else SimpleNamespace(output_kind=SimpleNamespace(name=kind))
    return SimpleNamespace(request_id=request_id, sampling_params=sampling, kv_transfer_params=params)


@pytest.mark.parametrize("chosen", CHOSEN)
def test_children_have_their_parent_in_common_whatever_a_client_calls_it(chosen):
    for request_id in (f"cmpl-{chosen}-0-89abcdef", f"chatcmpl-{chosen}-89abcdef"):
        assert parent_of(request_id) == request_id
        assert {parent_of(f"{n}_{request_id}") for n in (0, 1, 12)} == {request_id}


@pytest.mark.parametrize("chosen", CHOSEN)
def test_of_a_batch_of_prompts_the_first_ones_parameters_reach_a_router(chosen):
    for child in ("", "0_", "3_"):
        assert reaches_router(request(f"{child}cmpl-{chosen}-0-89abcdef"))
        assert reaches_router(request(f"{child}chatcmpl-{chosen}-89abcdef"))
        for prompt in (1, 2, 10, 2047):
            later = f"{child}cmpl-{chosen}-{prompt}-89abcdef"
            assert not reaches_router(request(later))
            assert reaches_router(request(later, "DELTA")), "a stream ends with the parameters of each"
            assert reaches_router(request(later, params={"transfer_id": "t"})), "the router named it itself"


def test_what_is_no_request_for_text_is_left_alone():
    assert reaches_router(request("cmpl-a-1-89abcdef", kind=None))
    assert reaches_router(request("cmpl-a-1")), "nothing random: vLLM was told to keep ids as they come"


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
            child, sampling = parent.get_child_info(index)
            assert parent_of(child) == made.request_id != "cmpl-a-1"
            asked = SimpleNamespace(request_id=child, sampling_params=sampling, kv_transfer_params=None)
            assert reaches_router(asked) == (prompt == 0)

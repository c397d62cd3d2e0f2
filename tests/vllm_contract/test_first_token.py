"""The logits processor that makes D's first token the one that it is given, under both of vLLM's runners."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from kvconnect.vllm.first_token import FirstToken

VOCABULARY = 16
CONFIG = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))


def asks(token):
    return SamplingParams(
        extra_args={"kv_transfer_params": {"first_token": token, "do_remote_prefill": True}}
    )


def forced(logits):
    """By row the only token that can be sampled; None where all can."""
    found = []
    for row in logits:
        (open_,) = torch.nonzero(row > -math.inf, as_tuple=True)
        found.append(int(open_[0]) if len(open_) == 1 else None)
    return found


def update(added=(), removed=(), moved=(), size=4):
    return BatchUpdate(size, removed, [(row, params, [1], out) for row, params, out in added], moved)


def test_the_first_runner_samples_the_token_once_wherever_the_request_has_moved_to():
    made = FirstToken(CONFIG, torch.device("cpu"), False)
    out = {3: [], 1: []}
    made.update_state(update([(0, SamplingParams(), []), (1, asks(7), out[1]), (3, asks(9), out[3])]))
    assert forced(made.apply(torch.randn(4, VOCABULARY))) == [None, 7, None, 9]
    assert forced(made.apply(torch.randn(4, VOCABULARY))) == [None, 7, None, 9], "its step was of no sample"
    out[1].append(7)
    made.update_state(update(moved=[(3, 0, MoveDirectionality.SWAP)]))
    assert forced(made.apply(torch.randn(4, VOCABULARY))) == [9, None, None, None]
    made.update_state(update(removed=[0]))
    made.update_state(update([(0, SamplingParams(), [])]))
    assert forced(made.apply(torch.randn(4, VOCABULARY))) == [None] * 4
    assert not made.is_argmax_invariant(), "greedy sampling depends on it"


def test_a_request_that_was_preempted_goes_on_with_its_own_tokens():
    made = FirstToken(CONFIG, torch.device("cpu"), False)
    made.update_state(update([(0, asks(7), [7, 3])]))
    assert forced(made.apply(torch.randn(1, VOCABULARY))) == [None]


def test_a_mask_before_it_does_not_leave_nothing():
    made = FirstToken(CONFIG, torch.device("cpu"), False)
    made.update_state(update([(0, asks(7), [])]))
    assert forced(made.apply(torch.full((1, VOCABULARY), -math.inf))) == [7]


def second_runner():
    state = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([10, 20, 30], dtype=np.int32)))
    return FirstToken(CONFIG, state)


def step(slots, seen, rows=None):
    """A batch of these slots, of each so many tokens before the one that is sampled."""
    expanded = torch.tensor(rows if rows is not None else slots)
    return SimpleNamespace(
        idx_mapping_np=np.array(slots), seq_lens_upper_bound_np=np.array(seen), expanded_idx_mapping=expanded
    )


def test_the_second_runner_samples_the_token_after_the_whole_prompt_alone():
    made = second_runner()
    assert made.add_request(2, asks(7))
    assert not made.add_request(0, SamplingParams())
    logits = made.apply(torch.randn(2, VOCABULARY), step([0, 2], [10, 16]))
    assert forced(logits) == [None, None], "a part of its prompt"
    assert forced(made.apply(torch.randn(2, VOCABULARY), step([0, 2], [11, 30]))) == [None, 7]
    assert forced(made.apply(torch.randn(2, VOCABULARY), step([2, 0], [31, 12]))) == [None, None]
    assert not made._slots
    assert made.add_request(2, asks(5))
    assert not made.add_request(2, SamplingParams()), "the slot is another request's"
    assert forced(made.apply(torch.randn(1, VOCABULARY), step([2], [30]))) == [None]


def test_beside_requests_with_drafts_it_finds_its_row():
    made = second_runner()
    made.add_request(1, asks(4))
    logits = made.apply(torch.randn(4, VOCABULARY), step([0, 1], [15, 20], rows=[0, 0, 0, 1]))
    assert forced(logits) == [None, None, None, 4]


@pytest.mark.parametrize("token", ["7", -1, True, 1.5])
def test_what_is_no_token_is_refused_with_what_is_accepted(token):
    with pytest.raises(
        ValueError, match=r"kv_transfer_params.first_token is .*; accepted: the id of a token"
    ):
        FirstToken.validate_params(asks(token))


def test_any_other_request_is_valid_and_a_token_beyond_the_vocabulary_has_no_effect():
    for params in (SamplingParams(), asks(7), SamplingParams(extra_args={"kv_transfer_params": {}})):
        FirstToken.validate_params(params)
    made = FirstToken(CONFIG, torch.device("cpu"), False)
    made.update_state(update([(0, asks(VOCABULARY), [])]))
    assert forced(made.apply(torch.randn(1, VOCABULARY))) == [None]

"""Servers of several ranks: each gets its layers and heads, from whichever ranks have them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.vllm.comparing import assert_bytes_landed, assert_heads_landed, assert_states_landed
from tests.vllm.servers import EXACT, pair, random_prompt
from tests.vllm.tiny_models import STATE_HEADS, write_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.servers]
LENGTHS = [1, 5, 128, 129, 300, 513, 513, 1025]
CPUS = {1: "0", 2: "0|1"}
OPTIONS = {"gqa": EXACT, "hybrid": ()}
"""vLLM's CPU kernel of a gated delta net takes bfloat16 alone."""


def _options(ranks: int, stages: int = 1) -> list[str]:
    return ["--tensor-parallel-size", str(ranks), "--pipeline-parallel-size", str(stages)]


def _run(prefill, decode):
    prompts = [random_prompt(length, 40 + seed) for seed, length in enumerate(LENGTHS)]
    return {seed: (prompt, decode.from_prefill(prefill, prompt)) for seed, prompt in enumerate(prompts)}


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("gqa", "nixl"), pytest.param("hybrid", "mooncake", marks=pytest.mark.full)],
)
def test_two_ranks_to_two_ranks(tmp_path, kind, engine):
    recipe = write_model(kind, tmp_path)
    with pair(recipe, tmp_path, engine, options=_options(2), cpus=(CPUS[2], CPUS[2])) as (prefill, decode):
        answers = _run(prefill, decode)
        loads = len(LENGTHS) if kind == "gqa" else len(LENGTHS) - 1
        assert_bytes_landed(prefill, decode, 2 * loads)
        for prompt, got in answers.values():
            # Sums over ranks round by the number of tokens: only where the prefill server's last step had
            # one token too must they be equal.
            if len(prompt) % 512 == 1:
                assert got == prefill.local_tokens(prompt)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gqa", "hybrid"])
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1)])
def test_different_numbers_of_ranks(tmp_path, kind, prefill_ranks, decode_ranks):
    recipe = write_model(kind, tmp_path)
    with pair(
        recipe,
        tmp_path,
        "nixl",
        options=OPTIONS[kind],
        prefill_options=_options(prefill_ranks),
        decode_options=_options(decode_ranks),
        cpus=(CPUS[prefill_ranks], CPUS[decode_ranks]),
    ) as (prefill, decode):
        answers = _run(prefill, decode)
        assert all(len(got) == 16 for _, got in answers.values())
        if kind == "gqa":
            for prompt, got in answers.values():
                assert got == prefill.local_tokens(prompt) == decode.local_tokens(prompt)
            assert_heads_landed(prefill, decode, len(LENGTHS))
        else:
            assert_states_landed(prefill, decode, len(LENGTHS) - 1, STATE_HEADS)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((1, 2), (1, 1)),
        pytest.param((1, 1), (1, 2), marks=pytest.mark.full),
        pytest.param((1, 2), (2, 1), marks=pytest.mark.full),
    ],
)
def test_layers_of_two_pipeline_ranks(tmp_path, prefill, decode):
    """Each of ``prefill`` and ``decode`` is tensor-parallel and pipeline ranks."""
    recipe = write_model("gqa", tmp_path)
    cpus = tuple(CPUS[tensor * stages] for tensor, stages in (prefill, decode))
    sides = {"prefill_options": _options(*prefill), "decode_options": _options(*decode)}
    with pair(recipe, tmp_path, "nixl", cpus=cpus, **sides) as (producer, consumer):
        answers = _run(producer, consumer)
        assert_heads_landed(producer, consumer, len(LENGTHS))
        held, landed = (
            {(record["rank"], layer) for record in side.observed(kind) for layer in record["pages"]}
            for side, kind in ((producer, "hold"), (consumer, "load"))
        )
        for kept, (tensor, stages) in ((held, prefill), (landed, decode)):
            assert {rank for rank, _ in kept} == set(range(tensor * stages))
            layers = {layer for _, layer in kept}
            assert len(layers) > 1
            assert len(kept) == len(layers) * tensor, "two pipeline ranks have a layer"
        assert {layer for _, layer in held} == {layer for _, layer in landed}
        for prompt, got in answers.values():
            assert len(got) == 16
            # Stages round as one rank does; sums over tensor-parallel ranks do not.
            if len(prompt) % 512 == 1 and prefill[0] == decode[0]:
                assert got == producer.local_tokens(prompt)

"""Seeded random traffic through vLLM's own scheduler and both halves of the connector."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.vllm_bench.pair import KINDS
from tests.vllm_bench.seeds import run_seeds

pytestmark = pytest.mark.timeout(900)
NUM_SEEDS = 120


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_reads_the_right_bytes_at_every_step(kind):
    outcome = run_seeds(kind, range(NUM_SEEDS))
    failure = outcome.failure
    assert failure is None, "\n".join(
        [str(failure), *failure.trace[-20:], "python -m tests.vllm_bench replays it"]
    )
    assert outcome.num_seeds == NUM_SEEDS
    assert outcome.steps > 20 * NUM_SEEDS, outcome


def test_a_local_chunk_is_stored_only_while_its_blocks_are_its_requests():
    """vLLM frees a chunk's blocks at the chunk's end, which is well before that of a long prompt."""
    outcome = run_seeds("offload", (453, 557, 893, 941, 1461))
    assert outcome.failure is None, str(outcome.failure)

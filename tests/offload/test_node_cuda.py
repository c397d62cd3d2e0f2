"""A node on a GPU that keeps blocks: the same prompts come back, and every token is right."""

from __future__ import annotations

import pytest
import torch

from tests.node.node_harness import make_prompt
from tests.offload.node_kit import ORACLES, POOLS, disk_settings, expected, make_keeper, wipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("model", list(POOLS))
def test_prompts_return_to_a_gpu_from_memory_and_from_disk(model, tmp_path):
    options = {"model": model, "num_blocks": POOLS[model], "device": "cuda"}
    offload = disk_settings(tmp_path)
    oracle = ORACLES[model]()
    prompts = [make_prompt(length, seed=length) for length in (300, 170, 33)]
    for start in range(2):
        keeper = make_keeper(offload=offload, **options)
        for turn in range(2):
            for prompt in prompts:
                tokens = keeper.ask(prompt, 40)
                assert tokens == expected(prompt, 40, model=model, device="cuda")
                assert keeper.cached == oracle.hit(prompt)
                assert (keeper.cached > 0) == (start + turn > 0 and oracle.align < len(prompt))
                oracle.add(prompt, tokens[:40], keeper.cached)
            wipe(keeper)
        keeper.close()

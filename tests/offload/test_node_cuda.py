"""A node on a GPU that keeps blocks: the same prompts come back, and every token is right."""

from __future__ import annotations

import pytest
import torch

from tests.node.node_harness import make_prompt
from tests.node.test_decode import with_graphs
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
                assert (keeper.cached > 0) == (start + turn > 0 and oracle.block_tokens < len(prompt))
                oracle.add(prompt, tokens[:40], keeper.cached)
            wipe(keeper)
        keeper.close()


def test_decode_graphs_and_offload_do_not_disturb_each_other():
    options = {"device": "cuda", "num_blocks": 200, "max_num_batched_tokens": 64}
    keeper = make_keeper(**options)
    with_graphs(keeper)
    prompts = {f"r{number}": make_prompt(60 + 20 * number, seed=number) for number in range(8)}
    for turn in range(3):
        names = {f"{name}-{turn}": prompt for name, prompt in prompts.items()}
        for name, prompt in names.items():
            keeper.submit(name, prompt, 80)
        keeper.run(*names)
        for name, prompt in names.items():
            assert keeper.tokens(name) == expected(prompt, 80, device="cuda")
        keeper.settle()
        wipe(keeper)

"""The node on a GPU: the same invariances as on a CPU."""

import pytest
import torch

from tests.node.node_harness import MODEL_NAMES, CopyConnector, make_client, make_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tokens_do_not_depend_on_budget_or_concurrency(name):
    prompts = [make_prompt(length, seed=length) for length in (40, 300, 7)]
    alone = [make_client(model=name, device="cuda").complete(prompt, 20) for prompt in prompts]
    client = make_client(model=name, device="cuda", max_num_batched_tokens=33)
    for index, prompt in enumerate(prompts):
        client.submit(str(index), prompt, 20)
    client.run("0", "1", "2")
    assert [client.tokens(str(i)) + client.drafts(str(i)) for i in range(3)] == alone


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_loaded_request_gives_the_tokens_of_a_local_one(name):
    prompt = make_prompt(300)
    expected = make_client(model=name, device="cuda").complete(prompt)
    prefill = CopyConnector()
    p = prefill.attach(model=name, device="cuda")
    p.submit("p", prompt, 1, {"do_remote_decode": True})
    p.run("p")
    d = CopyConnector(p).attach(model=name, device="cuda", reserved_blocks=11)
    last = p.last("p")
    assert last is not None
    assert d.complete(prompt, 8, last.kv_transfer_params) == expected

"""Batched decode steps of fixed shapes: the tokens of the plain path, and not a byte elsewhere."""

import pytest
import torch

from tests.node.decoding import decode_with, padded_sizes
from tests.node.node_harness import MODEL_NAMES, make_client, make_prompt
from tests.node.test_zeroing import poison

LENGTHS = (40, 7, 129, 96, 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_batched_decoding_gives_the_tokens_of_the_plain_path(name, dtype):
    """Requests come and go, blocks grow, and free blocks hold NaN where that is zeroed away."""
    prompts = [make_prompt(length, seed=length) for length in LENGTHS]
    counts = [50, 9, 20, 33, 3]
    options = {"model": name, "kv_cache_dtype": dtype, "enable_prefix_caching": False, "max_model_len": 256}
    plain = make_client(**options)
    expected = [plain.complete(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    client = make_client(**options)
    decoder = decode_with(
        client,
        (
            1,
            2,
            4,
        ),
    )
    poison(client, 0x7F)
    for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        client.submit(str(index), prompt, count)
        client.steps(3)
    client.run(*map(str, range(5)))
    assert [client.tokens(str(i)) + client.drafts(str(i)) for i in range(5)] == expected
    assert decoder.num_runs > 40


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage that the tensor is a view of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).clone()


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_padded_rows_change_no_byte(name):
    """Neither in the null block, which they point to, nor anywhere else."""
    results = []
    for size in (1, 8):
        client = make_client(model=name, max_model_len=256)
        client.submit("r", make_prompt(40), 20)
        client.steps(1)
        decode_with(client, (size,))
        client.steps(5)
        cache = client.engine.runner.cache
        storages = {t.tensor.untyped_storage().data_ptr(): t.tensor for t in cache.tensors.values()}
        results.append([_bytes_of(tensor) for tensor in storages.values()])
        for tensor in cache.tensors.values():
            null = tensor.tensor.select(tensor.axes.split().index("block"), 0)
            assert not null.contiguous().view(torch.int8).any()
    assert all(torch.equal(one, eight) for one, eight in zip(*results, strict=True))


def test_pages_that_no_query_sees_are_not_read():
    """The null block may hold anything: rows of the batch tables end in it."""
    client = make_client(model="sliding", max_model_len=512)
    expected = make_client(model="sliding").complete(make_prompt(200), 20)
    decode_with(client, (2,))
    for tensor in client.engine.runner.cache.tensors.values():
        tensor.tensor.select(tensor.axes.split().index("block"), 0).view(torch.int8).fill_(-1)
    assert client.complete(make_prompt(200), 20) == expected


def test_steps_of_other_shapes_run_as_they_are():
    client = make_client(max_num_batched_tokens=64)
    decoder = decode_with(client, (2,))
    for index in range(3):
        client.submit(str(index), make_prompt(20, seed=index), 12)
    client.steps(1)
    assert decoder.num_runs == 0
    client.run("0", "1", "2")
    assert decoder.num_runs == 0, "three requests are more than two rows"
    client.submit("one", make_prompt(70, seed=9), 12)
    client.steps(2)
    assert decoder.num_runs == 0
    client.run("one")
    assert decoder.num_runs == 11


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (16, [1, 2, 4, 8, 16])]
)
def test_padded_sizes(most, sizes):
    assert padded_sizes(most) == sizes

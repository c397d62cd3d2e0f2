"""Decode steps replayed from CUDA graphs: the eager tokens, with new blocks, zeroing and changing batches."""

import gc

import pytest
import torch

from benchmarks.node.decode import Decoder
from tests.node.decoding import DecodingRunner, decode_with, padded_sizes
from tests.node.node_harness import MODEL_NAMES, Client, make_client, make_prompt
from tests.node.test_zeroing import NoZeroer, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (40, 7, 129, 96, 1)
COUNTS = (50, 9, 20, 33, 3)


def with_graphs(client: Client) -> DecodingRunner:
    """Have the client's decode steps replayed from CUDA graphs."""
    return decode_with(client, padded_sizes(client.engine.options.max_num_seqs), captured=True)


def run_all(client) -> list[list[int]]:
    """Requests that come and go, so that batches grow and shrink and blocks change owners."""
    for index, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        client.submit(str(index), make_prompt(length, seed=length), count)
        client.steps(3)
    client.run(*map(str, range(len(LENGTHS))))
    return [client.tokens(str(i)) + client.drafts(str(i)) for i in range(len(LENGTHS))]


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_replayed_steps_give_the_eager_tokens(name, dtype):
    options = {
        "model": name,
        "kv_cache_dtype": dtype,
        "device": "cuda",
        "max_num_seqs": 5,
        "max_model_len": 256,
        "enable_prefix_caching": False,
    }
    eager = make_client(**options)
    expected = run_all(eager)
    client = make_client(**options)
    runner = with_graphs(client)
    assert sorted(runner.decoder._graphs) == padded_sizes(5) == [1, 2, 4, 5]
    poison(client, 0x7F)
    assert run_all(client) == expected
    assert runner.num_runs > 40


def test_capturing_changes_no_byte_of_the_cache():
    client = make_client(model="hybrid", device="cuda", max_model_len=256)
    with_graphs(client)
    for tensor in client.engine.runner.cache.tensors.values():
        assert not tensor.tensor.contiguous().view(torch.uint8).any()


def test_a_replayed_step_reads_new_blocks_only_after_they_were_zeroed():
    prompt = make_prompt(60)
    options = {"model": "hybrid", "kv_cache_dtype": "fp8_e4m3", "device": "cuda", "max_model_len": 256}
    expected = make_client(**options).complete(prompt, 20)
    results = []
    for zeroed in (True, False):
        client = make_client(**options)
        with_graphs(client)
        client.submit("r", prompt, 20)
        client.steps(2)
        poison(client, 0xFF)
        if not zeroed:
            client.engine.runner.zeroer = NoZeroer()
        client.run("r")
        results.append(client.tokens("r"))
    assert results[0] == expected
    # Token 64 is the first in the next block; from there on every score is NaN.
    assert results[1][:4] == expected[:4]
    assert results[1][6:] == [0] * 14


def test_graphs_of_a_node_that_is_garbage_do_not_disturb_a_capture(monkeypatch):
    """The collector may run at any allocation, so during a capture too, and destroy a graph there."""
    forward = Decoder._forward

    def collecting(self, size):
        if torch.cuda.is_current_stream_capturing() and gc.isenabled():
            gc.collect()
        return forward(self, size)

    thresholds = gc.get_threshold()
    gc.set_threshold(1 << 30)
    try:
        client = make_client(device="cuda", max_model_len=256)
        with_graphs(client)
        # A cycle, so that only the collector can free the node and its graphs.
        client.engine.runner.decoder.owner = client
        del client
        monkeypatch.setattr(Decoder, "_forward", collecting)
        assert with_graphs(make_client(device="cuda", max_model_len=256)).decoder._graphs
    finally:
        gc.set_threshold(*thresholds)

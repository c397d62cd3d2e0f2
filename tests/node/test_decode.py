"""Batched decode steps of fixed shapes, also from CUDA graphs: the tokens of the plain path."""

import gc

import pytest
import torch

from benchmarks.node.decode import Decoder
from kvconnect.node.engine import Runner, by_request
from tests.node.node_harness import DEVICES, MODEL_NAMES, ON_GPU, Client, make_client, make_prompt
from tests.node.test_zeroing import NoZeroer, poison

LENGTHS = (40, 7, 129, 96, 1)
PROMPTS = [make_prompt(length, seed=length) for length in LENGTHS]
COUNTS = (50, 9, 20, 33, 3)


class DecodingRunner(Runner):
    """Takes a runner's place: ``decoder`` runs the steps that only decode and fit, ``num_runs`` of them."""

    def __init__(self, runner, sizes, *, captured):
        super().__init__(runner.model, runner.cache)
        self.decoder = Decoder(runner.model, runner.cache, sizes=sizes, captured=captured)
        self.num_runs = 0

    @torch.inference_mode()
    def execute(self, step):
        chunks = step.chunks
        if len(chunks) > self.decoder.sizes[-1] or any(
            len(chunk.token_ids) > 1 or not chunk.samples for chunk in chunks
        ):
            return super().execute(step)
        self.num_runs += 1
        return by_request([chunk.request_id for chunk in chunks], self.decoder.run(step))


def decode_with(client: Client, *sizes: int) -> DecodingRunner:
    """Have a client's decode steps run so, from graphs where there is a GPU. Returns its new runner."""
    captured = client.engine.runner.cache.device.type == "cuda"
    client.engine.runner = made = DecodingRunner(client.engine.runner, sizes, captured=captured)
    return made


def with_graphs(client: Client) -> DecodingRunner:
    """Have the client's decode steps replayed from CUDA graphs, of all sizes that a node could want."""
    most = client.engine.options.max_num_seqs
    return decode_with(client, *(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("name", [*MODEL_NAMES, "wide"])
def test_batched_decoding_gives_the_tokens_of_the_plain_path(name, dtype, device):
    """Requests come and go, blocks grow, and free blocks hold NaN where that is zeroed away."""
    options = {"model": name, "kv_cache_dtype": dtype, "enable_prefix_caching": False, "max_model_len": 256}
    plain = make_client(device=device, **options)
    expected = [plain.complete(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    client = make_client(device=device, **options)
    runner = decode_with(client, 1, 2, 4)
    poison(client, 0x7F)
    assert client.together(PROMPTS, *COUNTS, steps=3) == expected
    assert runner.num_runs > 40


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
        decode_with(client, size)
        client.steps(5)
        cache = client.engine.runner.cache
        storages = {t.tensor.untyped_storage().data_ptr(): t.tensor for t in cache.tensors.values()}
        results.append([_bytes_of(tensor) for tensor in storages.values()])
        for tensor in cache.tensors.values():
            null = tensor.tensor.select(tensor.axes.split().index("block"), 0)
            assert not null.contiguous().view(torch.int8).any()
    assert all(torch.equal(one, eight) for one, eight in zip(*results, strict=True))


@pytest.mark.gpu
@ON_GPU[1]
def test_capturing_changes_no_byte_of_the_cache():
    client = make_client(model="hybrid", device="cuda", max_model_len=256)
    with_graphs(client)
    for tensor in client.engine.runner.cache.tensors.values():
        assert not tensor.tensor.contiguous().view(torch.uint8).any()


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.parametrize("zeroed", [True, False])
def test_a_replayed_step_reads_new_blocks_only_after_they_were_zeroed(zeroed):
    prompt = make_prompt(60)
    options = {"model": "hybrid", "kv_cache_dtype": "fp8_e4m3", "device": "cuda", "max_model_len": 256}
    expected = make_client(**options).complete(prompt, 20)
    client = make_client(**options)
    with_graphs(client)
    client.submit("r", prompt, 20)
    client.steps(2)
    poison(client, 0xFF)
    if not zeroed:
        client.engine.runner.zeroer = NoZeroer()
        # Token 64 is the first in the next block; from there on every score is NaN.
        expected[6:] = [0] * 14
    client.run("r")
    assert client.tokens("r")[:4] == expected[:4]
    assert client.tokens("r")[6:] == expected[6:]


@pytest.mark.gpu
@ON_GPU[1]
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

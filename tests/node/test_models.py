"""Models: every prompt token and every cached byte matters, however the work was cut."""

import pytest
import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import ConfigError
from kvconnect.node.attention import AttentionPages, StatePages
from kvconnect.node.engine import Runner
from kvconnect.node.kv_cache import NodeCache
from kvconnect.node.models import CacheSizing, build_model
from kvconnect.node.request import EngineStep, ScheduledChunk
from tests.caches import overlaid_groups
from tests.node.node_harness import MODEL_NAMES, make_client, make_prompt


class Bench:
    """One request in row 1 of a bare cache, without a scheduler."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        model = build_model(name)
        self.cache = NodeCache(
            model.layout(CacheSizing(None, 1024)), num_blocks=128, max_num_seqs=2, max_model_len=1024
        )
        self.runner = Runner(model, self.cache)
        self.prompt = prompt
        self.blocks, first = [], 3
        for group in self.cache.config.groups:
            count = 1 if group.is_state else -(-(len(prompt) + 32) // group.block_size)
            self.blocks.append(list(range(first, first + count)))
            first += count
        self.runner.prepare(EngineStep(new_rows=[(1, self.blocks)]))
        self.feed(0, prompt[:-1])

    def feed(self, start: int, tokens: list[int]) -> tuple[int, int | None]:
        return self.runner.execute(EngineStep(chunks=[ScheduledChunk("r", 1, start, tokens, True)]))["r"]

    def states(self) -> dict[str, torch.Tensor]:
        return {
            name: pages.pages.clone()
            for name, pages in self.cache.pages.items()
            if isinstance(pages, StatePages)
        }

    def decode(self, count: int) -> list[tuple[int, int | None]]:
        """Decode from the last prompt token on, and leave the cache of the prompt as it was."""
        saved = self.states()
        token, out = self.prompt[-1], []
        for position in range(len(self.prompt) - 1, len(self.prompt) - 1 + count):
            out.append(self.feed(position, [token]))
            token = out[-1][0]
        for name, pages in saved.items():
            self.cache.pages[name].pages.copy_(pages)  # type: ignore[union-attr]
        return out


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_changing_any_prompt_token_changes_the_output(name):
    client = make_client(model=name, enable_prefix_caching=False)
    prompt = make_prompt(600)
    expected = client.complete(prompt)
    assert client.complete(prompt) == expected
    for position in (0, 1, 307, 598, 599):
        changed = list(prompt)
        changed[position] ^= 1
        assert client.complete(changed) != expected, f"token {position} does not matter"


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_flipping_one_bit_of_any_block_in_use_changes_the_output(name):
    bench = Bench(name, make_prompt(150 if name != "mixed" else 300, seed=3))
    expected = bench.decode(8)
    assert bench.decode(8) == expected
    rng = torch.Generator().manual_seed(0)
    used = len(bench.prompt) - 1
    for layer, pages in bench.cache.pages.items():
        group = bench.cache.group_of[layer]
        spec = bench.cache.config.groups[group].spec_of(layer)
        if isinstance(pages, StatePages):
            for _ in range(6):
                byte = int(torch.randint(spec.content_bytes, (), generator=rng))
                pages.pages[bench.blocks[group][0], byte] ^= 1
                assert bench.decode(8) != expected, f"{layer}: byte {byte} does not matter"
                pages.pages[bench.blocks[group][0], byte] ^= 1
            continue
        assert isinstance(pages, AttentionPages)
        size = bench.cache.kernel_block_sizes[group]
        window = getattr(spec, "sliding_window", None)
        first = 0 if window is None else used - window + 1
        row = bench.cache.tables.row(group, 1)
        for block in range(first // size, -(-used // size)):
            low, high = max(first, block * size), min(used, (block + 1) * size)
            position = int(torch.randint(low, high, (), generator=rng))
            for rows in (pages.keys, pages.values) if pages.values else (pages.keys,):
                bits = rows.pages.view(torch.int16)
                head = int(torch.randint(bits.shape[2], (), generator=rng))
                column = int(torch.randint(bits.shape[3], (), generator=rng))
                place = (int(row[block]), position % size, head, column)
                bits[place] ^= 1
                assert bench.decode(8) != expected, f"{layer}: {place} does not matter"
                bits[place] ^= 1
    assert bench.decode(8) == expected


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tokens_do_not_depend_on_the_token_budget(name):
    prompt = make_prompt(333, seed=5)
    results = [
        make_client(model=name, max_num_batched_tokens=budget).complete(prompt, 12)
        for budget in (1024, 50, 17)
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_cache_can_be_described_as_regions(name):
    cache = make_client(model=name).engine.runner.cache
    table = RegionTable.build(cache.config, cache.kernel_block_sizes, cache.tensors)
    overlaid = {"sliding": 3, "hybrid": 6}
    assert len(overlaid_groups(table)) == overlaid.get(name, 0)


def test_mixed_registers_two_kernel_blocks_per_block():
    cache = make_client(model="mixed", num_blocks=10).engine.runner.cache
    assert cache.kernel_block_sizes == {0: 64}
    blocks = {
        name: tensor.tensor.shape[tensor.axes.split().index("block")]
        for name, tensor in cache.tensors.items()
    }
    assert set(blocks.values()) == {20}
    pages = {spec.page_size_bytes for _, spec in cache.config.groups[0].layer_specs()}
    assert len(pages) == 2


def test_seed_and_name_choose_the_weights():
    prompt = make_prompt(20)
    outputs = [make_client(seed=seed).complete(prompt) for seed in (0, 1, 0)]
    assert outputs[0] == outputs[2] != outputs[1]


@pytest.mark.parametrize("size", [32, 64])
def test_block_size_does_not_change_tokens(size):
    prompt = make_prompt(90)
    assert make_client(block_size=size).complete(prompt) == make_client().complete(prompt)


def test_bad_choices_are_named():
    with pytest.raises(ConfigError, match="'nope' is unknown.*gqa"):
        make_client(model="nope")
    with pytest.raises(ConfigError, match="at least 2[0-9]"):
        make_client(model="hybrid", block_size=16)
    with pytest.raises(ConfigError, match="TORCH_LATENT_64 takes 64"):
        make_client(model="mixed", block_size=32)
    with pytest.raises(ConfigError, match="reserved_blocks 300"):
        make_client(num_blocks=256, reserved_blocks=300)


def test_fresh_state_blocks_are_zeroed():
    client = make_client(model="hybrid")
    prompt = make_prompt(40)
    expected = client.complete(prompt)
    for tensor in client.engine.runner.cache.tensors.values():
        tensor.tensor.view(torch.int8).fill_(0x55)
    assert client.complete(prompt) == expected

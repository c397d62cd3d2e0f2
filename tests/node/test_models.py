"""Models: every prompt token and every cached byte matters, however the work was cut."""

from collections.abc import Sequence

import pytest
import torch

import tests.node.wide_model  # noqa: F401
from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import ConfigError
from kvconnect.node.attention import AttentionPages, StatePages
from kvconnect.node.engine import Runner
from kvconnect.node.kv_cache import NodeCache
from kvconnect.node.models import build_model
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import EngineStep, ScheduledChunk
from tests.caches import overlaid_groups
from tests.node.node_harness import DEVICES, MODEL_NAMES, answer_of, make_client, make_prompt


class Bench:
    """One request in row 1 of a bare cache, without a scheduler."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        model = build_model(name)
        options = NodeOptions(num_blocks=128, max_num_seqs=2, max_model_len=1024)
        self.cache = NodeCache(model.layout(None, 1024), options)
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

    def decode(self, expected: Sequence[tuple[int, int | None]] = ()) -> list[tuple[int, int | None]]:
        """Decode eight tokens, or up to the first one that is not the expected.

        It begins at the last prompt token, and leaves the cache of the prompt as it was.
        """
        states = [pages.pages for pages in self.cache.pages.values() if isinstance(pages, StatePages)]
        saved = [pages.clone() for pages in states]
        token, out = self.prompt[-1], []
        while len(out) < 8 and not (expected and out != expected[: len(out)]):
            out.append(self.feed(len(self.prompt) - 1 + len(out), [token]))
            token = out[-1][0]
        for pages, before in zip(states, saved, strict=True):
            pages.copy_(before)
        return out

    def bits(self, rng: torch.Generator):
        """A few places of every block in use of every layer: the bits, an index into them, and its name."""

        def below(end: int, first: int = 0) -> int:
            return int(torch.randint(first, end, (), generator=rng))

        used = len(self.prompt) - 1
        for layer, pages in self.cache.pages.items():
            group = self.cache.group_of[layer]
            spec = self.cache.config.groups[group].spec_of(layer)
            if isinstance(pages, StatePages):
                for _ in range(6):
                    yield pages.pages, (self.blocks[group][0], below(spec.content_bytes)), layer
                continue
            assert isinstance(pages, AttentionPages)
            size, first = self.cache.kernel_block_sizes[group], spec.retention.seen(used)[0].start
            row = self.cache.tables.row(group, 1)
            for block in range(first // size, -(-used // size)):
                position = below(min(used, (block + 1) * size), max(first, block * size))
                for rows in (pages.keys, pages.values) if pages.values else (pages.keys,):
                    bits = rows.pages.view(torch.int16)
                    place = (int(row[block]), position % size, below(bits.shape[2]), below(bits.shape[3]))
                    yield bits, place, layer


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_changing_any_prompt_token_changes_the_output(name):
    client = make_client(model=name, enable_prefix_caching=False)
    prompt = make_prompt(300)
    expected = client.complete(prompt, 2)
    assert client.complete(prompt, 2) == expected
    for position in (0, 1, 157, 298, 299):
        changed = list(prompt)
        changed[position] ^= 1
        assert client.complete(changed, 2) != expected, f"token {position} does not matter"


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_flipping_one_bit_of_any_block_in_use_changes_the_output(name):
    bench = Bench(name, make_prompt(150 if name != "mixed" else 300, seed=3))
    expected = bench.decode()
    assert bench.decode() == expected
    for bits, place, layer in bench.bits(torch.Generator().manual_seed(0)):
        bits[place] ^= 1
        assert bench.decode(expected) != expected, f"{layer}: {place} does not matter"
        bits[place] ^= 1
    assert bench.decode() == expected


def test_a_changed_cache_of_the_wide_model_changes_tokens():
    """It reads a few rows only, so a single bit may not matter."""
    client = make_client(model="wide")
    client.submit("a", make_prompt(200), 30)
    client.steps(2)
    for cached in client.engine.runner.cache.tensors.values():
        cached.tensor[:] = 0.5
    client.run("a")
    assert client.tokens("a") != answer_of(make_prompt(200), 30, model="wide")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("name", [*MODEL_NAMES, "wide"])
def test_tokens_depend_on_neither_budget_nor_concurrency(name, dtype, device):
    prompts = [make_prompt(length, seed=length) for length in (333, 33, 64)]
    options = {"model": name, "kv_cache_dtype": dtype, "enable_prefix_caching": False, "device": device}
    expected = [answer_of(prompt, 12, **options) for prompt in prompts]
    assert make_client(**options, max_num_batched_tokens=17).together(prompts, 12) == expected


@pytest.mark.parametrize("size", [32, 64])
def test_block_size_does_not_change_tokens(size):
    prompt = make_prompt(90)
    assert make_client(block_size=size).complete(prompt) == answer_of(prompt)


def test_seed_and_name_choose_the_weights():
    prompt = make_prompt(20)
    outputs = [make_client(seed=seed).complete(prompt) for seed in (0, 1, 0)]
    assert outputs[0] == outputs[2] != outputs[1]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_cache_can_be_described_as_regions(name):
    cache = make_client(model=name).engine.runner.cache
    table = RegionTable.build(cache.config, cache.kernel_block_sizes, cache.tensors)
    assert len(overlaid_groups(table)) == {"sliding": 3, "hybrid": 6}.get(name, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "nope"}, "'nope' is unknown.*gqa"),
        ({"model": "hybrid", "block_size": 16}, "at least 2[0-9]"),
        ({"model": "hybrid", "block_size": 32, "kv_cache_dtype": "fp8_e4m3"}, "at least 41"),
        ({"model": "mixed", "block_size": 32}, "TORCH_LATENT_64 takes 64"),
        ({"block_size": 32, "kernel_block_sizes": (64,)}, "TORCH_GROUPED takes 64"),
        ({"num_blocks": 256, "reserved_blocks": 300}, "reserved_blocks 300"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'; accepted: auto, bf16, fp8_e4m3"),
    ],
)
def test_bad_choices_are_named(options, said):
    with pytest.raises(ConfigError, match=said):
        make_client(**options)

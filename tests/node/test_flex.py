"""Pages that the buffers of flex attention name: the tokens of the plain path, and of no other page."""

from __future__ import annotations

import pytest
import torch

from kvconnect.runner_kit.flex_capacity import FlexBuffers, FlexCapacity
from tests.node.node_harness import DEVICES, MODEL_NAMES, ON_GPU, answer_of, make_client, make_prompt

# Three share pages, so one query group meets a page in several requests; and one token, one page exactly and
# one token more, and more than a window.
COMMON = make_prompt(128, seed=1)
PROMPTS = [COMMON, *(COMMON + make_prompt(n, seed=n) for n in (5, 20, 90))]
PROMPTS += [make_prompt(length, seed=length) for length in (1, 16, 17, 64, 300)]
KINDS = [
    *((name, budget, {}) for name in MODEL_NAMES for budget in (1024, 33)),
    ("gqa", 1024, {"block_size": 128}),
    ("mixed", 1024, {"block_size": 256}),
    ("hybrid", 1024, {"kv_cache_dtype": "fp8_e4m3"}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "budget", "options"), KINDS)
def test_tokens_are_those_of_the_plain_path(name, budget, options, device):
    options = {"model": name, "device": device, **options}
    expected = [answer_of(prompt, **options) for prompt in PROMPTS]
    options |= {"attention_backend": "flex", "max_num_batched_tokens": budget}
    client = make_client(**options)
    # What they share is there before they begin.
    assert client.complete(COMMON) == expected[0]
    assert client.together(PROMPTS) == expected


def wrong_page(blocks):
    last = int(blocks.kv_num_blocks[-1]) - 1
    blocks.kv_indices[-1, last] += 1


def lost_page(blocks):
    blocks.kv_num_blocks[-1] -= 1


def page_of_a_stranger(blocks):
    blocks.kv_indices[0, 0] = 200


@pytest.mark.parametrize("change", [wrong_page, lost_page, page_of_a_stranger])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_wrong_entry_changes_tokens(monkeypatch, name, change):
    """Without it the test above would be empty."""
    fill = FlexBuffers.fill

    def fill_and_change(self, **batch):
        blocks = fill(self, **batch)
        change(blocks)
        return blocks

    expected = answer_of(PROMPTS[-1], 4, model=name)
    monkeypatch.setattr(FlexBuffers, "fill", fill_and_change)
    assert make_client(model=name, attention_backend="flex").complete(PROMPTS[-1], 4) != expected


def filled(device: str):
    limits = FlexCapacity(512, 2048, 16, 16)
    buffers, generator = FlexBuffers(limits, device), torch.Generator().manual_seed(0)
    for window in (None, 96):
        queries = torch.randint(0, 60, (8,), generator=generator)
        lengths = queries + torch.randint(1, 1900, (8,), generator=generator)
        # Few ids, so that groups meet the same page several times, and null pages.
        tables = torch.randint(0, 300, (8, 128), generator=generator, dtype=torch.int32).to(device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            buffers.fill(query_lens=queries, seq_lens=lengths, sliding_window=window, block_tables=tables)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        yield buffers.kv_indices.cpu(), buffers.kv_num_blocks.cpu()


@pytest.mark.gpu
@ON_GPU[1]
def test_a_fill_waits_for_nothing_and_gives_what_it_gives_on_a_cpu():
    for (ids, counts), (same_ids, same_counts) in zip(filled("cuda"), filled("cpu"), strict=True):
        assert torch.equal(ids, same_ids)
        assert torch.equal(counts, same_counts)

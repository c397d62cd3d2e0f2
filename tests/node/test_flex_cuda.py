"""The flex-attention backend on a GPU: the tokens of the other one there, and of the same one on a CPU."""

from __future__ import annotations

import pytest
import torch

from kvconnect.runner_kit.flex_capacity import FlexBuffers, FlexCapacity
from tests.node.node_harness import MODEL_NAMES, make_client, make_prompt
from tests.node.test_flex import corrupted, flex_parts, together, wrong_page

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [make_prompt(128, seed=1) + make_prompt(n, seed=n) for n in (5, 20, 90)]
PROMPTS += [make_prompt(length, seed=length) for length in (1, 16, 64, 300)]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tokens_are_equal(name):
    plain = make_client(model=name, device="cuda")
    alone = make_client(model=name, device="cuda", attention_backend="flex")
    expected = [plain.complete(prompt) for prompt in PROMPTS]
    assert [alone.complete(prompt) for prompt in PROMPTS] == expected
    for budget in (1024, 33):
        client = make_client(
            model=name, device="cuda", attention_backend="flex", max_num_batched_tokens=budget
        )
        assert all(part.buffers.kv_indices.is_cuda for part in flex_parts(client).values())
        assert together(client, PROMPTS) == expected
    on_cpu = make_client(model=name, attention_backend="flex")
    assert [on_cpu.complete(prompt) for prompt in PROMPTS] == expected


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_wrong_entry_changes_tokens(monkeypatch, name):
    expected = make_client(model=name, device="cuda").complete(PROMPTS[-1], 4)
    corrupted(monkeypatch, wrong_page)
    client = make_client(model=name, device="cuda", attention_backend="flex")
    assert client.complete(PROMPTS[-1], 4) != expected


def test_a_fill_waits_for_nothing_and_gives_what_it_gives_on_a_cpu():
    limits = FlexCapacity(512, 2048, 16, 16)
    on_gpu, on_cpu = FlexBuffers(limits, "cuda"), FlexBuffers(limits)
    generator = torch.Generator().manual_seed(0)
    for window in (None, 96):
        queries = torch.randint(0, 60, (8,), generator=generator)
        lengths = queries + torch.randint(1, 1900, (8,), generator=generator)
        # Few ids, so that groups meet the same page several times, and null pages.
        tables = torch.randint(0, 300, (8, 128), generator=generator, dtype=torch.int32)
        batch = {"query_lens": queries, "seq_lens": lengths, "sliding_window": window}
        on_cpu.fill(**batch, block_tables=tables)
        moved = tables.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_gpu.fill(**batch, block_tables=moved)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(on_gpu.kv_indices.cpu(), on_cpu.kv_indices)
        assert torch.equal(on_gpu.kv_num_blocks.cpu(), on_cpu.kv_num_blocks)

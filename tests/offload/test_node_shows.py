"""The benchmark that shows the offload of a node, whole, and what it refuses."""

from __future__ import annotations

import json
import os

import pytest
import torch

from benchmarks.node.attention import attend_torch
from benchmarks.options import run_benchmark
from benchmarks.page_cache import drop_pages, resident_share
from benchmarks.returning.model import PromptAttention
from benchmarks.returning.options import Options
from benchmarks.returning.runner import bench_returning
from kvconnect.errors import ConfigError
from kvconnect.node.attention import AttentionPages, PagedRows, Segment


def test_the_benchmark_finds_every_prompt_on_every_way(capsys, tmp_path):
    options = Options(prompt_tokens=200, prompts=3, batched_tokens=64, disk_path=tmp_path)
    assert run_benchmark("returning", bench_returning, options, json_output=True) == 0
    report = json.loads(capsys.readouterr().out)
    ways = {way["way"]: way for way in report["ways"]}
    assert list(ways) == ["recomputed", "computed, and kept", "own prefix cache", "CPU tier", "disk tier"]
    found = [way["cached_tokens"] for way in ways.values()]
    assert found == [0, 0, 192, 192, 192]
    assert ways["disk tier"]["as_recomputed"] == 3
    assert report["kv_bytes"] == 200 * options.size.token_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "tpu"}, "device is 'tpu'; accepted: cpu, cuda"),
        ({"model": "9b"}, "model is '9b'"),
        ({"prompts": 2}, "prompts is 2, it must be at least 3"),
        ({"prompt_tokens": 31}, "prompt_tokens is 31, it must be at least 32"),
        ({"timeout_s": 0.0}, "more than 0"),
    ],
)
def test_the_benchmark_refuses(options, said):
    with pytest.raises(ConfigError, match=said):
        Options(**options)


def test_prompt_attention_sees_what_one_query_at_a_time_sees():
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn((9, 4, 2, 16), generator=generator)
    table = torch.tensor([[3, 7, 1, 5], [2, 8, 4, 6]], dtype=torch.int32)
    segments = [Segment(0, 5, 6, 0), Segment(1, 0, 13, 6)]
    query = torch.randn((19, 4, 8), generator=generator)
    attention = PromptAttention(4)
    attention.begin(segments, table)
    mixed = attention.attend(
        AttentionPages(PagedRows(pages[..., :8]), PagedRows(pages[..., 8:])),
        query,
        window=None,
        value_width=None,
    )
    rows = torch.tensor([0] * 6 + [1] * 13)
    positions = torch.cat((torch.arange(5, 11), torch.arange(13)))
    torch.testing.assert_close(mixed, attend_torch(query, pages, table[rows], positions))


def test_pages_of_files_are_dropped(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one").write_bytes(os.urandom(4 << 20))
    (tmp_path / "empty").write_bytes(b"")
    before = resident_share(tmp_path)
    if before is None:
        pytest.skip("this system does not say what it has in memory")
    assert before > 0.9
    drop_pages(tmp_path)
    after = resident_share(tmp_path)
    assert after is not None
    assert after <= before

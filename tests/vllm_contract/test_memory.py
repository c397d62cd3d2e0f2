"""What of a GPU is vLLM's, so that slots leave it alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.config import CacheConfig

from kvconnect.vllm.traits import still_taken_bytes

GIB = 1 << 30


def test_it_is_read_where_vllm_has_it(monkeypatch):
    config = SimpleNamespace(cache_config=CacheConfig(gpu_memory_utilization=0.5))
    assert still_taken_bytes(config, torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * GIB)
    assert still_taken_bytes(config, torch.device("cuda", 1)) == 10 * GIB
    # Where the size of the cache was given in bytes, it may have passed its share.
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * GIB)
    assert still_taken_bytes(config, torch.device("cuda", 1)) == 0

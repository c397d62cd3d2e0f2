"""What of a GPU is vLLM's, so that slots leave it alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.config import CacheConfig

from kvconnect.vllm.memory import promised_bytes, still_taken_bytes

GIB = 1 << 30


def test_what_is_promised_and_not_taken():
    assert promised_bytes(140 * GIB, 0.9, 100 * GIB) == 26 * GIB
    # The size of the cache was given in bytes.
    assert promised_bytes(140 * GIB, 0.1, 100 * GIB) == 0


def test_it_is_read_where_vllm_has_it(monkeypatch):
    config = SimpleNamespace(cache_config=CacheConfig(gpu_memory_utilization=0.5))
    assert still_taken_bytes(config, {"a": torch.zeros(1)}) == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * GIB)
    cache = SimpleNamespace(device=torch.device("cuda", 1))
    assert still_taken_bytes(config, {"a": cache}) == 10 * GIB

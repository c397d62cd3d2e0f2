"""What an engine is given: landing slots only, unless the configuration opens the direct path."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvconnect.cache.region_table import CacheTensor
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine.memory import MemoryEngine
from kvconnect.worker.connector import WorkerConnector

SPEC = FullAttentionSpec(16, 2, 8, torch.float16)


class Recording(MemoryEngine):
    def register(self, spans):
        self.given = list(spans)
        super().register(spans)


def registered(role, **extra):
    """The spans that a worker's engine is given, and the addresses of its cache's first and last byte."""
    config = parse_kv_transfer_config({"kv_role": role, "kv_connector_extra_config": extra})
    engine = Recording("127.0.0.1")
    worker = WorkerConnector(
        config,
        KVCacheConfig(8, (KVCacheGroup(("a",), SPEC),)),
        {0: 16},
        model="m",
        registry=CollectorRegistry(),
        engine=engine,
    )
    cache = torch.zeros(8, 2, 16, 2, 8, dtype=torch.float16)
    worker.register_kv_caches({"a": CacheTensor(cache, "block plane token head content")})
    worker.close()
    return engine.given, cache.data_ptr(), cache.data_ptr() + cache.numel() * 2 - 1


def covers(spans, address):
    return any(span.address <= address < span.address + span.length_bytes for span in spans)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("path", ["packed", "auto", "direct"])
def test_pages_are_registered_only_where_the_direct_path_is_open(role, path):
    spans, first, last = registered(role, path=path, slot_bytes=1 << 16)
    assert covers(spans, first) == covers(spans, last) == (path != "packed")
    slots = {"kv_producer": 1, "kv_consumer": 1, "kv_both": 2}[role] if path != "direct" else 0
    assert len(spans) == slots + (path != "packed")

"""What a worker opened is closed where it cannot be set up: vLLM drops it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.errors import ConfigError
from tests.ports import free_port
from tests.vllm_bench.engine import Engine
from tests.vllm_bench.links import Links
from tests.vllm_bench.model import MODELS


def test_an_offload_that_is_refused_leaves_no_side_channel_open(tmp_path):
    (tmp_path / "file").touch()
    offload = {"cpu_bytes": 1 << 20, "disk_path": str(tmp_path / "file"), "disk_bytes": 1 << 20}
    extra = {"engine": "memory", "insecure": True, "port": free_port(), "offload": offload}
    model = next(model for model in MODELS.values() if model.caches_prefixes)
    for _ in range(2):
        # What listens at the port was closed the first time.
        with pytest.raises(ConfigError, match="disk_path"):
            Engine("decode", model, role="kv_both", capacity=64, layout="LBNHC", extra=extra, links=Links())

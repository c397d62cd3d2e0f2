"""Each path of this vLLM is served by the router, or left to operators: none is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

import vllm

from kvconnect.router.endpoints import ALONE, PASSED, SPLIT, STORED

LEFT_TO_OPERATORS = {
    *("/abort_requests", "/collective_rpc", "/docs", "/fault_tolerance/apply"),
    *("/fault_tolerance/status", "/finish_weight_update", "/get_world_size"),
    *("/inference/v1/abort_requests", "/init_weight_transfer_engine", "/is_paused"),
    *("/is_scaling_elastic_ep", "/is_sleeping", "/kv_event_sources", "/pause", "/readyz"),
    *("/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache"),
    *("/resume", "/scale_elastic_ep", "/server_info", "/shutdown_weight_transfer_engine", "/sleep"),
    *("/start_draft_weight_update", "/start_profile", "/start_weight_update", "/stop_profile"),
    *("/update_weight_version", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/wake_up", "/weight_checker", "/weight_info"),
}
"""What controls or shows one server."""
OF_THE_ROUTER = {"/health", "/ready", "/metrics"}
NOT_HTTP = {"/v1/realtime"}
"""A websocket."""


def test_no_path_is_forgotten():
    served = {*SPLIT, *ALONE, *(path for _, path in (*STORED, *PASSED))}
    known = served | LEFT_TO_OPERATORS | OF_THE_ROUTER | NOT_HTTP
    found = set()
    for file in (Path(vllm.__file__).parent / "entrypoints").rglob("*.py"):
        found |= set(re.findall(r'(?:post|get|websocket|add_api_route)\(\s*"(/[^"\s]*)"', file.read_text()))
    assert len(found) > 40
    assert found - known == set()
